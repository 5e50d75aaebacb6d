"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464), in chunks: exact, whatever their length.

A head has a state S, a matrix that answers a query q with ``q S``. At each token it fades by ``exp(g)``, and what it
answers to the token's key k moves towards the token's value v by the share b:

    S <- exp(g) S,    S <- S + outer(k, u)  with  u = b (v - k S),    y = q S

Within a chunk the corrections u of all tokens solve one triangular system (Yang et al. 2024, arXiv:2406.06484): with
G the sum of g up to a token and S the state before the chunk, ``k S`` at token t is what is left of that state and of
the earlier corrections,

    u_t + b_t sum(exp(G_t - G_j) (k_t . k_j) u_j for j < t) = b_t (v_t - exp(G_t) k_t S)

No exponent is positive, so nothing overflows. A chunk of one token is the recurrence.
"""

from __future__ import annotations

import torch

__all__ = ["CHUNK", "delta_rule"]

#: tokens whose corrections are solved for together
CHUNK = 64


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
    state: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the rule over some tokens.

    Args:
        q, k: ``[..., L, key features]`` float32. Heads that share them have a dimension of one here.
        v: ``[..., L, value features]`` float32.
        decay: ``[..., L]`` float32, g, at most 0.
        strength: ``[..., L]`` float32, b.
        state: ``[..., key features, value features]`` float32, before these tokens; None: all zero.
        chunk: tokens that are computed together.

    Returns:
        what the queries are answered, as `v`, and the state after these tokens.
    """
    if state is None:
        state = v.new_zeros(*v.shape[:-2], k.shape[-1], v.shape[-1])
    found = []
    tokens = (part.split(chunk, dim=-2) for part in (q, k, v))
    gates = (part.split(chunk, dim=-1) for part in (decay, strength))
    for qs, ks, vs, decays, strengths in zip(*tokens, *gates, strict=True):
        y, state = _chunk(qs, ks, vs, decays, strengths, state)
        found.append(y)
    return torch.cat(found, dim=-2), state


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, strength: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the rule over one chunk; arguments and results as in `delta_rule`."""
    length = v.shape[-2]
    left = decay.cumsum(-1).exp().unsqueeze(-1)  # of the state before the chunk, at each token
    u = strength.unsqueeze(-1) * (v - left * (k @ state))
    answers = left * (q @ state)
    if length == 1:
        return answers + (q * k).sum(-1, keepdim=True) * u, left * state + k.transpose(-1, -2) @ u
    # what is left at t of a token j, summed up from j: differences of sums from the start would lose what decides
    fade = decay.unsqueeze(-1).expand(*decay.shape, length).tril(-1).cumsum(-2).exp().tril()
    among = strength.unsqueeze(-1) * fade * (k @ k.transpose(-1, -2))
    u = torch.linalg.solve_triangular(among, u, upper=False, unitriangular=True)
    answers = answers + (fade * (q @ k.transpose(-1, -2))) @ u
    kept = k * fade[..., -1, :].unsqueeze(-1)
    return answers, left[..., -1:, :] * state + kept.transpose(-1, -2) @ u
