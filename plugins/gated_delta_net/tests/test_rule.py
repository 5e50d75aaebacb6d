"""The delta rule in chunks of any length against its definition, token by token in float64."""

from __future__ import annotations

import pytest
import torch

from tpkit_gated_delta_net.rule import delta_rule

KEYS, VALUES, TOKENS = 8, 5, 150


def given(decay: float) -> tuple[torch.Tensor, ...]:
    """Returns q, k, v, decay and strength of 2 sequences, 3 key heads and 2 value heads of each."""
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(2, 3, 1, TOKENS, KEYS), dim=-1) for _ in "qk")
    v, g, b = torch.randn(2, 3, 2, TOKENS, VALUES), -torch.rand(2, 3, 2, TOKENS) * decay, torch.rand(2, 3, 2, TOKENS)
    return q, k, v, g, b


def defined(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = (part.expand(2, 3, 2, TOKENS, KEYS) for part in (q, k))
    state, found = torch.zeros(2, 3, 2, KEYS, VALUES, dtype=torch.float64), []
    for t in range(TOKENS):
        state = state * g[..., t, None, None].exp()
        u = b[..., t, None] * (v[..., t, :] - torch.einsum("...k,...kv->...v", k[..., t, :], state))
        state = state + torch.einsum("...k,...v->...kv", k[..., t, :], u)
        found.append(torch.einsum("...k,...kv->...v", q[..., t, :], state))
    return torch.stack(found, dim=-2), state


@pytest.mark.parametrize("decay", [0.0, 0.1, 5.0, 200.0])  # at the last nothing is left of a token after the next one
@pytest.mark.parametrize("chunk", [1, 7, 64, 150])
def test_chunks_are_exact(chunk: int, decay: float) -> None:
    inputs = given(decay)
    wanted, end = defined(*(part.double() for part in inputs))
    found, state = delta_rule(*inputs, chunk=chunk)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(state.double(), end, rtol=1e-5, atol=2e-5)


def test_the_state_carries_on() -> None:
    q, k, v, g, b = given(1.0)
    wanted, end = delta_rule(q, k, v, g, b)
    state, found = None, []
    for start, stop in ((0, 70), (70, 71), (71, 100), (100, TOKENS)):
        parts = [part[..., start:stop, :] for part in (q, k, v)] + [part[..., start:stop] for part in (g, b)]
        y, state = delta_rule(*parts, state)
        found.append(y)
    torch.testing.assert_close(torch.cat(found, dim=-2), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, end, rtol=1e-5, atol=1e-5)
