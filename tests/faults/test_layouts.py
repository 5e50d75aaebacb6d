"""Faults of weights that are fused on disk: their shapes fit, their rows are in another order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.small import on_rank, weights, write
from tpkit import LoadError, SpecError
from tpkit.division import DividedLayer, divide_layers
from tpkit.layers import MergedColumnParallelLinear, QKVParallelLinear
from tpkit.layout import LayerSpec, Source, apart, fused
from tpkit.params import In, Out, ParamSpec
from tpkit.partition import Axis, Features, Side


def divided(out: Side, form: tuple[Source, ...], columns: int, tp: int, transposed: bool = False) -> DividedLayer:
    params = (("weight", ParamSpec("float32", (Out(), In()), transposed=transposed)),)
    spec = LayerSpec(path="w", out=out, in_=(Features(name="", unit=columns),), forms=(form,), params=params)
    return divide_layers([(spec, form)], tp)[0]


def held(layer: DividedLayer, rank: int, *tensors: torch.Tensor) -> torch.Tensor:
    """Carries out a rank's copies by hand."""
    param = layer.geometry.local[rank]["weight"]
    made = torch.full(param.shape, float("nan"))
    for copy in param.copies:
        piece = tensors[copy.source][tuple(slice(run.start, run.stop, run.step) for run in copy.box)]
        made[tuple(slice(run.start, run.stop) for run in copy.target)] = piece
    return made


def rows_held(layer: DividedLayer, rank: int, size: int) -> list[int]:
    return held(layer, rank, torch.arange(float(size))[:, None]).flatten().int().tolist()


def heads(units: int, groups: int, unit: int) -> Side:
    axis = Axis(name="heads", units=units, groups=groups)
    return tuple(Features(name=name, axis=axis, unit=unit, grouped=name != "q") for name in "qkv")


def ffn(width: int) -> Side:
    return tuple(Features(name=name, axis=Axis(name="ffn", units=width)) for name in ("gate", "up"))


def test_fused_qkv_is_cut_into_its_sections_first() -> None:
    """Equal chunks of 32 rows would give rank 0 nothing but queries."""
    layer = divided(heads(4, 2, 4), fused("qkv", heads(4, 2, 4)), 1, 2)
    assert rows_held(layer, 0, 32) == [*range(8), *range(16, 20), *range(24, 28)]
    assert rows_held(layer, 1, 32) == [*range(8, 16), *range(20, 24), *range(28, 32)]


def test_fused_gate_up_is_cut_into_its_sections_first() -> None:
    """Equal chunks would multiply gate rows with gate rows."""
    layer = divided(ffn(8), fused("gate_up", ffn(8)), 1, 2)
    assert rows_held(layer, 0, 16) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert rows_held(layer, 1, 16) == [4, 5, 6, 7, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("order", "repeat", "first", "second"),
    [
        (["q", "k", "v"], 1, [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19], [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]),
        (["q", "k", "v"], 4, [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11], [12, 13, 18, 19, 14, 15, 20, 21, 16, 17, 22, 23]),
        (["v", "q", "k"], 1, [8, 9, 10, 11, 16, 17, 18, 19, 0, 1, 2, 3], [12, 13, 14, 15, 20, 21, 22, 23, 4, 5, 6, 7]),
    ],
    ids=["blocks", "per head", "blocks in another order"],
)
def test_one_shape_has_many_row_orders(order: list[str], repeat: int, first: list[int], second: list[int]) -> None:
    """Four heads of two features, as many kv heads: 24 rows each way."""
    out = heads(4, 4, 2)
    layer = divided(out, fused("qkv", out, order, repeat), 1, 2)
    assert [rows_held(layer, rank, 24) for rank in range(2)] == [first, second]


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_rows_grouped_by_kv_head(tp: int) -> None:
    """Three groups of two query heads, a key head and a value head."""
    out = heads(6, 3, 2)
    q, k, v = torch.randn(3, 4, 5), torch.randn(3, 2, 5), torch.randn(3, 2, 5)
    stored = torch.cat([q, k, v], dim=1).flatten(0, 1)
    parts = [q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)]
    grouped = divided(out, fused("qkv", out, repeat=3), 5, tp)
    separate = divided(out, apart("qkv", out), 5, tp)
    for rank in range(tp):
        assert torch.equal(held(grouped, rank, stored), held(separate, rank, *parts))


@pytest.mark.parametrize("tp", [1, 2, 3, 5])
def test_alternating_channels(tp: int) -> None:
    gate, up = torch.randn(7, 3), torch.randn(7, 3)
    stored = torch.stack([gate, up], dim=1).flatten(0, 1)
    layer, separate = (
        divided(ffn(7), fused("w", ffn(7), repeat=7), 3, tp),
        divided(ffn(7), apart(["g", "u"], ffn(7)), 3, tp),
    )
    for rank in range(tp):
        assert torch.equal(held(layer, rank, stored), held(separate, rank, gate, up))


QKV = "tree.model.layers.self_attn.qkv_proj"


