"""Who holds what of experts: every element of every expert in exactly one group of ranks, and what does not fit."""

from __future__ import annotations

import json
import re
from collections import Counter
from math import ceil, prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import tpkit
from tests import small_experts
from tests.small import plan as planned
from tests.small import write as write_llama
from tests.small_experts import stacked, weights, write
from tpkit.checkpoint.stored import Checkpoint
from tpkit.division import DividedLayer, divide_layers
from tpkit.errors import CheckpointError, LoadError, ShardingError, SpecError, UsageError
from tpkit.layout import EXPERT, LayerSpec, Source, apart, fused
from tpkit.params import In, Out, ParamSpec
from tpkit.partition import Axis, Features, Side, deal, divide
from tpkit.report import plan_json, plan_text

HIDDEN: Side = (Features(name="", unit=3),)
E5 = "model.layers.1.block_sparse_moe.experts.5"


def plan(folder: Path, tp: int = 2, ep: int = 1, **options: Any) -> Any:
    return planned(folder, tp, small_experts.FAMILY, ep=ep, **options)


def findings(folder: Path, **options: Any) -> dict[str, tuple[str, ...]]:
    with pytest.raises(LoadError) as caught:
        plan(folder, **options)
    assert str(folder) in str(caught.value)
    return dict(caught.value.groups)


# by property ----------------------------------------------------------------------------------------------------------


@st.composite
def worlds(draw: Any) -> tuple[int, int, int, int, int]:
    """Experts, width, ranks, groups of ranks, elements that share a stored cell."""
    ranks = draw(st.integers(1, 8))
    sizes = draw(st.integers(1, 9)), draw(st.integers(1, 30))
    return (*sizes, ranks, draw(st.integers(1, ranks)), draw(st.sampled_from([1, 1, 2, 4, 8])))


def divided(world: tuple[int, int, int, int, int], form: str, kind: str = "column") -> DividedLayer:
    experts, width, ranks, ep, granule = world
    axis = Axis(name="expert ffn", units=width, over="group")
    wide: Side = tuple(Features(name=name, axis=axis) for name in (("gate", "up") if kind == "column" else ("",)))
    out, in_ = (wide, HIDDEN) if kind == "column" else (HIDDEN, wide)
    sources: tuple[Source, ...] = {
        "numbered": apart([f"e.{EXPERT}.{part.name}" for part in out], out),
        "stacked": fused("e", out),
    }[form]
    if form == "stacked":
        sources = tuple(Source(name=s.name, views=s.views, size=s.size, stacked=True) for s in sources)
    blocked = (Out(pack=granule), In()) if kind == "column" else (Out(), In(pack=granule))
    params = (("p", ParamSpec("float32", blocked)),)
    of = Axis(name="experts", units=experts, over="groups")
    spec = LayerSpec(path="e", out=out, in_=in_, forms=(sources,), params=params, experts=of)
    return divide_layers([(spec, sources)], ranks, ep=ep)[0]


@settings(max_examples=250, deadline=None)
@given(worlds(), st.sampled_from(["numbered", "stacked"]), st.sampled_from(["column", "row"]))
def test_every_element_of_every_expert_is_held_by_exactly_one_group(
    world: tuple[int, int, int, int, int], form: str, kind: str
) -> None:
    experts, width, ranks, ep, granule = world
    layer = divided(world, form, kind)
    assert layer.geometry.gaps == () and not layer.geometry.unread
    side = layer.spec.out if kind == "column" else layer.spec.in_
    groups = deal(ranks, ep)
    seen: Counter[tuple[int, str, int]] = Counter()
    leaders = []
    for first, last in groups:
        held = {tuple(layer.experts(rank) or ()) for rank in range(first, last)}
        assert len(held) == 1  # the ranks of a group hold the same experts
        leaders.append([rank for rank in range(first, last) if layer.leads(rank)])
        for rank in range(first, last):
            for part, (start, stop) in zip(side, layer.bounds(side, rank), strict=True):
                seen.update((e, part.name, x) for e in layer.experts(rank) or () for x in range(start, stop))
    wanted = {(e, part.name, x) for e in range(experts) for part in side for x in range(width)}
    assert seen.keys() == wanted and set(seen.values()) == {1}
    assert leaders == [[first] for first, _ in groups]
    assert granule > 1 or layer.geometry.full_nbytes == sum(layer.geometry.nbytes)


@settings(max_examples=250, deadline=None)
@given(worlds(), st.sampled_from(["numbered", "stacked"]), st.sampled_from(["column", "row"]))
def test_the_cells_that_a_group_reads_are_all_of_each_of_its_experts(
    world: tuple[int, int, int, int, int], form: str, kind: str
) -> None:
    layer = divided(world, form, kind)
    groups = deal(world[2], world[3])
    for first, last in groups:
        if not layer.experts(first):
            continue
        read: Counter[tuple[int, int, int]] = Counter()
        for rank in range(first, last):
            for copy in layer.geometry.local[rank]["p"].copies:
                rows, columns = (run.indices() for run in copy.box)
                read.update((copy.source, r, c) for r in rows for c in columns)
        per = [dim.per for dim in dict(layer.spec.params)["p"].dims]
        sizes = [source.size for source in layer.form], sum(part.size for part in layer.spec.in_)
        cells = {
            (n, r, c)
            for n, size in enumerate(sizes[0])
            for r in range(ceil(size / per[0]))
            for c in range(ceil(sizes[1] / per[1]))
        }
        assert read.keys() == cells
        assert world[4] > 1 or set(read.values()) == {1}


