"""Experts as they may lie on disk: each by itself or in stacks, parts apart or fused, either way round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import small_experts
from tests.families import Families, Made, rewrite, tensors_of
from tests.model.test_families import differences, tiny
from tests.model.test_families_tp import TOLERANCE
from tests.ranks import Ranks
from tests.small import on_rank
from tests.small_experts import stacked, weights, write
from tpkit import LoadError

Tensors = dict[str, torch.Tensor]
EXPERTS = "block_sparse_moe.experts"
TRANSPOSED = {f"tree.model.layers.{EXPERTS}.{part}.transposed": True for part in ("gate_up_proj", "w2")}


def fused(tensors: Tensors, gate: str, up: str) -> Tensors:
    """Returns the same weights with gate and up of each expert, or of all, as one tensor in blocks."""
    left = dict(tensors)
    for name in list(tensors):
        if f".{gate}." in name and ".experts." in name:
            parts = left.pop(name), left.pop(name.replace(gate, up))
            left[name.replace(gate, "gate_up_proj")] = torch.cat(parts, dim=-2)
    return left


def bare(tensors: Tensors) -> Tensors:
    """Returns the same weights, those of experts without .weight at the end of their names."""
    return {name.removesuffix(".weight") if ".experts." in name else name: t for name, t in tensors.items()}


def turned(tensors: Tensors) -> Tensors:
    """Returns the same weights, those of experts [in, out]."""
    return {name: t.mT.contiguous() if ".experts." in name else t for name, t in tensors.items()}


QWEN: dict[str, Callable[[Tensors], Tensors]] = {
    "stacked-fused-bare": lambda t: bare(fused(stacked(t), "gate_proj", "up_proj")),
    "stacked-parts": stacked,
    "fused-each": lambda t: fused(t, "gate_proj", "up_proj"),
}


@pytest.mark.parametrize("relaid", QWEN.values(), ids=list(QWEN))
@pytest.mark.parametrize(("tp", "ep"), [(3, 2), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_logits_are_the_same_from_every_storage(
    relaid: Callable[[Tensors], Tensors], tp: int, ep: int, tmp_path: Path, families: Families, ranks: Ranks
) -> None:
    case = tiny("qwen3_moe", {})
    made = families.make(case)
    tensors = relaid(tensors_of(made.folder))
    assert not tensors.keys() >= tensors_of(made.folder).keys()
    folder = rewrite(families.copy(case, tmp_path / "relaid"), tensors)
    for plain, cached in ranks(tp).run(differences, Made(case, folder, made.ids, made.logits), "", ep):
        assert max(plain, cached) < TOLERANCE


STORED: dict[str, Callable[[Tensors], Tensors]] = {
    "stacked": stacked,
    "fused": lambda t: fused(t, "w1", "w3"),
    "stacked-fused": lambda t: fused(stacked(t), "w1", "w3"),
    "stacked-fused-bare": lambda t: bare(fused(stacked(t), "w1", "w3")),
}


@pytest.mark.parametrize(
    ("tp", "ep"),
    [(3, 2), *(pytest.param(*world, marks=pytest.mark.slow) for world in [(1, 1), (2, 2), (3, 1), (5, 3)])],
)
@pytest.mark.parametrize("stored", STORED.values(), ids=list(STORED))
@pytest.mark.parametrize("other_way_round", [False, True], ids=["out-in", "in-out"])
def test_every_storage_gives_the_same_shards(
    stored: Callable[[Tensors], Tensors], other_way_round: bool, tp: int, ep: int, tmp_path: Path
) -> None:
    tensors = stored(weights())
    options: dict[str, Any] = {"source": small_experts.FAMILY, "ep": ep}
    folder = write(tmp_path / "a", turned(tensors) if other_way_round else tensors)
    plain = write(tmp_path / "b")
    for rank in range(tp):
        wanted = dict(on_rank(plain, rank, tp, **options).named_parameters())
        model = on_rank(folder, rank, tp, overrides=TRANSPOSED if other_way_round else None, **options)
        found = dict(model.named_parameters())
        assert found.keys() == wanted.keys()
        for name, parameter in found.items():
            assert torch.equal(parameter, wanted[name]), name


def refused(tensors: Tensors, tmp_path: Path, **options: Any) -> dict[str, tuple[str, ...]]:
    with pytest.raises(LoadError) as caught:
        on_rank(write(tmp_path, tensors), source=small_experts.FAMILY, **options)
    return dict(caught.value.groups)


@pytest.mark.parametrize("stored", [dict, *STORED.values()], ids=["numbered", *STORED])
def test_the_other_way_round_is_refused_with_what_to_say(stored: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    groups = refused(turned(stored(weights())), tmp_path)
    assert groups.keys() == {"wrong shape"}
    assert all("it looks transposed: say `transposed: true`" in line for line in groups["wrong shape"])


def test_where_both_ways_have_one_shape_the_description_alone_decides(tmp_path: Path) -> None:
    """Width 32 of a hidden size of 32: w2 fits either way, and is never guessed from its shape."""
    fields = {"intermediate_size": 32}
    tensors = stacked(weights(**fields))
    folder, key = write(tmp_path, tensors, **fields), f"model.layers.0.{EXPERTS}.w2"
    stack = tensors[f"{key}.weight"]
    for words, wanted in ((None, stack), ({f"tree.model.layers.{EXPERTS}.w2.transposed": True}, stack.mT)):
        model = on_rank(folder, source=small_experts.FAMILY, overrides=words)
        for number in range(8):
            assert torch.equal(model.get_parameter(f"{key}.{number}.weight"), wanted[number])


@pytest.mark.parametrize("stored", STORED.values(), ids=list(STORED))
def test_experts_stored_twice_are_refused(stored: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    groups = refused(stored(weights()) | weights(), tmp_path)
    lines = "\n".join(groups["stored both fused and apart"])
    assert "experts.0.w1" in lines and "one of them must go" in lines


def test_names_of_experts_that_fall_through_are_errors(tmp_path: Path) -> None:
    """Experts under names that nothing describes: missing and unexpected, never left at random."""
    tensors = {name.replace(".experts.", ".moe_experts."): tensor for name, tensor in weights().items()}
    groups = refused(tensors, tmp_path)
    assert {heading: len(lines) for heading, lines in groups.items()} == {
        "missing": 2 * 8 * 3,
        "not in the description": 2 * 8 * 3,
    }
