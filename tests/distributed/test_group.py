"""A rank's place among others, and the collectives of a layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import Ranks
from tpkit.distributed.group import TensorParallel, init_from_env
from tpkit.distributed.rank import OtherRankFailed
from tpkit.errors import RankError, ShardingError, TpkitError, UsageError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


# One process


def test_one_rank_talks_to_nobody() -> None:
    tp = TensorParallel.of()
    x = torch.arange(6.0).reshape(2, 3)
    assert (tp.rank, tp.size, tp.group) == (0, 1, None)
    assert tp.all_reduce(x) is x
    assert tp.all_gather_last(x, [3]) is x
    tp.same_on_all_ranks({"config": "a"})
    tp.all_or_none(None)


def test_a_place_without_a_group_refuses_to_talk() -> None:
    tp = TensorParallel.of(rank=1, size=2)
    assert (tp.rank, tp.size) == (1, 2)
    with pytest.raises(UsageError, match="rank 1 of 2 has no process group"):
        tp.all_reduce(torch.ones(1))
    with pytest.raises(UsageError, match="no process group"):
        tp.all_gather_last(torch.ones(2), [1, 2])
    with pytest.raises(ValueError):
        tp.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 1}, "rank and size together"),
        ({"size": 2}, "rank and size together"),
        ({"rank": 2, "size": 2}, "rank 2 of 2"),
        ({"rank": -1, "size": 2}, "rank -1 of 2"),
        ({"rank": 0, "size": 0}, "rank 0 of 0"),
        ({"tp": 2}, "not int"),
        ({"tp": TensorParallel(), "rank": 0, "size": 1}, "a group alone"),
    ],
)
def test_contradictions_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TensorParallel.of(**arguments)


def test_sizes_must_be_about_these_ranks() -> None:
    with pytest.raises(ShardingError, match=r"rank 1 of 2 gathers \[3\]; announced last dimensions: \[3, 2\]"):
        TensorParallel.of(rank=1, size=2).all_gather_last(torch.ones(3), [3, 2])
    with pytest.raises(ShardingError, match="rank 0 of 1"):
        TensorParallel.of().all_gather_last(torch.ones(3), [3, 3])


def test_own_error_is_raised_without_a_group() -> None:
    with pytest.raises(UsageError, match="mine"):
        TensorParallel.of(rank=0, size=2).all_or_none(UsageError("mine"))


def test_joining_needs_a_launcher_and_a_known_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="not one of several ranks"):
        init_from_env("cpu")
    with pytest.raises(UsageError, match="not on 'tpu'"):
        init_from_env("tpu")


def test_more_ranks_than_devices_shows_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f2b")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match=r"rank 5 \(local rank 1\): 4 ranks .* 1 visible .*'GPU-8f2b'"):
        init_from_env("cuda")


# Several


def reduced(dtype: torch.dtype, op: str) -> list[float]:
    tp = TensorParallel.of()
    x = torch.tensor([[13.0, 31.0], [7.0, 15.0]])[tp.rank].to(dtype)
    result = tp.all_reduce(x, op)
    assert type(result) is torch.Tensor
    assert result.dtype == dtype
    assert x.tolist() == [[13.0, 31.0], [7.0, 15.0]][tp.rank]  # the argument is left alone
    return result.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_over_ranks(ranks: Ranks, dtype: torch.dtype) -> None:
    assert ranks(2).run(reduced, dtype, "sum") == [[20.0, 46.0]] * 2
    assert ranks(2).run(reduced, dtype, "max") == [[13.0, 31.0]] * 2


def gathered(sizes: list[int], lead: tuple[int, ...], dtype: torch.dtype) -> bool:
    tp = TensorParallel.of()
    width, start = sum(sizes), sum(sizes[: tp.rank])
    rows = torch.Size(lead).numel()
    full = torch.arange(rows * width).reshape(*lead, width).to(dtype)
    mine = full[..., start : start + sizes[tp.rank]]
    return torch.equal(tp.all_gather_last(mine, sizes), full)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (0,)])
@pytest.mark.parametrize("sizes", [[4, 4, 4], [3, 2, 2], [0, 5, 1], [1, 0, 0], [0, 0, 0]])
def test_gather_of_any_sizes(ranks: Ranks, sizes: list[int], lead: tuple[int, ...], dtype: torch.dtype) -> None:
    assert ranks(3).run(gathered, sizes, lead, dtype) == [True] * 3


class _Partial(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tp = TensorParallel.of()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tp.all_reduce(x * 2)
        return self.tp.all_gather_last(x[..., : 3 - self.tp.rank], [3, 2]) + 1


def compiled_equals_eager() -> bool:
    module, x = _Partial(), torch.arange(6.0).reshape(2, 3)
    with torch.inference_mode():
        return torch.equal(torch.compile(module, backend="eager", fullgraph=True)(x), module(x))


def test_compile_sees_through_the_collectives(ranks: Ranks) -> None:
    assert ranks(2).run(compiled_equals_eager) == [True, True]


def places() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = TensorParallel.of(mesh["tp"])
    copied = copy.deepcopy(tp)
    group = dist.new_group([1, 2])
    found: dict[str, Any] = {
        "world": (TensorParallel.of().rank, TensorParallel.of().size),
        "mesh": (tp.rank, tp.size, tp.all_reduce(torch.tensor([float(dist.get_rank())])).item()),
        "same": copied is tp and TensorParallel.of(tp) is tp,
    }
    for name, argument in {"group": group, "whole mesh": mesh}.items():
        try:
            found[name] = TensorParallel.of(argument).rank  # type: ignore[arg-type]
        except UsageError as error:
            found[name] = str(error)
    return found


def test_groups_and_meshes(ranks: Ranks) -> None:
    found = ranks(4).run(places)
    assert [each["world"] for each in found] == [(rank, 4) for rank in range(4)]
    assert [each["mesh"] for each in found] == [(0, 2, 1.0), (1, 2, 1.0), (0, 2, 5.0), (1, 2, 5.0)]
    assert all(each["same"] for each in found)
    assert found[1]["group"] == 0
    assert found[2]["group"] == 1
    assert "rank 3 of the world is not in the group" in found[3]["group"]
    assert "2 dimensions" in found[0]["whole mesh"]


def disagree() -> None:
    rank = dist.get_rank()
    values = {"config.json": "vocab 97" if rank != 1 else "vocab 98", "description": "same"}
    TensorParallel.of().same_on_all_ranks({**values, "plugin": "awq 1"} if rank == 2 else values)


def agree() -> None:
    TensorParallel.of().same_on_all_ranks({"config.json": "a", "description": "b"})


def test_ranks_that_disagree_are_named_on_every_rank(ranks: Ranks) -> None:
    assert ranks(3).run(agree) == [None] * 3
    for outcome in ranks(3).outcomes(disagree):
        assert isinstance(outcome, RankError)
        assert "rank 1: config.json is vocab 98, on rank 0 vocab 97" in str(outcome)
        assert "rank 2: plugin is awq 1, on rank 0 absent" in str(outcome)
        assert "description" not in str(outcome)


def one_cannot_go_on() -> None:
    tp = TensorParallel.of()
    tp.all_or_none(None)
    tp.all_or_none(TpkitError("no such file") if tp.rank == 1 else None)


def test_nobody_waits_for_a_rank_that_cannot_go_on(ranks: Ranks) -> None:
    outcomes = ranks(3).outcomes(one_cannot_go_on)
    assert type(outcomes[1]) is TpkitError
    for other in (outcomes[0], outcomes[2]):
        assert isinstance(other, OtherRankFailed)
        assert "rank 1 failed: TpkitError: no such file" in str(other)
