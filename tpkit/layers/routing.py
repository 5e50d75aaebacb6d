"""Which experts a token goes to, and with which weights. One router with a few knobs covers the families' routers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tpkit.feedforward import RoutingOptions

__all__ = ["route"]

#: keeps a sum of weights from being zero
TINY = 1e-20


def route(
    logits: torch.Tensor, options: RoutingOptions, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts.

    Args:
        logits: ``[T, experts]`` of the router, in any float type.
        options: how to choose; see `tpkit.feedforward.RoutingOptions`.
        correction: ``[experts]``, added to the scores for choosing, not for weighing (Wang et al. 2024,
            arXiv:2408.15664).

    Returns:
        weights ``[T, top_k]`` float32, and the numbers of the experts ``[T, top_k]`` int64.
    """
    logits = logits.float()
    scores = logits
    if options.score == "softmax":
        scores = torch.softmax(logits, dim=-1)
    elif options.score == "sigmoid":
        scores = torch.sigmoid(logits)
    choice = scores if correction is None else scores + correction.float()
    if options.groups is not None:
        choice = _of_best_groups(choice, options)
    chosen = torch.topk(choice, options.top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if options.weights == "softmax":
        weights = torch.softmax(weights, dim=-1)
    elif options.weights == "sigmoid":
        weights = torch.sigmoid(weights)
    if options.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return weights * options.scale, chosen


def _of_best_groups(choice: torch.Tensor, options: RoutingOptions) -> torch.Tensor:
    """Leaves the scores of a token's best groups of experts (arXiv:2405.04434, 2.2.1), -inf elsewhere."""
    groups, kept = options.groups, options.top_groups
    assert groups is not None and kept is not None  # noqa: S101 - given together
    apart = choice.unflatten(-1, (groups, -1))
    if options.group_score == "max":
        ranked = apart.amax(-1)
    else:
        ranked = apart.topk(min(2, apart.shape[-1]), dim=-1).values.sum(-1)
    best = torch.topk(ranked, kept, dim=-1).indices
    mask = torch.ones_like(ranked, dtype=torch.bool).scatter(-1, best, False)
    kept_scores: torch.Tensor = apart.masked_fill(mask.unsqueeze(-1), -torch.inf).flatten(-2)
    return kept_scores
