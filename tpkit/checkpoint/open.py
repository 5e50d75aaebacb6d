"""Opening a checkpoint by path: the installed formats are asked which of them recognises it."""

from __future__ import annotations

import os
from pathlib import Path

from tpkit.checkpoint.stored import Checkpoint, listed
from tpkit.errors import CheckpointError
from tpkit.registry import Registry

__all__ = ["open_checkpoint"]


def open_checkpoint(path: str | os.PathLike[str], registry: Registry | None = None) -> Checkpoint:
    """Reads the headers of a checkpoint; no weights.

    Args:
        path: a folder, or a file of a known format.
        registry: where the formats come from; None: what is installed.

    Raises:
        CheckpointError: if there is nothing at the path that a format recognises, or it is damaged.
    """
    registry = registry or Registry.default()
    path = Path(path)
    if path.name.endswith(".index.json"):
        path = path.parent  # an index stands for its folder
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}: there is no such file or folder")
    names = registry.names("checkpoint format")
    for name in names:
        found = registry.load("checkpoint format", name)
        if found.recognises(path):
            opened: Checkpoint = found.open(path)
            if not opened.tensors:
                raise CheckpointError(f"{path}: the {name} files hold no tensor")
            return opened
    holds = listed(p.name + ("/" if p.is_dir() else "") for p in path.iterdir()) if path.is_dir() else path.name
    raise CheckpointError(
        f"{path} holds no weights in a known format ({', '.join(names)}); it holds: {holds or 'nothing'}",
        hint="*.bin files are pickles, which tpkit does not read: convert them to safetensors"
        if "bin" in holds
        else None,
    )
