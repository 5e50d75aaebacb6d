"""Faults of experts: steps of routing in another order, terms summed twice, numbers of experts that nothing divides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tpkit
from tests import small_experts
from tests.families import Families, Made
from tests.model.test_families import tiny
from tests.model.test_families_tp import TOLERANCE, off
from tests.ranks import Ranks
from tests.small import CONFIG, on_rank
from tests.small_experts import weights, write
from tpkit import SpecError
from tpkit.distributed.group import TensorParallel
from tpkit.feedforward import RoutingOptions
from tpkit.layers.moe import Moe
from tpkit.layers.routing import route


def options(**words: Any) -> RoutingOptions:
    return RoutingOptions(**{"score": "none", "top_k": 2, **words})


# the order of steps ---------------------------------------------------------------------------------------------------


def test_experts_of_groups_that_lose_are_never_chosen_even_where_all_scores_are_negative() -> None:
    """Scores set to zero there would win."""
    logits, knobs = torch.tensor([[-0.3, -0.2, -0.1, -0.4]]), {"groups": 2, "top_groups": 1, "group_score": "top2_sum"}
    first = torch.tensor([0.0, 0.0, -9.0, -9.0])
    assert route(logits, options(top_k=1, **knobs), first)[1].tolist() == [[1]]
    assert route(logits, options(top_k=2, **knobs))[1].sort().values.tolist() == [[0, 1]]
    correction = torch.tensor([-5.0, -5.0, -9.0, -9.0])
    _, chosen = route(torch.zeros(1, 4), options(score="sigmoid", **knobs), correction)
    assert chosen.sort().values.tolist() == [[0, 1]]


def test_a_correction_chooses_and_does_not_weigh() -> None:
    """Raw scores of 1e-8 under a correction of 12: divided by their sum, then scaled once."""
    logits, correction = torch.tensor([[-18.42, -18.42, 3.0, 2.0]]), torch.tensor([12.0, 12.0, 0.0, 0.0])
    weights, chosen = route(logits, options(score="sigmoid"), correction)
    assert chosen.sort().values.tolist() == [[0, 1]]
    assert weights[0].tolist() == pytest.approx([1e-8, 1e-8], rel=1e-2)
    weights, _ = route(logits, options(score="sigmoid", renormalize=True, scale=2.5), correction)
    assert weights[0].tolist() == pytest.approx([1.25, 1.25], rel=1e-6)


@pytest.mark.parametrize("renormalize", [False, True])
def test_the_scale_counts_once_with_and_without_renormalisation(renormalize: bool) -> None:
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    plain, chosen = route(logits, options(score="sigmoid", renormalize=renormalize))
    scaled, again = route(logits, options(score="sigmoid", renormalize=renormalize, scale=2.5))
    assert torch.equal(chosen, again) and torch.equal(scaled, plain * 2.5)


def experts_of(model: torch.nn.Module) -> list[Moe]:
    return [module for module in model.modules() if isinstance(module, Moe)]


@pytest.mark.parametrize("renormalize", [False, True])
def test_shared_experts_are_outside_of_the_scale_and_flags_hold_in_all_layers(
    renormalize: bool, families: Families
) -> None:
    folder = families.make(tiny("glm4_moe", {"num_hidden_layers": 4})).folder
    terms = []
    for scale in (1.0, 2.5):
        words = {"config.routed_scaling_factor": scale, "config.norm_topk_prob": renormalize}
        found = experts_of(on_rank(folder, source="glm4_moe", overrides=words))
        assert len(found) == 3
        assert {(moe.routing.scale, moe.routing.renormalize) for moe in found} == {(scale, renormalize)}
        x = torch.randn(1, 5, 144, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            shared = found[0].child("shared")
            assert shared is not None
            terms.append(found[0](x) - shared(x))
    assert torch.allclose(terms[1], terms[0] * 2.5, rtol=1e-3, atol=1e-2)


# sums -----------------------------------------------------------------------------------------------------------------


def with_shared(made: Made, overrides: dict[str, Any], ep: int) -> tuple[float, int]:
    """Returns how far off the logits are, and how many sums over ranks they took."""
    model = tpkit.build(
        tpkit.load_spec(made.tiny.description, config=made.folder, overrides=overrides), checkpoint=made.folder, ep=ep
    )
    own, calls = TensorParallel.all_reduce, []

    def counted(self: TensorParallel, *args: Any, **words: Any) -> torch.Tensor:
        calls.append(self)
        return own(self, *args, **words)

    TensorParallel.all_reduce = counted  # type: ignore[method-assign]
    try:
        with torch.inference_mode():
            return off(model(made.ids), made.logits), len(calls)
    finally:
        TensorParallel.all_reduce = own  # type: ignore[method-assign]


def whole(*parts: str) -> dict[str, bool]:
    """Returns overrides that keep feed-forwards whole on every rank."""
    return {f"tree.model.layers.mlp.0.{part}.{p}.disable_tp": True for part in parts for p in WITHIN}


WITHIN = ("gate_up_proj", "down_proj")


@pytest.mark.parametrize("parts", [(), ("shared_expert",), ("experts",), ("experts", "shared_expert")], ids=str)
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (3, 2)])
def test_shared_and_routed_experts_are_each_summed_once_divided_or_whole(
    parts: tuple[str, ...], tp: int, ep: int, families: Families, ranks: Ranks
) -> None:
    """One sum for the embedding, and for each of two layers one after attention and one after all experts."""
    made = families.make(tiny("qwen2_moe", {}))
    for found, sums in ranks(tp).run(with_shared, made, whole(*parts), ep):
        assert found < TOLERANCE and sums == 1 + 2 * 2


# numbers --------------------------------------------------------------------------------------------------------------


def logits(folder: Path, ep: int) -> torch.Tensor:
    model = tpkit.build(tpkit.load_spec(small_experts.FAMILY, config=folder), checkpoint=folder, ep=ep)
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([[5, 6, 7, 80, 9, 10]]))
    return found.double()


def test_a_number_of_experts_that_the_groups_do_not_divide(ranks: Ranks, tmp_path: Path) -> None:
    """Four experts and four heads on three ranks in as many groups compute what one rank does."""
    folder = write(tmp_path, num_local_experts=4)
    (alone,) = ranks(1).run(logits, folder, 1)
    for ep in (1, 2, 3):
        for found in ranks(3).run(logits, folder, ep):
            assert off(found, alone) < TOLERANCE


def test_what_is_wrong_with_heads_and_with_experts_is_one_error(tmp_path: Path) -> None:
    fields = {"num_attention_heads": 5, "num_experts_per_tok": 9}
    with pytest.raises(SpecError) as caught:
        tpkit.load_spec(small_experts.FAMILY, config=CONFIG | small_experts.CONFIG | fields)
    heads, experts = caught.value.problems
    assert "5 units do not come in 2 groups of equal size" in heads
    assert "top_k 9, but a token chooses among 8 of 8 experts" in experts


def test_one_expert_left_out_of_many_is_not_taken_for_loaded(tmp_path: Path) -> None:
    name = "model.layers.1.block_sparse_moe.experts.7.w2.weight"
    tensors = weights()
    del tensors[name]
    for rank in range(2):  # on the rank that has it, and on the one that has not
        with pytest.raises(tpkit.LoadError, match=f"missing(.|\n)*{name}"):
            on_rank(write(tmp_path, tensors), rank, 2, source=small_experts.FAMILY, ep=2)
