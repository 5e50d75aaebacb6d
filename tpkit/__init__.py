"""tpkit: language models over any number of ranks, quantised, described in a file.

    spec = tpkit.load_spec("llama.yaml", config=folder)
    model = tpkit.build(spec, checkpoint=folder, dtype=torch.bfloat16)
    logits = model(input_ids)

Importing this package does not import torch; the names below are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tpkit.errors import (
    CheckpointError,
    LoadError,
    PluginError,
    RankError,
    ShardingError,
    SpecError,
    TpkitError,
    UsageError,
)

if TYPE_CHECKING:
    from tpkit.building import build
    from tpkit.checkpoint.open import open_checkpoint
    from tpkit.generation import generate
    from tpkit.model import Model
    from tpkit.params import Blob, Fixed, Flat, In, LinearSpec, Out, ParamSpec, Segment
    from tpkit.planning import plan_model
    from tpkit.quant import QuantMethod, QuantOptions
    from tpkit.registry import Registry
    from tpkit.spec import load_spec
    from tpkit.spec.match import find_spec

_HOMES = {
    "tpkit.building": ["build"],
    "tpkit.checkpoint.open": ["open_checkpoint"],
    "tpkit.generation": ["generate"],
    "tpkit.model": ["Model"],
    "tpkit.params": ["Blob", "Fixed", "Flat", "In", "LinearSpec", "Out", "ParamSpec", "Segment"],
    "tpkit.planning": ["plan_model"],
    "tpkit.quant": ["QuantMethod", "QuantOptions"],
    "tpkit.registry": ["Registry"],
    "tpkit.spec": ["load_spec"],
    "tpkit.spec.match": ["find_spec"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Blob",
    "CheckpointError",
    "Fixed",
    "Flat",
    "In",
    "LinearSpec",
    "LoadError",
    "Model",
    "Out",
    "ParamSpec",
    "PluginError",
    "QuantMethod",
    "QuantOptions",
    "RankError",
    "Registry",
    "Segment",
    "ShardingError",
    "SpecError",
    "TpkitError",
    "UsageError",
    "build",
    "find_spec",
    "generate",
    "load_spec",
    "open_checkpoint",
    "plan_model",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("tpkit")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tpkit' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
