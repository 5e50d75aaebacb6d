"""Every family on 1 to 5 real ranks: the logits of transformers, whatever divides by what."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import tpkit
from tests.families import SIZES, Families, Made, Tiny
from tests.ranks import Ranks
from tpkit.model import Model

#: relative to the largest logit, in float32
TOLERANCE = 1e-4
#: tokens per forward pass with a cache, of 14
CHUNKS = (5, 1, 1, 1, 6)
#: groups of ranks that work at the same time: every size from 1 to 5 once
PHASES = [[range(5)], [range(4), range(4, 5)], [range(3), range(3, 5)]]


def off(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Returns the largest difference relative to the reference's largest value."""
    assert logits.shape == reference.shape
    return ((logits.float() - reference).abs().max() / reference.abs().max()).item()


def in_chunks(model: Model, ids: torch.Tensor) -> torch.Tensor:
    """Returns all logits, computed piece by piece with a KV cache."""
    cache = model.new_cache(*ids.shape)
    return torch.cat([model(piece, cache) for piece in ids.split(CHUNKS, dim=1)], dim=1)


def differences(made: Made) -> tuple[int, float, float]:
    """Builds the model on groups of 1 to 5 ranks; returns the size of the worst and its differences."""
    found = []
    spec = tpkit.load_spec(made.tiny.description, config=made.folder)
    for phase in PHASES:
        groups = [(members, dist.new_group(list(members))) for members in phase]
        group = next(group for members, group in groups if dist.get_rank() in members)
        model = tpkit.build(spec, checkpoint=made.folder, tp=group)
        with torch.inference_mode():
            plain, cached = off(model(made.ids), made.logits), off(in_chunks(model, made.ids), made.logits)
        found.append((model.tp.size, plain, cached))
    return max(found, key=lambda row: row[1] + row[2])


def cases() -> list[object]:
    """Every family in every size; half of them, every family and every size among it, in the fast suite."""
    found = []
    for row, family in enumerate(["llama", "mistral", "qwen2", "qwen3"]):
        for column, size in enumerate(SIZES):
            marks = [pytest.mark.slow] if (row + column) % 2 else []
            found.append(pytest.param(family, size, marks=marks, id=f"{family}-{'-'.join(map(str, size))}"))
    return found


@pytest.mark.parametrize(("family", "size"), cases())
def test_logits_are_those_of_transformers(
    family: str, size: tuple[int, int, int, int, int], families: Families, ranks: Ranks
) -> None:
    heads, kv, ffn, vocab, hidden = size
    made = families.make(Tiny(family=family, heads=heads, kv=kv, ffn=ffn, vocab=vocab, hidden=hidden))
    for rank, (tp, plain, cached) in enumerate(ranks(5).run(differences, made)):
        assert max(plain, cached) < TOLERANCE, f"rank {rank}, tp {tp}: {plain:.1e} at once, {cached:.1e} with a cache"
