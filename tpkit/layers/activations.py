"""Activations by the names of config.json."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from tpkit.feedforward import ClampedSwiglu

__all__ = ["ACTIVATIONS", "gate_of"]

Activation = Callable[[torch.Tensor], torch.Tensor]
Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_tanh = partial(F.gelu, approximate="tanh")

#: by the names of config.json
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_fast": _tanh,
    "gelu_new": _tanh,
    "gelu_pytorch_tanh": _tanh,
    "linear": lambda x: x,
    "mish": F.mish,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


def gate_of(activation: Activation | ClampedSwiglu) -> Gate:
    """Returns what makes one of gate and up: ``act(gate) * up``, or what a gated activation says."""
    if callable(activation):
        return partial(_gated, activation)
    return partial(_clamped, activation.alpha, activation.limit)


def _gated(act: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return act(gate) * up


def _clamped(alpha: float, limit: float, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)
