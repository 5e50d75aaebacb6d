"""The checkpoint format: which files belong together, and what they hold in Hugging Face's terms."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

from tpkit import CheckpointError
from tpkit.checkpoint import Checkpoint, Stored, stamp_of
from tpkit_gguf.config import Fields, config_of
from tpkit_gguf.container import Contents, Info, read_container
from tpkit_gguf.names import ARCHITECTURES, head_orders, hf_name
from tpkit_gguf.types import BLOCKS, PLAIN

__all__ = ["GgufFormat"]

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_FREQUENCIES = "rope_freqs.weight"


class GgufFormat:
    """Checkpoint format plugin (``tpkit.checkpoint_formats``) for ``*.gguf``, single file or split."""

    api = 1
    name = "gguf"

    @staticmethod
    def recognises(path: Path) -> bool:
        """Says whether a path looks like a checkpoint of this format.

        A folder that has safetensors too is theirs: its GGUF files are asked for by name.
        """
        if path.is_dir():
            return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
        return path.suffix == ".gguf"

    @staticmethod
    def open(path: Path) -> Checkpoint:
        """Reads the headers of a file and of those it was split into.

        Raises:
            CheckpointError: damaged or missing files, an unknown architecture, metadata that is not understood.
        """
        files = _files(path)
        try:
            stamps = {file: stamp_of(file) for file in files}
        except OSError as cause:
            raise CheckpointError(f"{path}: {cause}") from cause
        parts = [read_container(file) for file in files]
        _check_split(files, parts)
        metadata = parts[0].metadata
        fields = Fields(file=files[0], arch=_architecture(files[0], metadata), metadata=metadata)
        placed = _named(files, parts, fields.arch)
        frequencies = placed.pop(_FREQUENCIES, None)
        shapes = {name: info.shape for name, (_, info) in placed.items()}
        config = config_of(fields, shapes, None if frequencies is None else _floats(*frequencies))
        tensors = {name: _stored(file, info) for name, (file, info) in placed.items()}
        return Checkpoint(
            path,
            tensors,
            stamps=stamps,
            config=config,
            quantization={"quant_method": "gguf"} if any(t.encoding for t in tensors.values()) else None,
            orders=_orders(files[0], fields.arch, config, shapes),
        )


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        sets = {_set_of(file): file for file in sorted(path.glob("*.gguf"))}
        if len(sets) != 1:
            raise CheckpointError(
                f"{path} holds {len(sets)} GGUF models: {', '.join(sorted(sets))}", hint="name the file that is meant"
            )
        (path,) = sets.values()
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    stem, _, count = found.groups()
    files = [path.with_name(f"{stem}-{n:05d}-of-{count}.gguf") for n in range(1, int(count) + 1)]
    missing = [file.name for file in files if not file.is_file()]
    if missing or path not in files:
        raise CheckpointError(
            f"{path} is one of {int(count)} parts; missing: {', '.join(missing[:8]) or 'its own number among them'}",
            hint="the download was interrupted; fetch the missing files",
        )
    return files


def _set_of(file: Path) -> str:
    found = _PART.fullmatch(file.name)
    return f"{found[1]}-*-of-{found[3]}.gguf" if found else file.name


def _check_split(files: list[Path], parts: list[Contents]) -> None:
    for number, (file, part) in enumerate(zip(files, parts, strict=True)):
        told = part.metadata.get("split.no", 0), part.metadata.get("split.count", 0) or 1
        if told != (number, len(files)):
            raise CheckpointError(
                f"{file} says it is part {told[0]} (from 0) of {told[1]}, by its name it is {number} of {len(files)}",
                hint="give the files the names they were split under",
            )
    total, held = parts[0].metadata.get("split.tensors.count"), sum(len(part.tensors) for part in parts)
    if total is not None and total != held:
        raise CheckpointError(f"{files[0]} says the parts hold {total} tensors, they hold {held}")


def _architecture(file: Path, metadata: dict[str, Any]) -> str:
    arch, kind = metadata.get("general.architecture"), metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"{file} holds a {kind!r}, not a model (general.type)")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise CheckpointError(
            f"{file}: architecture {arch!r} is not known; known: {', '.join(ARCHITECTURES)}",
            hint="its safetensors checkpoint may work: descriptions know more architectures than GGUF names do here",
        )
    return arch


def _named(files: list[Path], parts: list[Contents], arch: str) -> dict[str, tuple[Path, Info]]:
    placed: dict[str, tuple[Path, Info]] = {}
    for file, part in zip(files, parts, strict=True):
        for own, info in part.tensors.items():
            name = hf_name(own, arch)
            if name in placed:
                raise CheckpointError(f"{name} is stored twice: in {placed[name][0].name} and as {own} in {file.name}")
            placed[name] = (file, info)
    return placed


def _stored(file: Path, info: Info) -> Stored:
    if info.kind in PLAIN:
        return Stored(dtype=PLAIN[info.kind], shape=info.shape, file=file, begin=info.begin)
    per, size = BLOCKS[info.kind]
    shape = (*info.shape[:-1], info.shape[-1] // per * size)
    return Stored(dtype="uint8", shape=shape, encoding=info.kind, file=file, begin=info.begin)


def _floats(file: Path, info: Info) -> tuple[float, ...]:
    if info.kind != "F32" or len(info.shape) != 1:
        raise CheckpointError(f"{file}: {_FREQUENCIES} is {info.kind} {list(info.shape)}, not a row of F32")
    with file.open("rb") as stream:
        stream.seek(info.begin)
        return struct.unpack(f"<{info.shape[0]}f", stream.read(info.nbytes))


def _orders(file: Path, arch: str, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    if arch != "llama":
        return {}
    orders = head_orders(shapes, config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"])
    for module, view in orders.items():
        for name in (f"{module}.weight", f"{module}.bias"):
            if shapes.get(name, (view.size,))[0] != view.size:
                raise CheckpointError(
                    f"{file}: {name} has {shapes[name][0]} rows, its heads have {view.size}",
                    hint="the metadata's numbers of heads do not fit the tensors",
                )
    return orders
