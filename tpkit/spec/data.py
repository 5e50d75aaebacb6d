"""Plain data that knows where it was written: what YAML, or a dict, is turned into before anything looks at it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tpkit.errors import SpecError

__all__ = ["Data", "Items", "Mark", "Scalar", "Table", "from_python", "locate", "to_python"]

#: nesting that no description needs; deeper data would exhaust the stack
MAX_DEPTH = 60


class Mark(NamedTuple):
    """A position. Lines and columns count from 1; line 0: the data did not come from a text."""

    source: str
    line: int = 0
    col: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.col}" if self.line else self.source

    def moved(self, columns: int) -> Mark:
        """Returns the position some columns further on the same line."""
        return self._replace(col=self.col + columns) if self.line else self


@dataclass(frozen=True)
class Scalar:
    """A number, flag, text or null."""

    value: bool | int | float | str | None
    mark: Mark
    #: columns from the mark to the first character of a text: 1 where it is quoted
    shift: int = 0


@dataclass(frozen=True)
class Items:
    """A list."""

    items: tuple[Data, ...]
    mark: Mark


@dataclass(frozen=True)
class Table:
    """A mapping with text keys, in written order."""

    entries: Mapping[str, Data]
    mark: Mark
    keys: Mapping[str, Mark] = field(default_factory=dict)

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def get(self, key: str) -> Data | None:
        """Returns a value, or None where the key is absent."""
        return self.entries.get(key)

    def key_mark(self, key: str) -> Mark:
        """Returns where a key is written."""
        return self.keys.get(key, self.mark)


Data = Scalar | Items | Table


def from_python(value: Any, mark: Mark, depth: int = 0) -> Data:
    """Wraps JSON-like Python data; every part gets the same mark.

    Raises:
        SpecError: for anything but mappings with text keys, lists, numbers, texts, flags and None.
    """
    if depth > MAX_DEPTH:
        raise SpecError(f"{mark}: nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise SpecError(f"{mark}: a key must be text, not {key!r}")
        return Table({key: from_python(part, mark, depth + 1) for key, part in value.items()}, mark)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return Items(tuple(from_python(part, mark, depth + 1) for part in value), mark)
    if value is None or isinstance(value, (bool, int, float, str)):
        return Scalar(value, mark)
    raise SpecError(f"{mark}: {value!r} is not plain data", hint="use mappings, lists, numbers, texts, flags and None")


def to_python(data: Data) -> Any:
    """Returns the plain Python value."""
    if isinstance(data, Scalar):
        return data.value
    if isinstance(data, Items):
        return [to_python(part) for part in data.items]
    return {key: to_python(part) for key, part in data.entries.items()}


def locate(data: Data, path: Sequence[str | int], *, key: bool = False) -> Mark:
    """Returns the mark of the part a path leads to, or of the nearest part above it.

    Args:
        data: where to start.
        path: keys and indices.
        key: the position of the last key rather than of its value.
    """
    for step, part in enumerate(path):
        if isinstance(data, Table) and isinstance(part, str) and part in data:
            if key and step == len(path) - 1:
                return data.key_mark(part)
            data = data.entries[part]
        elif isinstance(data, Items) and isinstance(part, int) and part < len(data.items):
            data = data.items[part]
        else:
            break
    return data.mark
