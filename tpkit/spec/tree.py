"""Reads the module tree: splits every mapping into its kind's words and its children, and compiles both."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from tpkit.errors import did_you_mean
from tpkit.modules import ModuleType, Options
from tpkit.registry import Registry
from tpkit.spec.compiling import Context, compile_condition, compile_slot, compile_words
from tpkit.spec.data import Data, Items, Scalar, Table, to_python
from tpkit.spec.draft import Draft, StepDraft
from tpkit.spec.expr import ExprError, Name, StepExpr
from tpkit.spec.parsing import parse_step
from tpkit.spec.problems import shown
from tpkit.spec.slot_types import SlotType
from tpkit.spec.slots import Slot
from tpkit.spec.words import COMMON, KINDS, NORMS, ParameterOptions, ProjectionOptions

__all__ = ["TreeReader"]

_COUNT = SlotType(frozenset({"int"}), positive=True)
#: kinds that have children
_PARENTS = ("module", "container")


class TreeReader:
    """Turns the data of a tree into drafts; what is wrong is noted in the context's problems."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def branches(self, name: str, data: Data, where: str, context: Context) -> tuple[Draft, ...]:
        """Returns the branches of a node: one, or those of a list, the first of which that holds is taken."""
        if isinstance(data, Table):
            return (self.node(name, data, where, context),)
        if isinstance(data, Items) and data.items and all(isinstance(item, Table) for item in data.items):
            tables = [item for item in data.items if isinstance(item, Table)]
            for number, table in enumerate(tables[:-1]):
                if "when" not in table:
                    message = "this branch always holds; the ones after it are never reached"
                    context.problems.add(table.mark, f"{where}[{number}]", message)
            return tuple(self.node(name, t, f"{where}[{i}]", context) for i, t in enumerate(tables))
        context.problems.add(data.mark, where, f"a node is a mapping, not {shown(to_python(data))}")
        return ()

    def node(self, name: str, table: Table, where: str, context: Context) -> Draft:
        """Returns one node with everything below it."""
        kind, word = _kind_of(table)
        plugin, options = self._lookup(kind, word, table, where, context)
        inner = context.in_repeat() if "repeat" in table else context
        words = compile_words(table, options, where, inner) if options else {}
        if kind != "container" and options is None:  # its word is not known, nor are the others then
            known: set[str] = set(table.entries)
        else:
            known = {*COMMON, *(options.model_fields if options else ())}
            known.update({"module": ("module",), "container": ("forward", "stacked")}.get(kind, ()))
        if kind == "projection":
            known.add("stacked")
        children = self._children(table, kind, known, where, inner)
        return Draft(
            name=name,
            where=where,
            table=table,
            kind=kind,  # type: ignore[arg-type]
            word=word,
            plugin=plugin,
            options=options,
            when=_condition(table, where, context),
            role=_literal(table, "role", str, where, context),
            inline=bool(_literal(table, "inline", bool, where, context)),
            repeat=_copies(table, "repeat", where, context),
            stacked=_copies(table, "stacked", where, context) if "stacked" in known else None,
            words=words,
            children=children,
            steps=_steps(table, where, inner) if kind == "container" else None,
        )

    def _lookup(
        self, kind: str, word: str, table: Table, where: str, context: Context
    ) -> tuple[Any, type[BaseModel] | None]:
        """Returns the plugin behind a word and the class of the node's words."""
        key = next((key for key, known in KINDS.items() if known == kind), "")
        mark = table.entries[key].mark if key in table else table.mark
        if kind == "module":
            if not self._known("module", word, mark, f"{where}.module", context):
                return None, None
            plugin = self.registry.load("module", word)
            return plugin, _options_of(plugin)
        if kind == "projection":
            known = self._known("style", word, mark, f"{where}.style", context)
            return (self.registry.load("style", word) if known else None), ProjectionOptions
        if kind == "norm":
            if word not in NORMS:
                message = f"no norm {word!r}{did_you_mean(word, NORMS)}; known: {', '.join(sorted(NORMS))}"
                context.problems.add(mark, f"{where}.norm", message)
                return None, None
            return None, NORMS[word]
        return None, ParameterOptions if kind == "parameter" else None

    def _known(self, kind: str, word: str, mark: Any, where: str, context: Context) -> bool:
        names = self.registry.names(kind)
        if word.partition("@")[0] in names:
            return True
        context.blind.append(word)
        message = f"no {kind} {word!r}{did_you_mean(word, names)}; installed: {', '.join(names) or 'none'}"
        if kind == "module":
            message += "; another one is a plugin that has to be installed"
        context.problems.add(mark, where, message)
        return False

    def _children(
        self, table: Table, kind: str, known: set[str], where: str, context: Context
    ) -> dict[str, tuple[Draft, ...]]:
        children = {}
        for key, data in table.entries.items():
            if key in known:
                continue
            guess = did_you_mean(key, [*known, *KINDS] if kind == "container" else known) if key not in KINDS else ""
            inner = kind == "projection" and isinstance(data, Table) and _kind_of(data)[0] == "parameter"
            if inner:
                children[key] = self.branches(key, data, f"{where}.{key}", context)
            elif kind not in _PARENTS or isinstance(data, Scalar) or (guess and not _looks_like_node(data)):
                what = {"container": "a container", "module": "a module"}.get(kind, f"a {kind}")
                message = f"unknown word {key!r} of {what}{guess}"
                if kind in _PARENTS and not guess:
                    message += "; a child is a mapping"
                context.problems.add(table.key_mark(key), where, message)
            elif not key or "." in key or key == "x":
                context.problems.add(table.key_mark(key), where, f"{key!r} is no name for a child")
            else:
                children[key] = self.branches(key, data, f"{where}.{key}", context)
        return children


