"""What a checkpoint holds, known from its headers alone. Pure data; no torch."""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from tpkit.dtypes import FLOATS, itemsize
from tpkit.errors import CheckpointError
from tpkit.layout import Source, View
from tpkit.params import Header

__all__ = ["Checkpoint", "Stored", "matcher", "stamp_of"]

#: a module's tensors have at most so many components below its path
DEEP = 3


@dataclass(frozen=True, kw_only=True)
class Stored(Header):
    """A stored tensor: its header, and where its bytes begin in which file."""

    file: Path
    begin: int

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a checkpoint by name.

    Attributes:
        path: the folder or file it was opened from.
        tensors: headers by name.
        total_size: what its index states as the sum of all bytes, if it does.
        stamps: size and time of change of its files when their headers were read.
        config: a config.json made from its own metadata, if the format carries them.
        quantization: a quantization_config that the format itself implies.
        orders: for modules whose rows it stores in another order than Hugging Face: path -> where logical rows lie.
    """

    path: Path
    tensors: Mapping[str, Stored]
    total_size: int | None = field(default=None, kw_only=True)
    stamps: Mapping[Path, tuple[int, int]] = field(default_factory=dict, kw_only=True)
    config: Mapping[str, Any] | None = field(default=None, kw_only=True)
    quantization: Mapping[str, Any] | None = field(default=None, kw_only=True)
    orders: Mapping[str, View] = field(default_factory=dict, kw_only=True)

    def check_unchanged(self) -> None:
        """Checks that the files are those whose headers were read.

        Raises:
            CheckpointError: if one has another size or time of change by now, or is gone.
        """
        for file, stamp in self.stamps.items():
            try:
                now = stamp_of(file)
            except OSError as cause:
                raise CheckpointError(f"{file} cannot be read any more: {cause}") from cause
            if now != stamp:
                raise CheckpointError(f"{file} was changed after its header was read", hint="start again")

    @cached_property
    def stems(self) -> frozenset[str]:
        """All dotted prefixes of tensor names: a module is stored if its path is among them."""
        found: set[str] = set()
        for name in self.tensors:
            parts = name.split(".")
            found.update(".".join(parts[:n]) for n in range(1, len(parts)))
        return frozenset(found)

    def holds(self, stem: str) -> bool:
        """Says whether a module of this path has any tensor; the empty path has those without a dot."""
        if not stem:
            return any("." not in name for name in self.tensors)
        return stem in self.stems or stem in self.tensors

    def has(self, source: Source) -> bool:
        """Says whether any tensor of a source is stored; of experts with tensors of their own, of the first."""
        stem = source.stem(0)
        if source.bare:
            return stem in self.tensors or bool(self._beside(stem))
        return stem in self.stems if source.stacked else self.holds(stem)

    def headers(self, source: Source, expert: int = 0) -> dict[str, Header]:
        """Returns the headers of a source's tensors by parameter name; of one expert, without the others' dimension."""
        stem = source.stem(expert)
        if source.bare:
            found = self._beside(stem)
            if stem in self.tensors:
                stored = self.tensors[stem]
                found["weight"] = Header(dtype=stored.dtype, shape=stored.shape, encoding=stored.encoding)
        else:
            found = self.under(stem)
        if source.stacked:
            found = {name: replace(header, shape=header.shape[1:]) for name, header in found.items()}
        return found

    def _beside(self, stem: str) -> dict[str, Header]:
        """Returns the headers of ``stem_name`` tensors, by name."""
        parent, _, last = stem.rpartition(".")
        every = self.under(parent)
        return {
            name[len(last) + 1 :]: h for name, h in every.items() if name.startswith(f"{last}_") and "." not in name
        }

    def under(self, stem: str) -> dict[str, Header]:
        """Returns the headers of the tensors below a module's path, by the rest of their names; "": all of them."""
        if not stem:
            return {n: Header(dtype=s.dtype, shape=s.shape, encoding=s.encoding) for n, s in self.tensors.items()}
        names, begin = self._sorted, len(stem) + 1
        first = bisect_left(names, f"{stem}.")
        last = bisect_left(names, f"{stem}/", first)  # the character after a dot
        found = {}
        for name in names[first:last]:
            if name.count(".", begin) < DEEP:
                stored = self.tensors[name]
                found[name[begin:]] = Header(dtype=stored.dtype, shape=stored.shape, encoding=stored.encoding)
        return found

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self.tensors)

    @property
    def float_dtype(self) -> str | None:
        """The float type that most bytes are stored in; None if there is none."""
        sums: dict[str, int] = {}
        for stored in self.tensors.values():
            if stored.dtype in FLOATS:
                sums[stored.dtype] = sums.get(stored.dtype, 0) + stored.nbytes
        return max(sums, key=lambda dtype: (sums[dtype], dtype)) if sums else None

    @property
    def digest(self) -> str:
        """A hash of names, types, shapes and positions: what every rank must see alike."""
        rows = (
            f"{n} {s.dtype} {s.encoding} {s.shape} {s.file.name} {s.begin}\n" for n, s in sorted(self.tensors.items())
        )
        return hashlib.sha256("".join(rows).encode("utf-8", "surrogatepass")).hexdigest()


def stamp_of(file: Path) -> tuple[int, int]:
    """Returns size and time of change of a file."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def matcher(pattern: str) -> re.Pattern[str]:
    """Compiles an ignore pattern over whole dotted components: ``*`` is one, ``**`` one or more."""
    words = {"*": r"[^.]+", "**": r"[^.]+(?:\.[^.]+)*"}
    return re.compile(r"\.".join(words.get(part, re.escape(part)) for part in pattern.split(".")))


def listed(names: Iterable[str], limit: int = 8) -> str:
    """Returns names for a message, cut where there are many."""
    names = sorted(names)
    rest = f", ... and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
