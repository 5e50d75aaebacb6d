"""Opening a checkpoint by path: the installed formats are asked which of them recognises it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tpkit.checkpoint.stored import Checkpoint, listed
from tpkit.errors import CheckpointError, PluginError
from tpkit.registry import Plugin, Registry

__all__ = ["open_checkpoint"]


def open_checkpoint(path: str | os.PathLike[str], registry: Registry | None = None) -> Checkpoint:
    """Reads the headers of a checkpoint; no weights.

    Args:
        path: a folder, or a file of a known format.
        registry: where the formats come from; None: what is installed.

    Raises:
        CheckpointError: if there is nothing at the path that a format recognises, or it is damaged.
        PluginError: if formats of several distributions recognise it.
    """
    registry = registry or Registry.default()
    path = Path(path)
    if path.name.endswith(".index.json"):
        path = path.parent  # an index stands for its folder
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}: there is no such file or folder")
    formats, broken = _formats(registry)
    able = {plugin: found for plugin, found in formats.items() if found.recognises(path)}
    if len(able) > 1:
        who = " and ".join(f"{plugin.name} of {plugin.distribution}" for plugin in able)
        raise PluginError(f"{path} is recognised by {who}", hint="uninstall one of them")
    for plugin, found in able.items():
        opened: Checkpoint = found.open(path)
        if not opened.tensors:
            raise CheckpointError(f"{path}: the {plugin.name} files hold no tensor")
        return opened
    holds = listed(p.name + ("/" if p.is_dir() else "") for p in path.iterdir()) if path.is_dir() else path.name
    known = ", ".join(plugin.name for plugin in formats)
    raise CheckpointError(
        "\n  ".join([f"{path} holds no weights in a known format ({known}); it holds: {holds or 'nothing'}", *broken]),
        hint="*.bin files are pickles, which tpkit does not read: convert them to safetensors"
        if "bin" in holds
        else None,
    )


def _formats(registry: Registry) -> tuple[dict[Plugin, Any], list[str]]:
    """Returns the formats that import, and what is wrong with the others: they must not stop these."""
    formats: dict[Plugin, Any] = {}
    broken: list[str] = []
    for plugin in registry.listing():
        if plugin.kind == "checkpoint format":
            try:
                formats[plugin] = registry.load(plugin.kind, f"{plugin.name}@{plugin.distribution}")
            except PluginError as error:
                broken.append(error.message)
    return formats, broken
