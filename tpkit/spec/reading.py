"""Takes the declared fields out of a config.json: aliases, nesting, spellings, types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpkit.errors import SpecError
from tpkit.spec.data import Mark
from tpkit.spec.evaluate import type_of
from tpkit.spec.fields import SPELLINGS, Field
from tpkit.spec.problems import Problems, shown
from tpkit.spec.slots import Failed
from tpkit.spec.words import CANONICAL_NUMBERS, CANONICAL_SIZES

__all__ = ["MISSING", "ConfigReader", "text_part"]


_POSITIVE = (*CANONICAL_NUMBERS, "rope_theta", "partial_rotary_factor")


class _Missing:
    pass


#: a field that config.json does not have
MISSING = _Missing()


def text_part(config: Mapping[str, Any], keys: list[str]) -> tuple[str, Mapping[str, Any]]:
    """Returns the part of a config.json that describes the language model, and the key it stands under."""
    for key in [*keys, "text_config"]:
        part = config.get(key)
        if isinstance(part, Mapping) and part:
            return key, part
        if part:
            raise SpecError(
                f"config.json: {key} is {shown(part)}; a mapping with the language model's fields is needed"
            )
    return "", config


class ConfigReader:
    """Reads fields from one config.json.

    Args:
        config: the language model's part of it.
        source: its path.
        prefix: the key that part stands under.
        overrides: values that replace config.json's, by field.
        problems: takes the findings.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        source: str,
        prefix: str,
        overrides: Mapping[str, Any],
        problems: Problems,
    ) -> None:
        self.config, self.source, self.prefix = config, source, prefix
        self.overrides, self.problems = overrides, problems

    def origin(self, field: Field) -> str:
        """Returns where a field's value comes from, for messages."""
        if field.name in self.overrides:
            return f"the override config.{field.name}"
        key = next((key for key in field.keys if self._at(key) is not MISSING), None)
        if key is None or (self._at(key) is None and field.computed):
            return f"its default, {field.mark}" if field.keys else str(field.mark)
        return self.place(key)

    def place(self, key: str) -> str:
        """Returns a key of config.json with the file."""
        return f"{self.source}: {'.'.join(part for part in (self.prefix, key) if part)}"

    def read(self, field: Field) -> Any:
        """Returns config.json's value of a field, or `MISSING` where the default counts.

        Raises:
            Failed: if it is of the wrong type, which has been noted.
        """
        if field.name in self.overrides:
            value, place = self.overrides[field.name], f"override config.{field.name}"
        else:
            value, place = self._first(field)
        if value is MISSING or (value is None and field.computed):
            return MISSING
        if not self._fits(field, value, place):
            raise Failed
        return value

    def read_layers(self, field: Field, layers: int | None) -> list[Any] | None:
        """Returns config.json's list with an entry per layer, if it has one.

        With a ``*`` in the key it is a mapping by the layer's number, and an entry may be `MISSING`.
        """
        key = field.per_layer
        if key is not None and "*" in key:
            return self._by_number(key, layers)
        value = self._at(key) if key else MISSING
        if key is None or value is MISSING or value is None:
            return None
        if not isinstance(value, list):
            self._note(self.place(key), f"a list with an entry per layer is needed, not {shown(value)}")
            return None
        if layers is not None and len(value) != layers:
            self._note(self.place(key), f"has {len(value)} entries for {layers} layers")
            return None
        words = field.type.words
        for index, entry in enumerate(value):
            if words is not None and entry not in list(words):  # a list: an entry may be anything
                known = ", ".join(sorted(words))
                self._note(self.place(f"{key}[{index}]"), f"{shown(entry)} is not known here; known: {known}")
            elif words is None and field.type.kind not in ("any", type_of(entry).kind):
                self._note(self.place(f"{key}[{index}]"), f"{field.type} is needed, not {shown(entry)}")
        return value

    def _by_number(self, key: str, layers: int | None) -> list[Any] | None:
        above, _, below = key.partition(".*.")
        found = self._at(above)
        if found is MISSING or found is None or layers is None:
            return None
        if not isinstance(found, Mapping) or not all(isinstance(entry, Mapping) for entry in found.values()):
            self._note(self.place(above), f"a mapping from layers to their fields is needed, not {shown(found)}")
            return None
        for number in found:
            if number not in map(str, range(layers)):
                self._note(self.place(above), f"{shown(number)} is no number of one of {layers} layers")
        return [found.get(str(layer), {}).get(below, MISSING) for layer in range(layers)]

    def _at(self, key: str) -> Any:
        found: Any = self.config
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return MISSING
            found = found[part]
        return found

    def _first(self, field: Field) -> tuple[Any, str]:
        """Returns the value of the first key that is there; several spellings that differ are refused."""
        found = [(key, self._at(key)) for key in field.keys]
        found = [(key, value) for key, value in found if value is not MISSING]
        if not found:
            return MISSING, ""
        if field.keys == SPELLINGS.get(field.name):
            given = [(key, value) for key, value in found if value is not None]
            for key, value in given[1:]:
                if _plain(value) != _plain(given[0][1]):
                    first, second = self.place(given[0][0]), f"{key} is {shown(value)}"
                    self._note(first, f"is {shown(given[0][1])}, but {second}; keep the one that is meant")
            found = given or found
        return found[0][1], self.place(found[0][0])

    def _fits(self, field: Field, value: Any, place: str) -> bool:
        """Tells whether a value is of its field's type; notes it if not."""
        kind, found = field.type.kind, type_of(value).kind
        if field.name in CANONICAL_SIZES or field.name in _POSITIVE:
            whole = field.name in CANONICAL_SIZES
            fits = found in (("int",) if whole else ("int", "float")) and value > 0
            needed = "a positive integer" if whole else "a positive number"
        else:
            fits = value is None or kind in ("any", found) or (kind, found) == ("float", "int")
            needed = "a number" if kind == "float" else str(field.type)
        if not fits:
            self._note(place, f"{needed} is needed, not {shown(value)}")
        return fits

    def _note(self, place: str, message: str) -> None:
        self.problems.add(Mark(place), "", message)


def _plain(value: Any) -> Any:
    """Returns a rope setting without what other fields say."""
    if not isinstance(value, Mapping):
        return value
    kind = value.get("rope_type", value.get("type"))
    rest = {k: v for k, v in value.items() if k not in ("type", "rope_type", "rope_theta", "partial_rotary_factor")}
    return {"rope_type": None if kind == "default" else kind, **rest}