@given(st.integers(1, 40), st.integers(1, 9), st.data())
def test_groups_get_experts_by_the_number_of_their_ranks(experts: int, ranks: int, data: st.DataObject) -> None:
    ep = data.draw(st.integers(1, ranks))
    shares = divide(Axis(name="experts", units=experts, over="groups"), ranks, ep=ep)
    for first, last in deal(ranks, ep):
        assert abs(shares[first].units - experts * (last - first) / ranks) < 1
    assert [share.owner for share in shares].count(True) == ep


def test_weights_of_ranks_count_in_groups_and_within_them() -> None:
    weights = (3.0, 1.0, 2.0, 2.0)
    experts = divide(Axis(name="experts", units=8, over="groups"), 4, weights=weights, ep=2)
    width = divide(Axis(name="width", units=8, over="group"), 4, weights=weights, ep=2)
    assert [share.units for share in experts] == [4, 4, 4, 4]
    assert [(share.start, share.stop) for share in width] == [(0, 6), (6, 8), (0, 4), (4, 8)]
    uneven = divide(Axis(name="experts", units=8, over="groups"), 4, weights=(5.0, 1.0, 1.0, 1.0), ep=2)
    assert [share.units for share in uneven] == [6, 6, 2, 2]


# the plan and its report ----------------------------------------------------------------------------------------------


def test_known_shapes_of_three_ranks_in_two_groups(tmp_path: Path) -> None:
    """Two ranks share the width of five experts, the third has three whole ones."""
    found = plan(write(tmp_path), 3, 2)
    rows = {row["name"].removeprefix("model.layers.*.block_sparse_moe."): row for row in plan_json(found)["parameters"]}
    assert rows["experts.gate_up_proj.weight"]["shape"] == [8, 48, 32]
    assert rows["experts.gate_up_proj.weight"]["shapes"] == [[5, 24, 32], [5, 24, 32], [3, 48, 32]]
    assert rows["experts.w2.weight"]["shapes"] == [[5, 32, 12], [5, 32, 12], [3, 32, 24]]
    assert rows["gate.weight"]["shapes"] == [[8, 32]] * 3
    assert rows["experts.w2.weight"]["count"] == 2 and rows["experts.w2.weight"]["replicated_bytes"] == 0


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 2), (3, 2), (5, 3), (6, 4), (12, 10)])
def test_what_the_report_says_is_what_is_built(tp: int, ep: int, tmp_path: Path) -> None:
    found = plan(write(tmp_path), tp, ep)
    said = plan_json(found)
    assert json.loads(json.dumps(said)) == said and said["ep"] == ep and said["tp"] == tp
    for row in said["parameters"]:
        held = sum(prod(shape) for shape in row["shapes"]) * 4 * row["count"]
        assert held == row["bytes"] + row["replicated_bytes"], row["name"]
    for rank, row in enumerate(said["ranks"]):
        assert row["param_bytes"] == found.load.param_bytes(rank)
        assert sum(t.nbytes for t in found.load.transfers(rank)) == found.load.checkpoint_bytes(rank)
    own = sum(prod(t.shape) * 4 for t in weights().values())
    assert sum(row["bytes"] for row in said["parameters"]) == own
    assert "axis experts: 8 -> " in plan_text(found)


def test_more_groups_than_experts_leave_some_without(tmp_path: Path) -> None:
    found = plan(write(tmp_path, num_local_experts=2), 4, 4)
    shapes = next(row["shapes"] for row in plan_json(found)["parameters"] if row["name"].endswith("w2.weight"))
    assert shapes == [[1, 32, 24], [1, 32, 24], [0, 32, 24], [0, 32, 24]]


@pytest.mark.parametrize("tp", [1, 3])
def test_a_plan_needs_no_checkpoint(tp: int, tmp_path: Path) -> None:
    spec = tpkit.load_spec(small_experts.FAMILY, config=write(tmp_path))
    bare, read = tpkit.plan_model(spec, ranks=tp, dtype="float32", ep=tp), plan(tmp_path, tp, tp)
    assert plan_json(bare)["parameters"] == plan_json(read)["parameters"]


@pytest.mark.parametrize(("tp", "ep"), [(2, 3), (1, 2), (4, 0), (4, -1)])
def test_groups_that_the_ranks_cannot_form_are_refused(tp: int, ep: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"{ep} expert-parallel groups of {tp} ranks: from 1 to {tp} are possible"):
        plan(write(tmp_path), tp, ep)


def test_groups_are_refused_where_there_are_no_experts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"2 expert-parallel groups, but .*llama.yaml has no experts"):
        planned(write_llama(tmp_path), 2, ep=2)


