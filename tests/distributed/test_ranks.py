"""The ranks that other tests rely on: results in order, failures within seconds, worlds of any size."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Ranks
from tpkit.errors import CheckpointError, LoadError


def rank_plus(number: int) -> int:
    return dist.get_rank() + number


def total() -> float:
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()


def tensor() -> torch.Tensor:
    return torch.full((3,), float(dist.get_rank()), dtype=torch.bfloat16)


def one_raises_the_others_wait() -> None:
    if dist.get_rank() == 1:
        raise CheckpointError("rank 1 found the file cut short", hint="download it again")
    dist.barrier()


def one_is_killed() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def one_hangs_one_raises() -> None:
    if dist.get_rank() == 0:
        raise KeyError("first")
    time.sleep(1000)


def raises_by_rank() -> int:
    if dist.get_rank() == 2:
        raise ValueError("two")
    return dist.get_rank()


def raises_what_pickle_cannot_rebuild() -> None:
    raise LoadError("nothing fits", {"missing": ["a.weight"]}, hint="look again")


@pytest.mark.parametrize("size", [1, 2, 5, 3])
def test_every_rank_answers_in_order(ranks: Ranks, size: int) -> None:
    assert ranks(size).run(rank_plus, 10) == [10 + rank for rank in range(size)]
    assert ranks(size).run(total) == [size * (size + 1) / 2] * size


def test_tensors_come_back(ranks: Ranks) -> None:
    assert [result.tolist() for result in ranks(2).run(tensor)] == [[0.0] * 3, [1.0] * 3]


def test_the_error_of_a_rank_is_raised_while_others_wait(ranks: Ranks) -> None:
    with pytest.raises(CheckpointError, match="cut short") as caught:
        ranks(3).run(one_raises_the_others_wait)
    assert caught.value.hint == "download it again"
    assert "rank 1 of 3" in str(caught.value.__cause__)
    assert ranks(3).run(rank_plus, 0) == [0, 1, 2]


def test_a_killed_rank_is_told_and_replaced(ranks: Ranks) -> None:
    outcomes = ranks(2).outcomes(one_is_killed)
    assert isinstance(outcomes[0], ChildProcessError)
    assert "SIGKILL" in str(outcomes[0])
    assert ranks(2).run(rank_plus, 0) == [0, 1]


def test_a_hanging_rank_does_not_hide_the_error(ranks: Ranks) -> None:
    with pytest.raises(KeyError, match="first"):
        ranks(2).run(one_hangs_one_raises)
    assert ranks(2).run(rank_plus, 0) == [0, 1]


def test_outcomes_hold_results_and_errors(ranks: Ranks) -> None:
    outcomes = ranks(3).outcomes(raises_by_rank)
    assert outcomes[:2] == [0, 1]
    assert isinstance(outcomes[2], ValueError)


def test_exceptions_with_constructors_of_their_own_arrive_whole(ranks: Ranks) -> None:
    with pytest.raises(LoadError, match="nothing fits") as caught:
        ranks(1).run(raises_what_pickle_cannot_rebuild)
    assert caught.value.groups == {"missing": ("a.weight",)}
    assert caught.value.hint == "look again"
