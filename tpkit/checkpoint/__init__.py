"""Checkpoints: what is stored (headers), who reads what (plan), and the reading.

The names below are what a checkpoint format plugin needs; they are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpkit.checkpoint.open import open_checkpoint
    from tpkit.checkpoint.reader import MappedReader, Reader
    from tpkit.checkpoint.stored import Checkpoint, Stored, stamp_of
    from tpkit.layout import View

_HOMES = {
    "Checkpoint": "tpkit.checkpoint.stored",
    "MappedReader": "tpkit.checkpoint.reader",
    "Reader": "tpkit.checkpoint.reader",
    "Stored": "tpkit.checkpoint.stored",
    "View": "tpkit.layout",
    "open_checkpoint": "tpkit.checkpoint.open",
    "stamp_of": "tpkit.checkpoint.stored",
}

__all__ = ["Checkpoint", "MappedReader", "Reader", "Stored", "View", "open_checkpoint", "stamp_of"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tpkit.checkpoint' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
