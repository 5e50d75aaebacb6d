"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its scalings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from tpkit.errors import SpecError
from tpkit.layers.context import ForwardContext

__all__ = ["Rotary"]


@dataclass(frozen=True, kw_only=True)
class Plain:
    """What is scaled. Pair i turns once in ``2 pi * periods[i]`` positions."""

    dims: int
    theta: float
    periods: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """Frequencies, and what cosine and sine are multiplied with.

    Attributes:
        frequencies, factor: of passes up to `length`, or of all.
        length: in longer passes (tokens before included) other ones count.
        long, long_factor: these, or
        base: the theta of frequencies for so many tokens.
    """

    frequencies: torch.Tensor
    factor: float = 1.0
    length: float = math.inf
    long: torch.Tensor | None = None
    long_factor: float = 1.0
    base: Callable[[int], float] | None = None


def _periods(dims: int, theta: float, device: torch.device | str | None) -> torch.Tensor:
    return theta ** (torch.arange(0, dims, 2, dtype=torch.float32, device=device) / dims)


def _linear(plain: Plain, scaling: Mapping[str, Any]) -> Scaled:
    """Positions are divided by a factor (Chen et al. 2023, arXiv:2306.15595)."""
    return Scaled(frequencies=1 / plain.periods / float(scaling.get("factor", 1)))


def _dynamic(plain: Plain, scaling: Mapping[str, Any]) -> Scaled:
    """The base grows (NTK-aware scaling; arXiv:2309.00071, section 3.1): once, by alpha, or with the length."""
    if plain.dims < 4:
        raise SpecError(
            f"rope scaling 'dynamic' needs more than one pair of features to turn, not {plain.dims} features"
        )
    if "alpha" in scaling:
        theta = plain.theta * float(scaling["alpha"]) ** (plain.dims / (plain.dims - 2))
        return Scaled(frequencies=1 / _periods(plain.dims, theta, plain.periods.device))
    length = float(scaling["max_position_embeddings"])
    base = partial(_grown, plain.theta, plain.dims, float(scaling["factor"]), length)
    return Scaled(frequencies=1 / plain.periods, length=length, base=base)


def _grown(theta: float, dims: int, factor: float, length: float, total: int) -> float:
    return float(theta * (factor * total / length - (factor - 1)) ** (dims / (dims - 2)))


def _llama3(plain: Plain, scaling: Mapping[str, Any]) -> Scaled:
    """Long wavelengths are slowed down, short ones kept, those between blended (Llama 3.1)."""
    original = float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    frequencies = 1 / plain.periods
    turns = original * frequencies / (2 * math.pi)  # turns of each feature pair within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return Scaled(frequencies=frequencies * (kept + (1 - kept) / float(scaling["factor"])))


