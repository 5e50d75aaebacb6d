"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its scalings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from tpkit.errors import SpecError
from tpkit.layers.context import ForwardContext

__all__ = ["Rotary"]


def _linear(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Positions are divided by a factor (Chen et al. 2023, arXiv:2306.15595)."""
    return frequencies / float(scaling["factor"])


def _llama3(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths are slowed down, short ones kept, those between blended (Llama 3.1)."""
    original = float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = original * frequencies / (2 * math.pi)  # turns of each feature pair within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / float(scaling["factor"]))


SCALINGS: dict[str, Callable[[torch.Tensor, Mapping[str, Any]], torch.Tensor]] = {"linear": _linear, "llama3": _llama3}


class Rotary(nn.Module):
    """Turns pairs of features of queries and keys by an angle that grows with the position.

    Args:
        dims: features of a head that are turned; the rest is left alone.
        theta: base of the frequencies.
        pairs: "half": feature i turns with i + dims / 2; "interleaved": 2i turns with 2i + 1.
        scaling: of config.json, with ``rope_type``; None: none.
        device: where the frequencies live.
    """

    def __init__(
        self,
        dims: int,
        theta: float,
        *,
        pairs: Literal["half", "interleaved"] = "half",
        scaling: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if dims < 2 or dims % 2:
            raise SpecError(f"rotary embedding turns pairs of features: {dims} of them do not pair up")
        if pairs not in ("half", "interleaved") or not 0 < theta < math.inf:
            raise SpecError(f"rotary embedding: pairs {pairs!r} (half or interleaved), theta {theta} (above 0)")
        self.pairs = pairs
        self.dims = dims
        frequencies = 1.0 / theta ** (torch.arange(0, dims, 2, dtype=torch.float32, device=device) / dims)
        if scaling is not None:
            kind = scaling.get("rope_type", scaling.get("type"))
            if kind not in SCALINGS:
                raise SpecError(f"rope scaling {kind!r} is not supported; supported: {', '.join(sorted(SCALINGS))}")
            frequencies = SCALINGS[kind](frequencies, scaling)
        self.frequencies: torch.Tensor
        self.register_buffer("frequencies", frequencies, persistent=False)

    def angles(self, context: ForwardContext, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosine and sine ``[L, dims / 2]`` of the pass' positions, computed in float32."""

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            angles = context.positions[:, None].float() * self.frequencies[None, :]
            return angles.cos().to(dtype), angles.sin().to(dtype)

        return context.once((id(self), dtype), make)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Turns ``[B, heads, L, head_dim]`` by the pass' positions."""
        cos, sin = self.angles(context, x.dtype)
        turned, rest = x[..., : self.dims], x[..., self.dims :]
        if self.pairs == "half":
            a, b = turned.chunk(2, dim=-1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        else:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned
