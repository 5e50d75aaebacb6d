"""Faults of ranks that see different things, and of sums over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkit
from tests.ranks import Ranks
from tests.small import CONFIG, weights, write
from tpkit.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear


def build(folders: list[Path]) -> int:
    folder = folders[dist.get_rank()]
    return tpkit.build(tpkit.load_spec("llama", config=folder), checkpoint=folder).param_bytes()


def test_a_file_that_only_one_rank_finds_damaged_ends_all(ranks: Ranks, tmp_path: Path) -> None:
    good, bad = write(tmp_path / "good"), write(tmp_path / "bad")
    file = bad / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    mine, other = ranks(2).outcomes(build, [bad, good])
    assert isinstance(mine, tpkit.CheckpointError) and "its header needs" in str(mine)
    assert (
        isinstance(other, tpkit.RankError)
        and "rank 0 failed: CheckpointError" in str(other)
        and str(file) in str(other)
    )


def test_values_that_only_one_rank_finds_wrong_end_all(ranks: Ranks, tmp_path: Path) -> None:
    """A head that differs from the embedding in a row of rank 1 alone."""
    head = weights()["model.embed_tokens.weight"].clone()
    head[-1] += 1
    folder = write(tmp_path, weights() | {"lm_head.weight": head}, tie_word_embeddings=True)
    first, second = ranks(2).outcomes(build, [folder] * 2)
    assert isinstance(second, tpkit.CheckpointError) and "is not equal" in str(second)
    assert isinstance(first, tpkit.RankError) and "rank 1 failed" in str(first)


@pytest.mark.parametrize(
    ("fields", "field"), [({"rope_theta": 500.0}, "config.json rope_theta"), ({"vocab_size": 98}, "checkpoint")]
)
def test_ranks_with_other_inputs_are_named_on_all_ranks(
    fields: dict[str, Any], field: str, ranks: Ranks, tmp_path: Path
) -> None:
    folders = [write(tmp_path / "a"), write(tmp_path / "b"), write(tmp_path / "c", **fields)]
    for error in ranks(3).outcomes(build, folders):
        assert isinstance(error, tpkit.RankError)
        assert f"rank 2: {field}" in str(error) and "rank 1" not in str(error)


def other_seed() -> None:
    tpkit.build(tpkit.load_spec("llama", config=CONFIG), dummy_weights=True, seed=dist.get_rank())


def test_ranks_with_other_random_weights_are_named(ranks: Ranks) -> None:
    with pytest.raises(tpkit.RankError, match="rank 1: seed of dummy weights is 1, on rank 0 0"):
        ranks(2).run(other_seed)


# sums over ranks ------------------------------------------------------------------------------------------------------


def rows(reduce: bool, skip: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    layer = RowParallelLinear(
        4, 3, tp=dist.group.WORLD, input_is_parallel=False, reduce_results=reduce, skip_bias_add=skip
    )
    layer.load({"weight": torch.eye(3, 4), "bias": torch.tensor([100.0, 200.0, 300.0])})
    answer = layer(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    return answer if skip else (answer, None)


@pytest.mark.parametrize("tp", [1, 2, 3, 5])
def test_a_row_bias_is_added_once(tp: int, ranks: Ranks) -> None:
    for y, _ in ranks(tp).run(rows, True, False):
        assert y.tolist() == [[101, 202, 303]]
    for y, bias in ranks(tp).run(rows, True, True):
        assert y.tolist() == [[1, 2, 3]] and bias is not None and bias.tolist() == [100, 200, 300]
    deferred = ranks(tp).run(rows, False, True)
    assert sum(y for y, _ in deferred).tolist() == [[1, 2, 3]]
    assert all(bias is not None and bias.tolist() == [100, 200, 300] for _, bias in deferred)


def test_partial_results_with_a_bias_that_every_rank_would_add_are_refused() -> None:
    with pytest.raises(ValueError, match="each of 2 ranks would add") as caught:
        RowParallelLinear(4, 3, tp_rank=0, tp_size=2, reduce_results=False, prefix="mlp.down_proj")
    assert "mlp.down_proj" in str(caught.value) and "skip_bias_add" in str(caught.value)
    RowParallelLinear(4, 3, tp_rank=0, tp_size=1, reduce_results=False)
    RowParallelLinear(4, 3, tp_rank=0, tp_size=2, reduce_results=False, bias=False)


def test_known_partial_sums() -> None:
    weight, x = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]]), torch.tensor([3.0, 5, 1, 1])
    parts = []
    for rank in range(2):
        layer = RowParallelLinear(4, 2, bias=False, tp_rank=rank, tp_size=2, reduce_results=False)
        layer.load({"weight": weight})
        parts.append(layer(x[2 * rank : 2 * rank + 2]).tolist())
    assert parts == [[13, 45], [7, 15]]


def shared_and_routed() -> torch.Tensor:
    """A divided term, one that is summed by itself, and a replicated one: what is partial is summed exactly once."""
    gen = torch.Generator().manual_seed(0)
    up, down, other = (torch.randn(s, generator=gen, dtype=torch.float64) for s in ((7, 4), (4, 7), (4, 4)))
    how: dict[str, Any] = {"bias": False, "dtype": torch.float64}
    a, b = ColumnParallelLinear(4, 7, **how), RowParallelLinear(7, 4, **how)
    c, d = ColumnParallelLinear(4, 7, **how), RowParallelLinear(7, 4, reduce_results=False, **how)
    replicated = ReplicatedLinear(4, 4, **how)
    for layer, weight in ((a, up), (b, down), (c, up), (d, down), (replicated, other)):
        layer.load({"weight": weight})
    x = torch.ones(1, 4, dtype=torch.float64)
    return b(a(x)) + a.tp.all_reduce(d(c(x))) + replicated(x)


@pytest.mark.parametrize("tp", [2, 3])
def test_each_term_of_a_sum_is_reduced_once(tp: int, ranks: Ranks) -> None:
    (alone,) = ranks(1).run(shared_and_routed)
    for result in ranks(tp).run(shared_and_routed):
        assert torch.allclose(result, alone, rtol=1e-12)