def _yarn(plain: Plain, scaling: Mapping[str, Any]) -> Scaled:
    """Pairs that turn often are kept, slow ones slowed down, with a ramp between (Peng et al. 2023, arXiv:2309.00071).

    The ramp runs over the number of the pair, from the one that turns `beta_fast` times within the original context to
    the one that turns `beta_slow` times; `truncate` widens it to whole numbers.
    """
    if plain.theta <= 1:
        raise SpecError(f"rope scaling 'yarn' needs a theta above 1, not {plain.theta}")
    original, factor = float(scaling["original_max_position_embeddings"]), float(scaling["factor"])
    turns = float(scaling.get("beta_fast", 32)), float(scaling.get("beta_slow", 1))
    first, last = (
        plain.dims * math.log(original / (2 * math.pi * turn)) / (2 * math.log(plain.theta)) for turn in turns
    )
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, plain.dims - 1)
    if first == last:
        last += 0.001  # a step, without a division by zero
    pair = torch.arange(plain.dims // 2, dtype=torch.float32, device=plain.periods.device)
    kept = 1 - ((pair - first) / (last - first)).clamp(0, 1)
    frequencies = 1 / (factor * plain.periods) * (1 - kept) + 1 / plain.periods * kept
    return Scaled(frequencies=frequencies, factor=_yarn_factor(scaling, factor))


def _yarn_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """Returns the square root of the temperature of the scores (arXiv:2309.00071, equation 22)."""

    def of(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    mscale, whole = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return of(mscale) / of(whole) if mscale and whole else of(1)


def _longrope(plain: Plain, scaling: Mapping[str, Any]) -> Scaled:
    """Each pair has its own factor, another one beyond the original context (Ding et al. 2024, arXiv:2402.13753)."""
    original = float(scaling["original_max_position_embeddings"])
    frequencies = []
    for key in ("short_factor", "long_factor"):
        if len(scaling[key]) != plain.dims // 2:
            raise SpecError(
                f"rope scaling 'longrope': {key} has {len(scaling[key])} numbers, "
                f"but {plain.dims} features are turned, {plain.dims // 2} pairs"
            )
        factors = torch.tensor(scaling[key], dtype=torch.float32, device=plain.periods.device)
        frequencies.append(1 / (factors * plain.periods))
    if "attention_factor" in scaling:
        short = long = float(scaling["attention_factor"])
    elif "short_mscale" in scaling:
        short, long = float(scaling["short_mscale"]), float(scaling["long_mscale"])
    else:
        factor = max(float(scaling["factor"]), 1)
        short = long = math.sqrt(1 + math.log(factor) / math.log(original))
    return Scaled(frequencies=frequencies[0], factor=short, length=original, long=frequencies[1], long_factor=long)


SCALINGS: dict[str, Callable[[Plain, Mapping[str, Any]], Scaled]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _linear,
}


class Rotary(nn.Module):
    """Turns pairs of features of queries and keys by an angle that grows with the position.

    Args:
        dims: features of a head that are turned; the rest is left alone.
        theta: base of the frequencies.
        pairs: "half": feature i turns with i + dims / 2; "interleaved": 2i turns with 2i + 1.
        scaling: as `tpkit.spec.rope.with_lengths` returns it; None: none.
        turned: of the pairs among `dims`, these many turn, and the rest stands still; None: all.
        device: where the frequencies live.
    """

    def __init__(
        self,
        dims: int,
        theta: float,
        *,
        pairs: Literal["half", "interleaved"] = "half",
        scaling: Mapping[str, Any] | None = None,
        turned: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if dims < 2 or dims % 2:
            raise SpecError(f"rotary embedding turns pairs of features: {dims} of them do not pair up")
        if pairs not in ("half", "interleaved") or not 0 < theta < math.inf:
            raise SpecError(f"rotary embedding: pairs {pairs!r} (half or interleaved), theta {theta} (above 0)")
        if turned is not None and not 1 <= turned <= dims // 2:
            raise SpecError(f"rotary embedding: {turned} pairs turn, of the {dims // 2} that {dims} features make")
        self.pairs = pairs
        self.dims = dims
        scaled = self._scaled(Plain(dims=dims, theta=theta, periods=_periods(dims, theta, device)), scaling)
        if turned is not None:
            scaled.frequencies[turned:] = 0
        self.frequencies: torch.Tensor
        self.long_frequencies: torch.Tensor | None
        self.register_buffer("frequencies", scaled.frequencies, persistent=False)
        self.register_buffer("long_frequencies", scaled.long, persistent=False)
        self.factor, self.long_factor = scaled.factor, scaled.long_factor
        self.length, self.base = scaled.length, scaled.base

    @staticmethod
    def _scaled(plain: Plain, scaling: Mapping[str, Any] | None) -> Scaled:
        if scaling is None:
            return Scaled(frequencies=1 / plain.periods)
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind not in SCALINGS:
            raise SpecError(f"rope scaling {kind!r} is not supported; supported: {', '.join(sorted(SCALINGS))}")
        return SCALINGS[kind](plain, scaling)

    def turning(self, total: int) -> tuple[torch.Tensor, float]:
        """Returns the frequencies of a pass, float32, and what its cosine and sine are multiplied with.

        Args:
            total: tokens up to the last new one.
        """
        if total > self.length and self.base is not None:
            return 1 / _periods(self.dims, self.base(total), self.frequencies.device), self.factor
        if total > self.length and self.long_frequencies is not None:
            return self.long_frequencies, self.long_factor
        return self.frequencies, self.factor

    def angles(self, context: ForwardContext, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosine and sine ``[L, dims / 2]`` of the pass' positions, computed in float32."""

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            frequencies, factor = self.turning(context.past + context.length)
            angles = context.positions[:, None].float() * frequencies[None, :]
            return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

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
