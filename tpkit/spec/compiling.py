"""Compiles written values into slots, and finds what can be known to be wrong with them without a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from tpkit.errors import did_you_mean
from tpkit.spec.data import Data, Items, Mark, Scalar, Table, to_python
from tpkit.spec.evaluate import ANY, Type, infer, type_of
from tpkit.spec.expr import ExprError, Name, is_name, names_in
from tpkit.spec.parsing import parse_value
from tpkit.spec.problems import Problems, reason, shown
from tpkit.spec.slot_types import CONDITION, SlotType, slot_type
from tpkit.spec.slots import Cases, Formula, Given, Many, Nested, Slot

__all__ = ["Context", "compile_condition", "compile_slot", "compile_words", "type_of_slot"]

#: a bare word this similar to a declared name is taken for a mistyped name
ALIKE = 0.85


@dataclass(frozen=True)
class Context:
    """What values are compiled against.

    Attributes:
        types: of the declared names.
        layered: names that differ by layer, ``layer`` among them.
        problems: takes the findings.
        inside: the place is inside a repeat, so that there is a layer.
        used: takes the names that something reads.
        blind: takes words of plugins that are not installed: what reads a name may be one of theirs.
    """

    types: Mapping[str, Type]
    layered: frozenset[str]
    problems: Problems
    inside: bool = False
    used: set[str] = field(default_factory=set)
    blind: list[str] = field(default_factory=list)

    def in_repeat(self) -> Context:
        """Returns the context of what is inside a repeat."""
        return replace(self, inside=True)


def compile_condition(data: Data, path: str, context: Context) -> Formula | None:
    """Returns a condition; None if it is none, which has been noted."""
    if isinstance(data, Scalar) and isinstance(data.value, bool):
        data = replace(data, value="1 == 1" if data.value else "1 == 0")
    if not isinstance(data, Scalar) or not isinstance(data.value, str):
        context.problems.add(data.mark, path, f"a condition is needed, not {shown(to_python(data))}")
        return None
    return _formula(data, CONDITION, path, context)


def compile_slot(data: Data, type_: SlotType, path: str, context: Context) -> Slot:
    """Compiles the value of a word. What is wrong is noted in the context."""
    if isinstance(data, Table):
        if _is_case(data, type_):
            return _cases([data], type_, path, context)
        if type_.nested is not None:
            if "when" in data:
                return _cases([data], type_, path, context)
            return _nested(data, type_.nested, path, context)
    if tables := _as_cases(data, type_):
        return _cases(tables, type_, path, context)
    if isinstance(data, Items) and type_.element is not None:
        entries = [compile_slot(d, type_.element, f"{path}[{i}]", context) for i, d in enumerate(data.items)]
        return Many(tuple(entries), frozenset().union(*(entry.names for entry in entries)))
    if isinstance(data, Scalar) and isinstance(data.value, str):
        return _word(data, data.value, type_, path, context)
    return _literal(data, type_, path, context)


def _is_case(data: Table, type_: SlotType) -> bool:
    if "mapping" in type_.kinds:  # a mapping is a value here, unless it can only be a case
        return "is" in data and set(data.entries) <= {"when", "is"}
    return "is" in data or ("when" in data and type_.nested is None)


def _as_cases(data: Data, type_: SlotType) -> list[Table]:
    """Returns the mappings of a list of cases; nothing for any other list."""
    tables = [item for item in data.items if isinstance(item, Table)] if isinstance(data, Items) else []
    if not isinstance(data, Items) or len(tables) < len(data.items):
        return []
    return tables if type_.nested is not None or all("is" in table for table in tables) else []


def _literal(data: Data, type_: SlotType, path: str, context: Context) -> Slot:
    value = to_python(data)
    if type_.refuses(value):
        context.problems.add(data.mark, path, f"{type_} is needed, not {shown(value)}")
    return Given(value)


def _word(data: Scalar, text: str, type_: SlotType, path: str, context: Context) -> Slot:
    """A text: a declared name, a literal word, or an expression."""
    takes_text = bool(type_.words) or "text" in type_.kinds
    computes = bool(type_.kinds & {"int", "float", "flag"})
    if type_.plain or (data.shift and takes_text):
        return _literal(data, type_, path, context)
    if not is_name(text):
        return _expression(data, type_, path, context) if computes else _literal(data, type_, path, context)
    if text in context.types:
        return _expression(data, type_, path, context)
    if text in type_.words or (takes_text and not type_.words and not _alike(text, context.types)):
        return Given(text)
    known = [*type_.words, *context.types]
    if type_.kinds == {"flag"} and text.lower() in ("yes", "no", "on", "off"):
        context.problems.add(data.mark, path, f"true or false is needed, not {text}")
        return Given(None)
    message = f"{text!r} is not declared" if computes or not type_.words else f"{text!r} is not {type_}"
    if takes_text and not type_.words:
        message += "; quote it if it is meant as a word"
    context.problems.add(data.mark, path, message + did_you_mean(text, known))
    return Given(None)


def _alike(text: str, names: Mapping[str, Type]) -> bool:
    return any(SequenceMatcher(None, text, name).ratio() >= ALIKE for name in names)


def _expression(data: Scalar, type_: SlotType, path: str, context: Context) -> Slot:
    return _formula(data, type_, path, context) or Given(None)


def _formula(data: Scalar, type_: SlotType, path: str, context: Context) -> Formula | None:
    text = str(data.value)
    start = data.mark.moved(data.shift)
    try:
        expr = parse_value(text)
    except ExprError as error:
        context.problems.add(start.moved(error.col), path, f"{error.message}, in {text!r}")
        return None
    found = infer(expr, context.types, lambda col, message: context.problems.add(start.moved(col), path, message))
    names = {name.name for name in names_in(expr)}
    context.used.update(names)
    if not context.inside and names & context.layered:
        name = sorted(names & context.layered)[0]
        told = "there is no layer" if name == "layer" else f"{name!r} differs by layer, and there is none"
        context.problems.add(start, path, f"{told} outside of a repeat")
    if type_.cannot_be(found):
        subject = f"{text} is {found}" if isinstance(expr, Name) else f"this gives {found}"
        words = f" {', '.join(sorted(found.words))}" if found.words and len(found.words) < 6 else ""
        context.problems.add(start, path, f"{type_} is needed, but {subject}{words}")
    return Formula(expr, type_, start, path, frozenset(names))


def _cases(tables: list[Table], type_: SlotType, path: str, context: Context) -> Slot:
    cases: list[tuple[Formula | None, Slot]] = []
    names: frozenset[str] = frozenset()
    for number, table in enumerate(tables):
        where = path if len(tables) == 1 else f"{path}[{number}]"
        condition = table.get("when")
        when = compile_condition(condition, f"{where}.when", context) if condition else None
        if condition is None and number < len(tables) - 1:
            context.problems.add(table.mark, where, "this case always holds; the ones after it are never reached")
        slot = _case_value(table, type_, where, context)
        cases.append((when, slot))
        names = names.union(slot.names, when.names if when else ())
    return Cases(tuple(cases), names)


def _case_value(table: Table, type_: SlotType, path: str, context: Context) -> Slot:
    value = table.get("is")
    if type_.nested is not None and (value is None or "is" in type_.nested.model_fields):
        rest = {key: part for key, part in table.entries.items() if key != "when"}
        return _nested(replace(table, entries=rest), type_.nested, path, context)
    for key in table:
        if key not in ("when", "is"):
            known = did_you_mean(key, ("when", "is"))
            context.problems.add(table.key_mark(key), path, f"unknown word {key!r}{known}; a case has 'when' and 'is'")
    if value is None:
        context.problems.add(table.mark, path, "a case says what the value 'is'")
        return Given(None)
    return compile_slot(value, type_, path, context)


def _nested(table: Table, model: type[BaseModel], path: str, context: Context) -> Slot:
    for key in table:
        if key not in model.model_fields:
            known = did_you_mean(key, [*model.model_fields, "when"])
            context.problems.add(table.key_mark(key), path, f"unknown word {key!r}{known}")
    words = compile_words(table, model, path, context)
    return Nested(model, words, frozenset().union(*(slot.names for slot in words.values())), table.mark, path)


def compile_words(table: Table, model: type[BaseModel], path: str, context: Context) -> dict[str, Slot]:
    """Compiles the words of an `Options` class that a mapping has, and the defaults of those it has not."""
    words: dict[str, Slot] = {}
    for word, info in model.model_fields.items():
        type_, where = slot_type(model, word), f"{path}.{word}"
        data = table.get(word)
        if data is not None and type_.plain:
            words[word] = _plain(data, model, word, where, context)
        elif data is not None:
            slot = compile_slot(data, type_, where, context)
            if isinstance(slot, Cases) and slot.cases[-1][0] is not None and isinstance(info.default, str):
                other = _default(info.default, type_, table.mark, where, context)  # where no case holds
                slot = Cases((*slot.cases, (None, other)), slot.names | other.names)
            words[word] = slot
        elif info.is_required():
            context.problems.add(table.mark, path, f"needs {word!r}: {type_}")
        elif isinstance(info.default, str) and not type_.plain:
            words[word] = _default(info.default, type_, table.mark, where, context)
    return words


def _default(text: str, type_: SlotType, mark: Mark, path: str, context: Context) -> Slot:
    """A default that a description would write as text; a name in it must be declared."""
    if text in type_.words or not type_.kinds & {"int", "float", "flag", "mapping", "list"}:
        return Given(text)
    if is_name(text) and text not in context.types:
        if "null" in type_.kinds:
            return Given(None)
        known = did_you_mean(text, context.types)
        context.problems.add(mark, path, f"is not given, and {text!r}, its default, is not declared{known}")
        return Given(None)
    return _expression(Scalar(text, mark), type_, path, context)


def _plain(data: Data, model: type[BaseModel], word: str, path: str, context: Context) -> Slot:
    try:
        return Given(_adapter(model, word).validate_python(to_python(data), strict=True))
    except ValidationError as error:
        for item in error.errors(include_url=False):
            inner = ".".join(map(str, item["loc"]))
            where = f"{path}.{inner}" if inner else path
            context.problems.add(data.mark, where, f"{reason(item['msg'])}, not {shown(item['input'])}")
        return Given(None)


@lru_cache(maxsize=256)
def _adapter(model: type[BaseModel], word: str) -> TypeAdapter[Any]:
    info = model.model_fields[word]
    annotation: Any = info.annotation
    for extra in info.metadata:
        annotation = Annotated[annotation, extra]
    return TypeAdapter(annotation)


def type_of_slot(slot: Slot, types: Mapping[str, Type]) -> Type:
    """Returns what is known of a compiled value's type."""
    if isinstance(slot, Formula):
        return infer(slot.expr, types, lambda col, message: None)
    if isinstance(slot, Cases):
        found = [type_of_slot(case, types) for _, case in slot.cases]
        if len({type_.kind for type_ in found}) != 1:
            return ANY
        words = [type_.words for type_ in found]
        return Type(found[0].kind, frozenset().union(*words) if all(words) else None)  # type: ignore[arg-type]
    return type_of(slot.value(None)) if isinstance(slot, Given) else ANY  # type: ignore[arg-type]
