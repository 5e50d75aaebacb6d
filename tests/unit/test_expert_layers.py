"""Projections of several experts: grouped or one by one, whoever has tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests import small_experts
from tests.small import on_rank
from tpkit.errors import UsageError
from tpkit.layers import ParallelLinear
from tpkit.layers.experts import ExpertLinear, Sorted
from tpkit.layers.moe import Moe
from tpkit.layers.routing import route
from tpkit.model import Model

EXPERTS = "model.layers.0.block_sparse_moe.experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_experts.write(tmp_path_factory.mktemp("experts"))


def built(folder: Path, rank: int = 0, tp: int = 1, ep: int = 1, **options: Any) -> Model:
    return on_rank(folder, rank, tp, source=small_experts.FAMILY, ep=ep, **options)


def linear(model: Model, name: str = "gate_up_proj") -> ExpertLinear:
    found = model.get_submodule(f"{EXPERTS}.{name}")
    assert isinstance(found, ExpertLinear)
    return found


class Counted:
    """Counts the grouped multiplications."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self._own = 0, F.grouped_mm
        monkeypatch.setattr(F, "grouped_mm", self)

    def __call__(self, *args: Any, **options: Any) -> torch.Tensor:
        self.calls += 1
        return self._own(*args, **options)


# rows of experts ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), max_size=9))
def test_runs_ends_and_rows_say_the_same(counts: list[int]) -> None:
    rows = Sorted(torch.tensor(counts, dtype=torch.int64))
    wanted = [expert for expert, count in enumerate(counts) for _ in range(count)]
    assert rows.of_row.tolist() == wanted
    assert [expert for expert, start, stop in rows.runs for _ in range(start, stop)] == wanted
    assert all(a[2] == b[1] for a, b in zip(rows.runs, rows.runs[1:], strict=False))
    assert rows.ends.tolist() == [sum(counts[: n + 1]) for n in range(len(counts))]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=8, max_size=8))
def test_grouped_and_one_by_one_are_each_expert_s_own_product(folder: Path, counts: list[int]) -> None:
    layer = linear(MODELS.setdefault("whole", built(folder)))
    x = torch.randn(sum(counts), 32, generator=torch.Generator().manual_seed(sum(counts)))
    rows = Sorted(torch.tensor(counts))
    by_hand = [each.weight @ row for row, n in zip(x, rows.of_row.tolist(), strict=True) for each in [list(layer)[n]]]
    wanted = torch.stack(by_hand) if by_hand else torch.zeros(0, 48)
    grouped = layer(x, rows)
    stacks, layer._stacks = layer._stacks, {}
    one_by_one = layer(x, rows)
    layer._stacks = stacks
    assert torch.allclose(grouped, wanted, atol=1e-4) and torch.allclose(one_by_one, wanted, atol=1e-4)


MODELS: dict[str, Model] = {}


def test_one_multiplication_serves_all_experts_until_a_weight_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, counted, rows = linear(built(folder)), Counted(monkeypatch), Sorted(torch.tensor([2, 0, 1, 0, 0, 0, 3, 1]))
    x = torch.randn(7, 32)
    before = layer(x, rows)
    assert counted.calls == 1
    second: Any = list(layer)[2]
    second.weight = torch.nn.Parameter(second.weight.detach().clone() * 2, requires_grad=False)
    after = layer(x, rows)
    assert counted.calls == 1
    assert torch.allclose(after[2], before[2] * 2) and torch.allclose(after[[0, 1, 3]], before[[0, 1, 3]], atol=1e-5)