# what does not fit ----------------------------------------------------------------------------------------------------


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    tensors = {name: t for name, t in weights().items() if not name.startswith(f"{E5}.")}
    (lines,) = findings(write(tmp_path, tensors), ep=2).values()
    assert [line.split()[0] for line in lines] == [f"{E5}.{part}.weight" for part in ("w1", "w3", "w2")]


def test_a_missing_part_of_one_expert_is_named(tmp_path: Path) -> None:
    tensors = weights()
    del tensors[f"{E5}.w3.weight"]
    (line,) = findings(write(tmp_path, tensors))["missing"]
    assert line.startswith(f"{E5}.w3.weight")


def test_an_expert_too_many_is_named(tmp_path: Path) -> None:
    extra = E5.replace(".5", ".8")
    tensors = weights() | {f"{extra}.w2.weight": torch.zeros(32, 24)}
    (line,) = findings(write(tmp_path, tensors))["not in the description"]
    assert line.startswith(f"{extra}.w2.weight float32 [32, 24]")


@pytest.mark.parametrize(("part", "found", "needed"), [("w1", [23, 32], [24, 32]), ("w2", [32, 25], [32, 24])])
def test_an_expert_of_another_shape_is_named(part: str, found: list[int], needed: list[int], tmp_path: Path) -> None:
    tensors = weights() | {f"{E5}.{part}.weight": torch.zeros(found)}
    (line,) = findings(write(tmp_path, tensors))["wrong shape"]
    assert line.startswith(f"{E5}.{part}.weight is {found} in model.safetensors") and f"needs {needed}" in line


def test_an_expert_of_another_type_is_named(tmp_path: Path) -> None:
    tensors = weights() | {f"{E5}.w2.weight": torch.zeros(32, 24, dtype=torch.int8)}
    (line,) = findings(write(tmp_path, tensors))["wrong type"]
    assert line.startswith(f"{E5}.w2.weight is int8 in model.safetensors")


def test_an_expert_in_two_files_is_named(tmp_path: Path) -> None:
    name, tensors = f"{E5}.w2.weight", weights()
    folder = write(tmp_path, tensors)
    other = folder / "model-00001-of-00002.safetensors"
    save_file({name: tensors[name]}, other)
    (folder / "model.safetensors").rename(folder / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(name)) as caught:
        plan(folder)
    assert other.name in str(caught.value) and "model-00002-of-00002" in str(caught.value)


@pytest.mark.parametrize("count", [7, 9])
def test_a_stack_of_another_number_of_experts_is_named(count: int, tmp_path: Path) -> None:
    name = "model.layers.0.block_sparse_moe.experts.w2.weight"
    tensors = stacked(weights())
    tensors[name] = tensors[name].repeat(2, 1, 1)[:count]
    (line,) = findings(write(tmp_path, tensors))["wrong shape"]
    assert line.startswith(f"{name} is [{count}, 32, 24] in model.safetensors") and "needs [8, 32, 24]" in line


def test_experts_stored_stacked_and_apart_are_told(tmp_path: Path) -> None:
    whole = stacked(weights())
    name = "model.layers.0.block_sparse_moe.experts.w2.weight"
    (line,) = findings(write(tmp_path, weights() | {name: whole[name]}))["stored both fused and apart"]
    assert name.removesuffix(".weight") in line and "experts.0.w2" in line


def test_a_stack_beside_other_experts_of_their_own_is_told(tmp_path: Path) -> None:
    """All but the first expert apart, all of them stacked."""
    first = "model.layers.0.block_sparse_moe.experts.0."
    tensors = stacked(weights()) | {n: t for n, t in weights().items() if ".experts." in n and not n.startswith(first)}
    with pytest.raises(LoadError) as caught:
        plan(write(tmp_path, tensors))
    assert "experts.1.w2.weight" in str(caught.value)


def test_everything_that_is_wrong_with_experts_is_one_error(tmp_path: Path) -> None:
    tensors = weights() | {f"{E5}.w1.weight": torch.zeros(3, 32)}
    del tensors[f"{E5}.w2.weight"]
    tensors["model.layers.1.block_sparse_moe.gate.weight"] = torch.zeros(7, 32)
    groups = findings(write(tmp_path, tensors), tp=3, ep=3)
    assert {heading: len(lines) for heading, lines in groups.items()} == {"missing": 1, "wrong shape": 2}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_local_experts": 0}, "num_local_experts is 0"),
        ({"num_experts_per_tok": 9}, "top_k 9, but a token chooses among 8 of 8"),
    ],
)
def test_numbers_of_experts_that_make_no_sense_are_refused(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises((SpecError, ShardingError), match=said):
        plan(write(tmp_path, weights(), **fields))


def test_experts_without_a_checkpoint_of_theirs_are_all_listed() -> None:
    spec = tpkit.load_spec(small_experts.FAMILY, config={**small_experts.CONFIG, "num_hidden_layers": 1})
    with pytest.raises(LoadError) as caught:
        tpkit.plan_model(spec, ranks=2, ep=2, checkpoint=Checkpoint(Path("empty"), {}))
    assert len([n for n in caught.value.groups["missing"] if ".experts." in n]) == 24
