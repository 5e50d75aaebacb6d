"""The GGUF container: metadata and where each tensor lies. Nothing of a file is believed.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tpkit import CheckpointError
from tpkit_gguf.types import BLOCKS, KNOWN, NAMES, PLAIN

__all__ = ["Array", "Contents", "Info", "read_container"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
#: longer arrays (the tokens' scores) are counted, not kept
_KEPT = 4096
#: of a tensor's entry without its name, and of a metadata entry without its key and value
_LEAST_TENSOR, _LEAST_ENTRY = 32, 13
_DIMENSIONS = 4


class Array(NamedTuple):
    """An array in the metadata: how many elements, and numbers if they are few; strings are only counted."""

    length: int
    values: tuple[Any, ...] | None


@dataclass(frozen=True, kw_only=True)
class Info:
    """A tensor: its type's name, its shape as logical elements (rows first), and its bytes."""

    kind: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a file's header says."""

    metadata: dict[str, Any]
    tensors: dict[str, Info]


def read_container(file: Path) -> Contents:
    """Reads a file's header.

    Raises:
        CheckpointError: the file is no GGUF file, of a version that is not known, cut short, or contradicts itself.
    """
    try:
        with file.open("rb") as stream:
            start = stream.read(120)
            if not start.startswith(b"GGUF"):
                _refuse_foreign(file, start)
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(_Cursor(file, data))
    except OSError as cause:
        raise CheckpointError(f"{file} cannot be read: {cause.strerror or cause}") from cause


class _Cursor:
    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self.file, self.data, self.at, self.size = file, data, 4, len(data)

    def wrong(self, what: str, hint: str | None = None) -> NoReturn:
        raise CheckpointError(f"{self.file}: {what}", hint=hint)

    def need(self, count: int, what: str) -> int:
        """Steps over bytes that must be there; returns where they begin."""
        if count > self.size - self.at:
            self.wrong(
                f"{what} at byte {self.at} needs {count} bytes, the file is {self.size}",
                hint="it is cut short or damaged; download it again",
            )
        self.at += count
        return self.at - count

    def number(self, code: str, what: str) -> Any:
        layout = "<" + code
        return struct.unpack_from(layout, self.data, self.need(struct.calcsize(layout), what))[0]

    def text(self, what: str, errors: str = "strict") -> str:
        length = self.number("Q", what)
        begin = self.need(length, what)
        try:
            return self.data[begin : begin + length].decode("utf-8", errors)
        except UnicodeDecodeError as cause:
            self.wrong(f"{what} at byte {begin} is no UTF-8: {cause.reason}")

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.text(key, "replace")  # an author's name that is spoilt hurts nobody
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            self.wrong(f"{key} has a value of type {kind}; known: {', '.join(map(str, (*_SCALARS, _STRING, _ARRAY)))}")
        return self.number(_SCALARS[kind], key)

    def array(self, key: str) -> Array:
        kind, count = self.number("I", key), self.number("Q", key)
        if kind == _STRING:
            self.room(count, 8, f"{key} with {count} texts")
            self.skip_texts(count, key)
            return Array(count, None)
        if kind not in _SCALARS:
            self.wrong(f"{key} is an array of type {kind}, which is not known")
        layout = f"<{count if count <= _KEPT else 0}{_SCALARS[kind]}"
        begin = self.need(count * struct.calcsize("<" + _SCALARS[kind]), f"{key} with {count} numbers")
        return Array(count, struct.unpack_from(layout, self.data, begin) if count <= _KEPT else None)

    def skip_texts(self, count: int, key: str) -> None:
        # a vocabulary has 10 ** 5 of them, and every rank reads the header
        length, begin, at = struct.Struct("<Q").unpack_from, self.at, self.at
        for _ in range(count):
            if at + 8 > self.size:
                at += 8
                break
            at += 8 + length(self.data, at)[0]
        self.need(at - begin, f"{key} with {count} texts")

    def room(self, count: int, least: int, what: str) -> None:
        """Checks a count against the bytes that are left, before anything is read for it."""
        if count * least > self.size - self.at:
            self.wrong(
                f"{what} at byte {self.at} need at least {count * least} bytes, the file is {self.size}",
                hint="it is cut short or damaged; download it again",
            )