def test_widths_that_the_grouped_multiplication_does_not_take_are_multiplied_one_by_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five ranks share 24 columns: five or four each, not a multiple of 16 bytes for all of them."""
    counted, x, rows = Counted(monkeypatch), torch.randn(6, 32), Sorted(torch.tensor([3, 0, 0, 0, 0, 0, 0, 3]))
    for rank in range(5):
        layer = linear(built(folder, rank, 5))
        each = list(layer)
        wanted = torch.cat([x[:3] @ each[0].weight.T, x[3:] @ each[7].weight.T])
        assert torch.allclose(layer(x, rows), wanted, atol=1e-4)
    assert 0 < counted.calls < 5


def test_a_rank_without_experts_has_nothing_and_computes_nothing(folder: Path, tmp_path: Path) -> None:
    few = small_experts.write(tmp_path, num_local_experts=2)
    model = built(few, 2, 3, 3)
    layer, down = linear(model), linear(model, "w2")
    assert len(layer) == len(down) == 0 and layer.total == 2
    assert not any(name.startswith(EXPERTS) for name, _ in model.named_parameters())
    assert layer(torch.randn(0, 32), Sorted(torch.zeros(0, dtype=torch.int64))).shape[0] == 0
    moe = model.get_submodule("model.layers.0.block_sparse_moe")
    assert isinstance(moe, Moe)
    routed = moe._routed(torch.randn(5, 32), torch.rand(5, 2), torch.randint(0, 2, (5, 2)))
    assert torch.equal(routed, torch.zeros(5, 32))


def test_an_input_of_another_width_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="experts take 32 input features here, the input has 31"):
        linear(built(folder))(torch.randn(2, 31), Sorted(torch.tensor([2, 0, 0, 0, 0, 0, 0, 0])))


# the whole block ------------------------------------------------------------------------------------------------------


def moe_of(model: Model) -> Moe:
    found = model.get_submodule("model.layers.0.block_sparse_moe")
    assert isinstance(found, Moe)
    return found


def by_hand(tensors: dict[str, torch.Tensor], x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> Any:
    """Returns what the experts give to each token, one at a time, in float64."""
    rows = []
    for token, row_weights, row in zip(x.double(), weights.double(), chosen.tolist(), strict=True):
        total = torch.zeros(32, dtype=torch.float64)
        for weight, n in zip(row_weights, row, strict=True):
            w1, w2, w3 = (tensors[f"{EXPERTS}.{n}.{part}.weight"].double() for part in ("w1", "w2", "w3"))
            total += weight * (w2 @ (F.silu(w1 @ token) * (w3 @ token)))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2), (3, 2), (4, 2), (5, 3), (5, 5)])
def test_what_the_ranks_compute_adds_up_to_every_expert_s_part(tp: int, ep: int, folder: Path) -> None:
    """Including experts that all tokens choose, and those that none does."""
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    moes = [moe_of(built(folder, rank, tp, ep)) for rank in range(tp)]
    weights, chosen = route(moes[0].projection("router")(x), moes[0].routing)
    for which in (chosen, torch.tensor([[6, 1]] * 7)):
        total = sum(moe._routed(x, weights, which) for moe in moes)
        wanted = by_hand(small_experts.weights(), x, weights, which)
        assert torch.allclose(total.double(), wanted, rtol=1e-4, atol=1e-3)  # type: ignore[union-attr]


def test_a_token_s_result_does_not_depend_on_the_tokens_beside_it(folder: Path) -> None:
    moe, x = moe_of(built(folder)), torch.randn(6, 32)
    together = moe(x.unsqueeze(0))[0]
    alone = torch.cat([moe(row.view(1, 1, -1))[0] for row in x])
    assert torch.allclose(together, alone, rtol=1e-4, atol=1e-3)


def test_each_expert_is_a_projection_of_its_own(folder: Path) -> None:
    model, tensors = built(folder, 1, 3, 2), small_experts.weights()
    layer = linear(model)
    assert [name for name, _ in layer.named_children()] == ["0", "1", "2", "3", "4"]
    for n, each in enumerate(layer):
        assert isinstance(each, ParallelLinear)
        gate, up = (tensors[f"{EXPERTS}.{n}.{part}.weight"][12:] for part in ("w1", "w3"))
        assert torch.equal(each.weight, torch.cat([gate, up]))
