"""Attention with linear biases (Press et al. 2022, arXiv:2108.12409)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tpkit.layers.context import ForwardContext

if TYPE_CHECKING:
    from tpkit.attention import AlibiOptions

__all__ = ["Alibi", "slopes"]


def slopes(heads: int, kind: str = "below", max_bias: float = 8.0) -> list[float]:
    """Returns the slope of every head.

    Args:
        heads: of the whole model. A power of two has the geometric series that ends at ``2 ** -max_bias``.
        kind: of other numbers: "below" has the slopes of the power below, then every other one of twice that; "above"
            has those of the power above, every other one first.
        max_bias: see there.
    """
    if kind == "above":
        power = 2 ** math.ceil(math.log2(heads))
        series = _series(power, max_bias)
        return series if power == heads else [*series[1::2], *series[::2]][:heads]
    power = 2 ** math.floor(math.log2(heads))
    return [*_series(power, max_bias), *_series(2 * power, max_bias)[::2][: heads - power]]


def _series(count: int, max_bias: float) -> list[float]:
    return [2.0 ** (-max_bias * (number + 1) / count) for number in range(count)]


class Alibi:
    """The bias of one rank's heads.

    Args:
        options: words of the description.
        heads: of the whole model.
        own: the run of heads of this rank.
        scale: of the scores.
        device: where the slopes live.
    """

    def __init__(
        self, options: AlibiOptions, heads: int, own: tuple[int, int], scale: float, device: torch.device
    ) -> None:
        found = slopes(heads, options.slopes, options.max_bias)[own[0] : own[1]]
        self.key = ("alibi", tuple(found), scale if options.scaled else 1.0, options.dtype)
        self.slopes = torch.tensor(found, dtype=torch.float32, device=device)[:, None, None]
        self.factor = scale if options.scaled else 1.0
        self.rounded = torch.bfloat16 if options.dtype == "bfloat16" else None

    def bias(self, context: ForwardContext) -> torch.Tensor:
        """Returns ``[heads, L, past + L]`` float32, what is added to the scores; layers of the same kind share it."""
        return context.once(self.key, lambda: self._made(context))

    def _made(self, context: ForwardContext) -> torch.Tensor:
        if self.rounded is None:
            return context.distance() * -self.slopes * self.factor
        # rounded, a bias is no function of the distance alone: it grows with the key's position
        keys = torch.arange(context.past + context.length, device=self.slopes.device)
        return (self.slopes.to(self.rounded) * keys.to(self.rounded)).float() * self.factor