def refused(tensors: dict[str, torch.Tensor], reorder: Any) -> dict[str, torch.Tensor]:
    """Returns weights with q, k, v of each layer fused by a function."""
    left = dict(tensors)
    for layer in range(2):
        stem = f"model.layers.{layer}.self_attn"
        left[f"{stem}.qkv_proj.weight"] = reorder(*(left.pop(f"{stem}.{name}_proj.weight") for name in "qkv"))
    return left


@pytest.mark.parametrize(
    ("layout", "reorder"),
    [
        (["q", "k", "v"], lambda q, k, v: torch.cat([q, k, v])),
        (["k", "v", "q"], lambda q, k, v: torch.cat([k, v, q])),
        (
            {"per": "kv_head", "order": ["q", "k", "v"]},
            lambda q, k, v: torch.cat([t.unflatten(0, (2, -1)) for t in (q, k, v)], dim=1).flatten(0, 1),
        ),
    ],
    ids=["blocks", "another order", "per kv head"],
)
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_declared_layout_loads_the_same_shards(tp: int, layout: Any, reorder: Any, tmp_path: Path) -> None:
    plain, other = write(tmp_path / "a"), write(tmp_path / "b", refused(weights(), reorder))
    for rank in range(tp):
        model = on_rank(other, rank, tp, overrides={QKV: {"style": "qkv", "fused": layout}})
        for name, parameter in on_rank(plain, rank, tp).named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), name


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"per": "head", "order": ["q", "k", "v"]}, r"per: head, which are 4, but k and v come in 2"),
        (["q", "k"], "v"),
        (["q", "k", "w"], "w"),
        ({"per": "layer", "order": ["q", "k", "v"]}, "head, kv_head"),
    ],
)
def test_a_layout_that_cannot_be_meant_is_refused(layout: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        on_rank(write(tmp_path), overrides={QKV: {"style": "qkv", "fused": layout}})
    assert "qkv_proj" in str(caught.value)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_transposed_fused_weight(tp: int, tmp_path: Path) -> None:
    """Conv1D: [in, out], sections along the second dimension; the square output projection passes every shape test."""
    stored = refused(weights(), lambda *parts: torch.cat(parts))
    stored = {name: tensor.T.contiguous() if "self_attn" in name else tensor for name, tensor in stored.items()}
    folder = write(tmp_path / "b", stored)
    words = {f"{QKV}.transposed": True, "tree.model.layers.self_attn.o_proj.transposed": True}
    for rank in range(tp):
        model = on_rank(folder, rank, tp, overrides=words)
        for key, parameter in on_rank(write(tmp_path / "a"), rank, tp).named_parameters():
            assert torch.equal(model.get_parameter(key), parameter), key
    with pytest.raises(LoadError, match=r"qkv_proj.weight is \[32, 64\].*needs \[64, 32\].*transposed: true"):
        on_rank(folder)


@pytest.mark.parametrize("tp", [1, 2, 3, 5])
def test_parts_of_different_sizes(tp: int) -> None:
    """Cut as one, rank 0 of two would have q, k and half of v. Put together, what the ranks hold is what was stored."""
    sizes, names = [16, 16, 32, 32, 4, 4], ["q", "k", "v", "z", "beta", "alpha"]
    parts = {f"{name}.weight": torch.randn(size, 3) for name, size in zip(names, sizes, strict=True)}
    layers = []
    for rank in range(tp):
        layer = MergedColumnParallelLinear(3, sizes, names=names, bias=False, tp_rank=rank, tp_size=tp)
        layer.load(parts)
        layers.append(layer)
    if tp == 2:
        assert [layer.out_sizes for layer in layers] == [[8, 8, 16, 16, 2, 2]] * 2
    by_part = zip(*(layer.weight.split(layer.out_sizes) for layer in layers), strict=True)
    whole = torch.cat([torch.cat(pieces) for pieces in by_part])
    assert torch.equal(whole, torch.cat(list(parts.values())))
    again = MergedColumnParallelLinear(3, sizes, names=names, bias=False, tp_rank=0, tp_size=1)
    again.load({"weight": whole})
    assert torch.equal(again.weight, whole)


def test_known_offsets_of_a_published_model() -> None:
    """Qwen3-0.6B: 16 query and 8 kv heads of 128, width 3072."""
    qkv = QKVParallelLinear(1024, 128, 16, 8, bias=False, tp_rank=0, tp_size=1, device="meta")
    assert qkv.output_offsets == [0, 2048, 3072] and qkv.out_features == 4096
    merged = MergedColumnParallelLinear(1024, [3072, 3072], bias=False, tp_rank=0, tp_size=1, device="meta")
    assert merged.out_features == 6144


@pytest.mark.parametrize("alone", ["gate_up_proj", "down_proj"])
def test_partners_that_disagree_about_being_divided_are_refused(alone: str, tmp_path: Path) -> None:
    """A whole gate_up before a down whose results are summed would count the term once for each rank."""
    with pytest.raises(SpecError, match=r"gate_up_proj and down_proj share the axis 'ffn' \(64 units\)") as caught:
        on_rank(write(tmp_path), overrides={f"tree.model.layers.mlp.{alone}.disable_tp": True})
    assert "say disable_tp on both, or on neither" in str(caught.value)