def _kind_of(table: Table) -> tuple[str, str]:
    for key, kind in KINDS.items():
        value = table.get(key)
        if kind == "parameter" and isinstance(value, Items):
            return kind, ""
        if kind == "norm" and _has_tables(table):
            continue  # a norm has no mappings in it: this is a container, whose child 'norm' is mistaken
        if kind != "parameter" and isinstance(value, Scalar):
            return kind, str(value.value)
    return "container", ""


def _looks_like_node(data: Data) -> bool:
    tables = [data] if isinstance(data, Table) else list(data.items) if isinstance(data, Items) else []
    return any(isinstance(t, Table) and (_kind_of(t)[0] != "container" or _has_tables(t)) for t in tables)


def _has_tables(table: Table) -> bool:
    return any(isinstance(part, Table) for part in table.entries.values())


def _options_of(plugin: type[ModuleType]) -> type[BaseModel]:
    return getattr(plugin, "Options", Options)


def _condition(table: Table, where: str, context: Context) -> Any:
    data = table.get("when")
    return compile_condition(data, f"{where}.when", context) if data else None


def _copies(table: Table, word: str, where: str, context: Context) -> Slot | None:
    data = table.get(word)
    return compile_slot(data, _COUNT, f"{where}.{word}", context) if data else None


def _literal(table: Table, word: str, kind: type, where: str, context: Context) -> Any:
    data = table.get(word)
    if data is None:
        return None
    value = to_python(data)
    if not isinstance(value, kind) or value == "":
        needed = "true or false" if kind is bool else "text"
        context.problems.add(data.mark, f"{where}.{word}", f"{needed} is needed, not {shown(value)}")
        return None
    return value


def _steps(table: Table, where: str, context: Context) -> tuple[StepDraft, ...] | None:
    data = table.get("forward")
    if data is None:
        return None
    if not isinstance(data, Items) or not data.items:
        context.problems.add(data.mark, f"{where}.forward", "a list of steps is needed")
        return ()
    steps = [_step(item, f"{where}.forward[{i}]", context) for i, item in enumerate(data.items)]
    return tuple(step for step in steps if step)


def _step(data: Data, path: str, context: Context) -> StepDraft | None:
    when, text = None, data
    if isinstance(data, Table):
        for key in data:
            if key not in ("when", "do"):
                message = f"unknown word {key!r}{did_you_mean(key, ('when', 'do'))}; a step has 'when' and 'do'"
                context.problems.add(data.key_mark(key), path, message)
        if (condition := data.get("when")) is not None:
            when = compile_condition(condition, f"{path}.when", context)
        text = data.get("do") or data
    if not isinstance(text, Scalar) or not isinstance(text.value, str):
        context.problems.add(text.mark, path, "a step is a formula, like x + mlp(norm(x))")
        return None
    start = text.mark.moved(text.shift)
    try:
        parts = parse_step(text.value)
    except ExprError as error:
        context.problems.add(start.moved(error.col), path, f"{error.message}, in {text.value!r}")
        return None
    _check_factors(parts, start, path, context)
    return StepDraft(parts=parts, when=when, mark=start, path=path)


def _check_factors(parts: StepExpr, start: Any, path: str, context: Context) -> None:
    for part in parts:
        if isinstance(part.factor, Name):
            name = part.factor.name
            context.used.add(name)
            if name not in context.types:
                message = f"{name!r} is not declared{did_you_mean(name, context.types)}"
                context.problems.add(start.moved(part.factor.col), path, message)
            elif context.types[name].kind not in ("int", "float", "any"):
                message = f"a factor is a number; {name} is {context.types[name]}"
                context.problems.add(start.moved(part.factor.col), path, message)
        _check_factors(part.argument, start, path, context)
