"""A description, parsed and checked, and what it becomes for one model's config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpkit.errors import SpecError
from tpkit.quant.stated import Stated, stated_beside, stated_in, stated_word
from tpkit.registry import Registry
from tpkit.spec.bound import BoundSpec
from tpkit.spec.checks import check_tree
from tpkit.spec.compiling import Context, compile_condition
from tpkit.spec.data import Data, Items, Mark, Scalar, Table
from tpkit.spec.draft import Draft
from tpkit.spec.expand import Expander
from tpkit.spec.fields import Declarations
from tpkit.spec.find import read_config
from tpkit.spec.header import Header, read_header
from tpkit.spec.ignore import Pattern, check_covered, compile_pattern
from tpkit.spec.problems import Problems, shown
from tpkit.spec.reading import ConfigReader, text_part
from tpkit.spec.scope import Values
from tpkit.spec.slots import Failed, Formula
from tpkit.spec.tree import TreeReader
from tpkit.spec.trial import check_declared
from tpkit.spec.unread import unread_fields

__all__ = ["Description"]


class Description:
    """A model description without the sizes of a model.

    Attributes:
        source: where it came from, for messages.
        header: its top level.
        declarations: the fields of config.json that it reads, and what it derives from them.
        tree: the module tree with all branches.

    Raises:
        SpecError: that lists everything that is wrong with it, in all branches.
    """

    source: str
    header: Header
    declarations: Declarations
    tree: Draft

    def __init__(self, data: Data, source: str, registry: Registry) -> None:
        problems = Problems()
        self.source, self._registry = source, registry
        header = read_header(data, source, problems)
        table = data if isinstance(data, Table) else Table({}, data.mark)
        self.declarations = Declarations(
            _table(table, "config"), _table(table, "derived"), header.model_types if header else [], problems
        )
        context = self.declarations.context()
        self.tree = TreeReader(registry).node("", _table(table, "tree"), "tree", context)
        check_tree(self.tree, problems)
        self._require = _conditions(table.get("require"), context)
        self._ignore = self._patterns(table, context)
        if not context.blind:
            self.declarations.check_used()
        if not problems:
            check_declared(self.tree, self.declarations, problems)
        problems.raise_if_any(f"{source} is not right")
        if header is None:
            raise SpecError(f"{source} is not right")
        self.header = header

    def _patterns(self, table: Table, context: Context) -> list[Pattern]:
        found = []
        lists = [("ignore", table.get("ignore"))]
        stored = table.get("stored_as")
        for index, entry in enumerate(stored.items if isinstance(stored, Items) else ()):
            lists.append((f"stored_as[{index}].ignore", entry.get("ignore") if isinstance(entry, Table) else None))
        for where, data in lists:
            for index, item in enumerate(data.items if isinstance(data, Items) else ()):
                pattern = compile_pattern(item, f"{where}[{index}]", context)
                if pattern is not None:
                    check_covered(pattern, self.tree, context)
                    found.append(pattern)
        return found

    def bind(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        overrides: Mapping[str, Any] | None = None,
        quant: str | Mapping[str, Any] | None = None,
    ) -> BoundSpec:
        """Returns the description with the sizes of one config.json.

        Args:
            config: a checkpoint folder, the path of a config.json, or its content; None: the defaults.
            overrides: values by field name that replace config.json's.
            quant: a quant method, as ``quant:`` of a description says it.

        Raises:
            SpecError: that lists every field and every node that does not fit.
        """
        source, whole, folder = read_config(config, self._registry)
        keys = [entry.config for entry in self.header.stored_as if entry.config]
        prefix, part = text_part(whole, keys)
        problems = Problems()
        what = f"{source or 'the defaults'} does not fit {self.source}"
        reader = ConfigReader(
            part, source=source or "the defaults", prefix=prefix, overrides=overrides or {}, problems=problems
        )
        self._check_identity(whole, part, prefix, reader)
        self._check_unread(part, reader)
        values = Values(self.declarations, reader)
        problems.raise_if_any(what)
        self._check_required(values)
        problems.raise_if_any(f"{self.source} does not cover {source or 'the defaults'}")
        root = Expander(values, self.declarations.layered).tree(self.tree)
        ignore = tuple(pattern.bound(values) for pattern in self._ignore)
        problems.raise_if_any(what)
        return BoundSpec(
            family=self.header.family,
            source=self.source,
            values=values.fixed(),
            config=dict(part),
            root=root,
            ignore=ignore,
            checkpoint=self.header.checkpoint,
            prefixes=({}, *(entry.prefix for entry in self.header.stored_as if entry.prefix)),
            quantization=self._quantization(whole, source, prefix, folder, quant),
            folder=folder,
        )

    def _quantization(
        self, whole: Mapping[str, Any], source: str, inner: str, folder: Path | None, quant: Any
    ) -> tuple[Stated, ...]:
        """Returns everything that is said of the model's quantisation; who is right is decided in the plan."""
        found = [] if quant is None else [stated_word(quant, "--quant")]
        if self.header.quant is not None:
            found.append(stated_word(self.header.quant, f"{self.source} quant"))
        found += stated_in(whole, source, inner)
        return (*found, *(stated_beside(folder) if folder is not None else ()))

    def _check_identity(
        self, whole: Mapping[str, Any], part: Mapping[str, Any], prefix: str, reader: ConfigReader
    ) -> None:
        """Refuses another family's config.json: its tensors may have the same names and mean something else."""
        stored = [name for entry in self.header.stored_as for name in entry.architectures]
        known = {*self.header.architectures, *self.header.model_types, *stored}
        named: list[Any] = [config.get("model_type") for config in (whole, part)]
        for config in (whole, part):
            found = config.get("architectures")
            named.extend(found if isinstance(found, list) else [])
        names = list(dict.fromkeys(name for name in named if isinstance(name, str)))
        classes = [name for name in names if name not in named[:2]]
        if (names and not known & set(names)) or (classes and not known & set(classes)):
            message = (
                f"is of {', '.join(names)}; this description is of {', '.join(sorted(known))}. "
                "If both compute the same, say so: override 'architectures'"
            )
            reader.problems.add(Mark(reader.source), "", message)

        elif prefix and isinstance(part.get("model_type"), str) and part["model_type"] not in self._kinds():
            message = (
                f"has a language model of {part['model_type']}; this description is of "
                f"{', '.join(self.header.model_types)}. If both compute the same, say so: override 'model_types'"
            )
            reader.problems.add(Mark(reader.place("model_type")), "", message)
        elif (
            set(classes) & set(self.header.architectures)
            and not any(isinstance(kind, str) for kind in named[:2])
            and len(self.header.model_types) > 1
        ):
            kinds = ", ".join(self.header.model_types)
            message = f"names no model_type, and this description serves several that differ: {kinds}"
            reader.problems.add(Mark(reader.source), "", message)

    def _kinds(self) -> set[str]:
        """Returns the model types of a language model inside another one that this description is of."""
        return {*self.header.model_types, *self.header.architectures}

    def _check_unread(self, part: Mapping[str, Any], reader: ConfigReader) -> None:
        fields = self.declarations.fields.values()
        keys = [key for field in fields for key in (*field.keys, *([field.per_layer] if field.per_layer else []))]
        for key, value in unread_fields(part, keys):
            message = f"is {shown(value)}, which changes what the model computes, and this description does not read it"
            reader.problems.add(Mark(reader.place(key)), "", message)

    def _check_required(self, values: Values) -> None:
        for text, condition in self._require:
            try:
                if not condition.holds(values):
                    found = ", ".join(
                        f"{name} = {shown(values.value(name))} from {values.origin(name)}"
                        for name in sorted(condition.names)
                    )
                    values.problems.add(condition.mark, condition.path, f"{text} does not hold: {found}")
            except Failed:
                continue


def _table(table: Table, key: str) -> Table:
    found = table.get(key)
    return found if isinstance(found, Table) else Table({}, found.mark if found else table.mark)


def _conditions(data: Data | None, context: Context) -> list[tuple[str, Formula]]:
    found = []
    for index, item in enumerate(data.items if isinstance(data, Items) else ()):
        condition = compile_condition(item, f"require[{index}]", context)
        if condition is not None and isinstance(item, Scalar):
            found.append((str(item.value), condition))
    return found
