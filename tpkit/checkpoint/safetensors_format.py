"""Safetensors checkpoints: which files count, and their headers.

The header is read here rather than through the library, because what is needed is exactly what it does not tell:
where each tensor's bytes begin, and why a file is not one. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from tpkit.checkpoint.stored import Checkpoint, Stored, listed, stamp_of
from tpkit.dtypes import SAFETENSORS, itemsize
from tpkit.errors import CheckpointError

__all__ = ["INDEX", "SafetensorsFormat", "read_index"]

INDEX = "model.safetensors.index.json"
#: the library refuses longer headers too
MAX_HEADER = 100_000_000


class SafetensorsFormat:
    """Checkpoint format plugin (``tpkit.checkpoint_formats``) for ``*.safetensors``, single file or index."""

    api = 1
    name = "safetensors"

    @staticmethod
    def recognises(path: Path) -> bool:
        """Says whether a path looks like a checkpoint of this format."""
        if path.is_dir():
            return (path / INDEX).exists() or any(p.is_file() for p in path.glob("*.safetensors"))
        return path.suffix == ".safetensors"

    @staticmethod
    def open(path: Path) -> Checkpoint:
        """Reads the headers of all files that count.

        The index decides where there is one. Without it, `model.safetensors` and `model-*-of-*.safetensors` count,
        else every ``*.safetensors``; a tensor that several of them hold is an error, never the last one wins.

        Raises:
            CheckpointError: missing, truncated or foreign files; tensors stored twice; an index that does not hold.
        """
        if path.is_file():
            return _checkpoint(path, [path], {})
        index = path / INDEX
        if index.exists():
            weight_map, total = read_index(index)
            files = _listed_files(path, weight_map)
            found = _checkpoint(path, files, weight_map)
            lost = sorted(name for name in weight_map if name not in found.tensors)
            if lost:
                raise CheckpointError(
                    f"{index}: {len(lost)} tensors are not in the file the index names: "
                    + listed(f"{name} ({weight_map[name]})" for name in lost),
                    hint="the index and the files are of different versions; download the folder again",
                )
            return replace(found, total_size=total)
        named = {p for pattern in ("model.safetensors", "model-*-of-*.safetensors") for p in path.glob(pattern)}
        files = sorted(p for p in (named or path.glob("*.safetensors")) if p.is_file())
        return _checkpoint(path, files, {})


def _checkpoint(path: Path, files: list[Path], weight_map: Mapping[str, str]) -> Checkpoint:
    try:
        stamps = {file: stamp_of(file) for file in files}
    except OSError as cause:
        raise CheckpointError(f"{path}: {cause}") from cause
    return Checkpoint(path, _headers(files, weight_map), stamps=stamps)


def read_index(index: Path) -> tuple[dict[str, str], int | None]:
    """Returns an index file's tensor -> file name, and its total_size in bytes if it states one."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        weight_map = content["weight_map"]
        total = (content.get("metadata") or {}).get("total_size")
        if not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
            raise ValueError("weight_map is empty or does not map names to files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise CheckpointError(f"{index} is not an index: {type(cause).__name__}: {cause}") from cause
    outside = sorted({f for f in weight_map.values() if Path(f).name != f})
    if outside:
        raise CheckpointError(f"{index} names files outside its folder: {listed(outside)}")
    return weight_map, total if isinstance(total, int) else None


def _listed_files(folder: Path, weight_map: Mapping[str, str]) -> list[Path]:
    files = sorted({folder / name for name in weight_map.values()})
    missing = [p.name for p in files if not p.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder / INDEX} names {len(files)} files, {len(missing)} of them missing: {listed(missing)}",
            hint="the download was interrupted; fetch the missing files",
        )
    return files


def _headers(files: list[Path], weight_map: Mapping[str, str]) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    twice: dict[str, list[str]] = {}
    for file in files:
        for name, stored in _read_header(file).items():
            if weight_map.get(name, file.name) != file.name:
                continue  # the index says that another file's copy counts
            if name in tensors:
                twice.setdefault(name, [tensors[name].file.name]).append(file.name)
            tensors[name] = stored
    if twice:
        name, where = next(iter(sorted(twice.items())))
        raise CheckpointError(
            f"{files[0].parent}: {len(twice)} tensors are stored more than once, e.g. {name} in {' and '.join(where)}",
            hint=f"remove one copy of the weights, or add {INDEX} that says which files count",
        )
    return tensors


def _read_header(file: Path) -> dict[str, Stored]:
    try:
        size, begin, content = _parse(file)
    except OSError as cause:
        raise CheckpointError(f"{file} cannot be read: {cause.strerror or cause}") from cause
    tensors: dict[str, Stored] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in content.items():
        if name != "__metadata__":
            stored, end = _entry(file, name, entry, begin)
            tensors[name] = stored
            spans.append((stored.begin, end, name))
    _check_spans(file, size, begin, sorted(spans))
    return tensors


def _parse(file: Path) -> tuple[int, int, dict[str, Any]]:
    """Returns a file's size, where its data begins, and its header."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if len(start) < 8 or length < 2 or length > min(size - 8, MAX_HEADER):
            raise _not_safetensors(file, size, start + stream.read(120), length)
        try:
            content = json.loads(stream.read(length).decode("utf-8"), object_pairs_hook=_unique)
            if not isinstance(content, dict):
                raise ValueError("it is not a mapping")
        except (ValueError, RecursionError) as cause:
            raise CheckpointError(f"{file}: the header is not readable: {cause}") from cause
    return size, 8 + length, content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in it")
    return found


def _entry(file: Path, name: str, entry: Any, begin: int) -> tuple[Stored, int]:
    try:
        dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or not isinstance(shape, list) or not all(map(_is_count, [*shape, first, last])):
            raise ValueError("not a name, sizes and offsets")
    except (TypeError, KeyError, ValueError) as cause:
        raise CheckpointError(f"{file}: the header's entry for {name} is not one: {entry!r:.200}") from cause
    if dtype not in SAFETENSORS:
        raise CheckpointError(f"{file}: {name} has dtype {dtype}; known: {', '.join(SAFETENSORS)}")
    need = prod(shape) * itemsize(SAFETENSORS[dtype])
    if last - first != need:
        raise CheckpointError(f"{file}: {name} {dtype} {shape} needs {need} bytes, its entry has {last - first}")
    return Stored(dtype=SAFETENSORS[dtype], shape=tuple(shape), file=file, begin=begin + first), begin + last


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_spans(file: Path, size: int, begin: int, spans: list[tuple[int, int, str]]) -> None:
    end, before = begin, "the header"
    for first, last, name in spans:
        if first < end:
            raise CheckpointError(f"{file}: the bytes of {name} overlap those of {before}")
        end, before = max(end, last), name
    if end > size:
        raise CheckpointError(
            f"{file}: the file is {size} bytes, its header needs {end}", hint="it is cut short; download it again"
        )


def _not_safetensors(file: Path, size: int, start: bytes, length: int) -> CheckpointError:
    if start.startswith(b"version https://git-lfs"):
        return CheckpointError(f"{file} is a git-lfs pointer ({size} bytes), not the weights", hint="run git lfs pull")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return CheckpointError(f"{file} is a web page ({size} bytes), not the weights", hint="download it again")
    if size == 0:
        return CheckpointError(f"{file} is empty (0 bytes)", hint="download it again")
    if size < 10:
        return CheckpointError(f"{file}: the file is {size} bytes, too few for a safetensors header")
    return CheckpointError(
        f"{file}: not a safetensors file, or cut short: its first bytes announce a header of {length} bytes, "
        f"the file is {size} bytes",
        hint="download it again",
    )
