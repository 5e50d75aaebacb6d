"""Rotary embedding against complex numbers: turning a pair by an angle is multiplying with ``exp(i angle)``."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from tpkit.errors import SpecError
from tpkit.layers import ForwardContext, KVCache, Rotary


def turned(x: torch.Tensor, theta: float, dims: int, pairs: str, first: int) -> torch.Tensor:
    """The definition, in float64. ``[B, heads, L, head_dim]``."""
    x = x.double()
    head, rest = x[..., :dims], x[..., dims:]
    steps = torch.arange(dims // 2, dtype=torch.float64)
    positions = torch.arange(first, first + x.shape[-2], dtype=torch.float64)
    turn = torch.polar(torch.ones(()).double(), positions[:, None] * theta ** (-2 * steps / dims))
    if pairs == "interleaved":
        z = torch.view_as_complex(head.unflatten(-1, (-1, 2)).contiguous()) * turn
        return torch.cat([torch.view_as_real(z).flatten(-2), rest], dim=-1)
    z = torch.complex(head[..., : dims // 2], head[..., dims // 2 :]) * turn
    return torch.cat([z.real, z.imag, rest], dim=-1)


@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("dims", [16, 8])
@pytest.mark.parametrize("pairs", ["half", "interleaved"])
def test_pairs_turn_by_their_angle(pairs: Literal["half", "interleaved"], dims: int, first: int) -> None:
    x = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0))
    cache = KVCache([], batch=2, length=12, dtype=torch.float32)
    cache.used = first
    context = ForwardContext(5, torch.device("cpu"), cache)
    made = Rotary(dims, 100.0, pairs=pairs)(x, context)
    assert torch.allclose(made.double(), turned(x, 100.0, dims, pairs, first), atol=1e-5)


def test_frequencies_are_no_part_of_the_state() -> None:
    assert not Rotary(8, 100.0).state_dict()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dims": 7}, "7 of them do not pair up"),
        ({"dims": 8, "scaling": {"rope_type": "foo"}}, "'foo' is not supported"),
    ],
)
def test_what_cannot_be_turned(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Rotary(theta=10000.0, **arguments)
