"""Values of the declared names for one config.json, one layer at a time."""

from __future__ import annotations

from typing import Any

from tpkit.spec.data import Mark
from tpkit.spec.fields import Declarations, Field
from tpkit.spec.problems import Problems, shown
from tpkit.spec.reading import MISSING, ConfigReader
from tpkit.spec.slots import ABSENT, Failed
from tpkit.spec.words import CANONICAL_SIZES

__all__ = ["Values"]


class Values:
    """Looks names up while slots are evaluated. Names that differ by layer are computed per layer, others once.

    Attributes:
        problems: takes what is found wrong.
        layer: index in the outermost repeat, None outside of one.
    """

    def __init__(self, declarations: Declarations, reader: ConfigReader) -> None:
        self.problems: Problems = reader.problems
        self.layer: int | None = None
        self._declarations = declarations
        self._reader = reader
        self._fixed: dict[str, Any] = {}
        self._failed: set[str] = set()
        self._by_layer: dict[str, Any] = {}
        self._lists: dict[str, list[Any] | None] = {}
        for name in declarations.fields:
            if name not in declarations.layered:
                self._try(name)
        self._read_lists()

    def _try(self, name: str) -> None:
        try:
            self.value(name)
        except Failed:
            self._failed.add(name)

    def _read_lists(self) -> None:
        layers = self._fixed.get("num_hidden_layers")
        for name, field in self._declarations.fields.items():
            if field.per_layer is not None and name not in self._reader.overrides:
                self._lists[name] = self._reader.read_layers(field, layers if isinstance(layers, int) else None)

    def fixed(self) -> dict[str, Any]:
        """Returns the names that do not differ by layer."""
        return {name: self._fixed[name] for name in self._declarations.fields if name in self._fixed}

    def enter(self, layer: int | None) -> None:
        """Goes to a layer."""
        self.layer = layer
        self._by_layer = {}

    def value(self, name: str) -> Any:
        """Returns the value of a declared name in this layer."""
        if name == "layer":
            return self.layer
        if name in self._failed:
            raise Failed
        if name in self._fixed:
            return self._fixed[name]
        if name in self._by_layer:
            return self._by_layer[name]
        field = self._declarations.fields[name]
        layered = name in self._declarations.layered
        value = self._layer_value(field) if field.layered else self._plain_value(field)
        (self._by_layer if layered else self._fixed)[name] = value
        return value

    def origin(self, name: str) -> str:
        """Returns where a name's value comes from, for messages."""
        field = self._declarations.fields[name]
        if self._lists.get(name) is not None:
            key = field.per_layer or ""
            return self._reader.place(key.replace("*", str(self.layer)) if "*" in key else f"{key}[{self.layer}]")
        return self._reader.origin(field)

    def _plain_value(self, field: Field) -> Any:
        value = self._reader.read(field) if field.keys else MISSING
        return self._default(field) if value is MISSING else value

    def _layer_value(self, field: Field) -> Any:
        if field.name in self._reader.overrides:
            return self._reader.read(field)
        entries = self._lists.get(field.name)
        if entries is not None and self.layer is not None:
            entry = entries[self.layer] if self.layer < len(entries) else None
            # by number only layers that differ are listed; the others have the field of that name
            return self.value(str(field.per_layer).rpartition(".")[2]) if entry is MISSING else entry
        if field.pattern is None:
            return self._default(field)
        every = field.pattern.every.value(self)
        hit = self.layer is not None and (self.layer + 1) % every == 0
        return field.pattern.value if hit else field.pattern.otherwise

    def _default(self, field: Field) -> Any:
        if field.default is None:
            if field.keys:
                place = self._reader.place(field.keys[0])
                self.problems.add(Mark(place), "", f"is missing, and {field.path} has no default")
            raise Failed
        value = field.default.value(self)
        if value is ABSENT:
            value = None
        if isinstance(value, (int, float)) and value <= 0 and field.name in CANONICAL_SIZES:
            self.problems.add(field.mark, field.path, f"comes out as {shown(value)}, which is no size")
        return value
