"""The conformance kit for authors of quant methods. Three lines make a test class; pytest collects what it inherits.

    class TestMine(QuantConformance):
        method = Mine()
        encode, decode = staticmethod(encode), staticmethod(decode)

Everything runs on the CPU, without process groups: the shards of all ranks live in one process. Importing this package
imports neither torch nor pytest; the names below are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpkit.testing.conformance import QuantConformance, check
    from tpkit.testing.finding import REASONS, Finding

_HOME_OF = {
    "Finding": "tpkit.testing.finding",
    "QuantConformance": "tpkit.testing.conformance",
    "REASONS": "tpkit.testing.finding",
    "check": "tpkit.testing.conformance",
}

__all__ = ["REASONS", "Finding", "QuantConformance", "check"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tpkit.testing' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
