"""The declared names of a description: fields of config.json with their defaults, and what is derived from them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ValidationError

from tpkit.errors import did_you_mean
from tpkit.spec.compiling import Context, compile_slot, type_of_slot
from tpkit.spec.data import Data, Mark, Table, to_python
from tpkit.spec.evaluate import ANY, FLAG, FLOAT, INT, TEXT, Type, type_of
from tpkit.spec.expr import is_name
from tpkit.spec.header import Every, Read
from tpkit.spec.problems import Problems
from tpkit.spec.slot_types import ANYTHING, SlotType
from tpkit.spec.slots import Given, Slot
from tpkit.spec.words import CANONICAL_NUMBERS, CANONICAL_SIZES

__all__ = ["SPELLINGS", "Declarations", "Field"]

#: fields that config.json files spell in several ways, whatever the family
SPELLINGS: dict[str, tuple[str, ...]] = {
    "rope_theta": ("rope_parameters.rope_theta", "rope_scaling.rope_theta", "rope_theta", "rotary_emb_base"),
    "rope_scaling": ("rope_parameters", "rope_scaling"),
    "partial_rotary_factor": (
        "rope_parameters.partial_rotary_factor",
        "rope_scaling.partial_rotary_factor",
        "partial_rotary_factor",
        "rotary_pct",
        "rope_pct",
    ),
}
_COUNT = SlotType(frozenset({"int"}), positive=True)


@dataclass(frozen=True)
class Pattern:
    """``is`` in every N-th layer, counted from 1; ``otherwise`` elsewhere."""

    every: Slot
    value: Any
    otherwise: Any


@dataclass(frozen=True)
class Field:
    """A declared name.

    Attributes:
        name: the name.
        mark: where it is declared.
        keys: where config.json has it, first come first served; empty: it is derived.
        default: its value where config.json has none; None: config.json must have it.
        computed: the default is an expression, so a null in config.json means the default too.
        per_layer: key of a list with an entry for every layer.
        pattern: which layer has which value, where there is no such list.
        type: what is known of its value.
    """

    name: str
    mark: Mark
    keys: tuple[str, ...] = ()
    default: Slot | None = None
    computed: bool = False
    per_layer: str | None = None
    pattern: Pattern | None = None
    type: Type = ANY

    @property
    def path(self) -> str:
        """Where it stands in the description."""
        return f"config.{self.name}" if self.keys or self.per_layer else f"derived.{self.name}"

    @property
    def layered(self) -> bool:
        """Tells whether it has a value per layer by its own words (not: by what its default reads)."""
        return self.per_layer is not None or self.pattern is not None

    def reads(self) -> frozenset[str]:
        """Returns the names that its value depends on."""
        slots = [slot for slot in (self.default, self.pattern.every if self.pattern else None) if slot]
        return frozenset().union(*(slot.names for slot in slots))


class Declarations(Mapping[str, Type]):
    """All declared names with their types; a name's words are compiled when it is first asked for."""

    def __init__(self, config: Table, derived: Table, model_types: list[str], problems: Problems) -> None:
        self.fields: dict[str, Field] = {}
        self.used: set[str] = set()
        self._problems = problems
        self._model_types = model_types
        self._raw: dict[str, tuple[bool, Data, Mark]] = {}
        self._open: list[str] = []
        for is_derived, table in ((False, config), (True, derived)):
            for name in table:
                self._declare(name, is_derived, table)
        for name in list(self._raw):
            self[name]
        self.layered = self._layered()

    def __getitem__(self, name: str) -> Type:
        if name == "layer":
            return INT
        if name not in self.fields:
            self.fields[name] = self._compile(name, *self._raw[name])
        return self.fields[name].type

    def __contains__(self, name: object) -> bool:
        return name in self._raw or name == "layer"

    def __iter__(self) -> Iterator[str]:
        return iter((*self._raw, "layer"))

    def __len__(self) -> int:
        return len(self._raw) + 1

    def context(self) -> Context:
        """Returns what the tree's values are compiled against."""
        return Context(types=self, layered=self.layered, problems=self._problems, used=self.used)

    def _declare(self, name: str, is_derived: bool, table: Table) -> None:
        mark, path = table.key_mark(name), "derived" if is_derived else "config"
        if not is_name(name) or name in ("layer", "x"):
            taken = f"{name!r} is taken" if is_name(name) else f"{name!r} is no name for a value"
            self._problems.add(mark, path, f"{taken}; choose another and give config.json's with 'from'")
        elif name in self._raw:
            self._problems.add(mark, f"{path}.{name}", "is a field of config already")
        else:
            self._raw[name] = (is_derived, table.entries[name], mark)

    def _compile(self, name: str, is_derived: bool, data: Data, mark: Mark) -> Field:
        if name in self._open:
            circle = " -> ".join([*self._open[self._open.index(name) :], name])
            self._problems.add(mark, name, f"is computed from itself: {circle}")
            return Field(name=name, mark=mark, keys=(name,))
        self._open.append(name)
        field = self._derived(name, data, mark) if is_derived else self._field(name, data, mark)
        self._open.pop()
        return self._canonical(field)

    def _context(self) -> Context:
        return Context(types=self, layered=frozenset(), problems=self._problems, inside=True, used=self.used)

    def _slot(self, data: Data, path: str) -> tuple[Slot, Type]:
        slot = compile_slot(data, ANYTHING, path, self._context())
        return slot, type_of_slot(slot, self)

    def _derived(self, name: str, data: Data, mark: Mark) -> Field:
        path = f"derived.{name}"
        if (isinstance(data, Table) and "is" not in data) or (isinstance(data, Table) and "every" in data):
            if self._valid(Every, data, path) is None:
                return Field(name=name, mark=mark)
            pattern = self._pattern(data, path)
            return Field(name=name, mark=mark, pattern=pattern, type=_type_of_pattern(pattern))
        slot, type_ = self._slot(data, path)
        return Field(name=name, mark=mark, default=slot, computed=True, type=type_)

    def _field(self, name: str, data: Data, mark: Mark) -> Field:
        path, keys = f"config.{name}", SPELLINGS.get(name, (name,))
        if not isinstance(data, Table):
            slot, type_ = self._slot(data, path)
            return self._settled(Field(name=name, mark=mark, keys=keys, default=slot, type=type_))
        read = self._valid(Read, data, path)
        if read is None:
            return Field(name=name, mark=mark, keys=keys)
        if isinstance(read, Read) and read.source is not None:
            keys = (read.source,) if isinstance(read.source, str) else tuple(read.source)
        default, type_ = None, ANY
        if (written := data.get("default")) is not None:
            default, type_ = self._slot(written, f"{path}.default")
        per_layer = data.get("per_layer")
        pattern = self._pattern(data, path) if "every" in data else None
        if per_layer is None and pattern is None:
            return self._settled(Field(name=name, mark=mark, keys=keys, default=default, type=type_))
        if pattern is None:
            self._need_default(default, mark, path)
        type_ = _type_of_pattern(pattern) if pattern else type_
        key = str(to_python(per_layer)) if per_layer is not None else None
        if key is not None and "*" in key and key.rpartition(".*.")[2] not in self._raw:
            others = "layers that it does not list have the field of that name, which is not declared"
            self._problems.add(mark, f"{path}.per_layer", f"{key}: {others}")
        return Field(name=name, mark=mark, keys=keys, default=default, per_layer=key, pattern=pattern, type=type_)

    def _need_default(self, default: Slot | None, mark: Mark, path: str) -> None:
        if default is None:
            self._problems.add(mark, path, "needs 'every' or 'default' for a config.json without that list")

    def _settled(self, field: Field) -> Field:
        """A field's default is only a default: another text, or a value where that is null, may come."""
        type_, default = field.type, field.default
        if type_.kind == "null" or type_.kind == "mapping":
            type_ = ANY
        elif type_.kind == "text":
            type_ = TEXT
        if field.name == "model_type" and self._model_types:
            self._check_model_type(field)
            type_ = Type("text", frozenset(self._model_types))
        computed = default is not None and not isinstance(default, Given)
        return replace(field, type=type_, computed=computed)

    def _check_model_type(self, field: Field) -> None:
        if field.type.words and not field.type.words <= set(self._model_types):
            word, known = sorted(field.type.words)[0], self._model_types
            message = f"{word!r} is none of this description's model_types{did_you_mean(word, known)}"
            self._problems.add(field.mark, field.path, message)

    def _pattern(self, data: Table, path: str) -> Pattern:
        every = compile_slot(data.entries["every"], _COUNT, f"{path}.every", self._context())
        value, otherwise = data.get("is"), data.get("otherwise")
        return Pattern(
            every,
            True if value is None else to_python(value),
            False if otherwise is None else to_python(otherwise),
        )

    def _valid(self, model: type[BaseModel], data: Table, path: str) -> BaseModel | None:
        try:
            return model.model_validate(to_python(data))
        except ValidationError as error:
            self._problems.add_validation(error, data, path, model)
            return None

    def _canonical(self, field: Field) -> Field:
        """Sizes that modules read by name have a type whatever their default says."""
        wanted = INT if field.name in CANONICAL_SIZES else FLOAT if field.name in CANONICAL_NUMBERS else None
        if wanted is None or field.type.kind in ("any", wanted.kind) or (wanted, field.type.kind) == (FLOAT, "int"):
            return field
        word = field.default.value(None) if isinstance(field.default, Given) else ""  # type: ignore[arg-type]
        guess = did_you_mean(word, self._raw) if isinstance(word, str) else ""
        self._problems.add(field.mark, field.path, f"is {wanted}, but its default is {field.type}{guess}")
        return replace(field, type=wanted)

    def _layered(self) -> frozenset[str]:
        found = {"layer", *(name for name, field in self.fields.items() if field.layered)}
        while True:
            more = {name for name, field in self.fields.items() if field.reads() & found} - found
            if not more:
                return frozenset(found)
            found |= more

    def check_used(self) -> None:
        """Notes fields that nothing reads. Where a reader is only mistyped, its own problem says enough."""
        told = " ".join(self._problems.lines())
        for name, field in self.fields.items():
            read = name in self.used or name in (*CANONICAL_SIZES, *CANONICAL_NUMBERS)
            if not read and not re.search(rf"(mean '|in ['\"].*\b){name}\b", told):
                missing = [c for c in (*CANONICAL_SIZES, *CANONICAL_NUMBERS) if c not in self._raw]
                message = f"is declared, but nothing reads it{did_you_mean(name, missing)}"
                self._problems.add(field.mark, field.path, message)


def _type_of_pattern(pattern: Pattern) -> Type:
    kinds = {type_of(value).kind for value in (pattern.value, pattern.otherwise)}
    if kinds == {"flag"}:
        return FLAG
    if kinds == {"text"}:
        return Type("text", frozenset({pattern.value, pattern.otherwise}))
    return ANY