def _read(cursor: _Cursor) -> Contents:
    version = cursor.number("I", "the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        told = f"version {swapped}, big endian" if swapped in (2, 3) else f"version {version}"
        cursor.wrong(f"it is a GGUF file of {told}; known: 2 and 3, little endian", hint="convert it again")
    tensors, entries = cursor.number("Q", "the number of tensors"), cursor.number("Q", "the number of metadata entries")
    cursor.room(entries, _LEAST_ENTRY, f"{entries} metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.text("a metadata key")
        if key in metadata:
            cursor.wrong(f"the metadata has {key} twice")
        metadata[key] = cursor.value(cursor.number("I", key), key)
    cursor.room(tensors, _LEAST_TENSOR, f"{tensors} tensors")
    listed: list[tuple[str, str, tuple[int, ...], int]] = [_tensor(cursor) for _ in range(tensors)]
    return Contents(metadata=metadata, tensors=_placed(cursor, listed, _alignment(cursor, metadata)))


def _tensor(cursor: _Cursor) -> tuple[str, str, tuple[int, ...], int]:
    """Returns name, type, shape and offset of a tensor's entry."""
    name = cursor.text("a tensor's name")
    dims = cursor.number("I", name)
    if not 1 <= dims <= _DIMENSIONS:
        cursor.wrong(f"{name} has {dims} dimensions; GGUF has 1 to {_DIMENSIONS}")
    shape = tuple(cursor.number("Q", name) for _ in range(dims))[::-1]  # the fastest dimension comes first on disk
    if 0 in shape:
        cursor.wrong(f"{name} has shape {list(shape)}")
    number, offset = cursor.number("I", name), cursor.number("Q", name)
    kind = NAMES.get(number, "")
    if kind not in PLAIN and kind not in BLOCKS:
        cursor.wrong(f"{name} is of type {kind or 'with a number'} ({number}), which cannot be read; known: {KNOWN}")
    return name, kind, shape, offset


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment < 1 or alignment & (alignment - 1):
        cursor.wrong(f"general.alignment is {alignment!r}, not a power of two")
    return alignment


def _placed(cursor: _Cursor, listed: list[tuple[str, str, tuple[int, ...], int]], alignment: int) -> dict[str, Info]:
    start = -(-cursor.at // alignment) * alignment
    found: dict[str, Info] = {}
    end, before = start, "the header"
    for name, kind, shape, offset in sorted(listed, key=lambda entry: entry[3]):
        per, size = BLOCKS.get(kind, (1, _plain_size(kind)))
        if shape[-1] % per:
            cursor.wrong(f"{name} {kind} {list(shape)}: a row of {shape[-1]} is not whole blocks of {per}")
        if name in found:
            cursor.wrong(f"it holds {name} twice")
        if offset % alignment:
            cursor.wrong(f"{name} begins at {offset} of the data, not at a multiple of {alignment}")
        info = Info(kind=kind, shape=shape, begin=start + offset, nbytes=prod(shape) // per * size)
        if info.begin < end:
            cursor.wrong(f"the bytes of {name} overlap those of {before}")
        end, before = info.begin + info.nbytes, name
        if end > cursor.size:
            cursor.wrong(
                f"{name} {kind} {list(shape)} ends at byte {end}, the file is {cursor.size}",
                hint="it is cut short; download it again",
            )
        found[name] = info
    return found


def _plain_size(kind: str) -> int:
    return {"I8": 1, "F16": 2, "BF16": 2, "I16": 2, "F32": 4, "I32": 4}.get(kind, 8)


def _refuse_foreign(file: Path, start: bytes) -> NoReturn:
    if not start:
        raise CheckpointError(f"{file} is empty (0 bytes)", hint="download it again")
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{file} is a git-lfs pointer, not the weights", hint="run git lfs pull")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise CheckpointError(f"{file} is a web page, not the weights", hint="download it again")
    raise CheckpointError(f"{file} is no GGUF file: it begins with {start[:4]!r}, not b'GGUF'")
