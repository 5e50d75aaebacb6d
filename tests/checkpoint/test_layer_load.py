"""``layer.load``: tensors in memory go through the loader's own plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tpkit import LinearSpec, LoadError, Out, ParamSpec, QuantMethod, Segment
from tpkit.layers import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    ReplicatedLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


@pytest.mark.parametrize("tp", [1, 2, 3, 5])
def test_the_shards_of_all_ranks_are_the_tensor(tp: int) -> None:
    weight, bias = numbered(7, 4), numbered(7)
    for make in (ColumnParallelLinear, ParallelLMHead, VocabParallelEmbedding):
        held = []
        for rank in range(tp):
            arguments = (4, 7) if make is ColumnParallelLinear else (7, 4)
            layer: Any = make(*arguments, tp_rank=rank, tp_size=tp, bias=make is ColumnParallelLinear)
            layer.load({"weight": weight, "bias": bias} if make is ColumnParallelLinear else {"weight": weight})
            held.append(layer)
        assert torch.equal(torch.cat([layer.weight for layer in held]), weight)
        if make is ColumnParallelLinear:
            assert torch.equal(torch.cat([layer.bias for layer in held]), bias)
    rows = [RowParallelLinear(7, 4, tp_rank=rank, tp_size=tp) for rank in range(tp)]
    for row in rows:
        row.load({"weight": weight.T, "bias": bias[:4]})
        assert torch.equal(row.bias, bias[:4])  # type: ignore[arg-type]
    assert torch.equal(torch.cat([row.weight for row in rows], dim=1), weight.T)


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 1), (3, 2), (5, 4)])
def test_parts_and_the_fused_tensor_give_the_same(tp: int, rank: int) -> None:
    q, k, v = numbered(18, 4), numbered(6, 4) + 100, numbered(6, 4) + 200
    apart, fused, named = (
        QKVParallelLinear(4, 2, 9, 3, bias=False, tp_rank=rank, tp_size=tp, names=names)
        for names in (("q_proj", "k_proj", "v_proj"),) * 2 + (("query", "key", "value"),)
    )
    apart.load({"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v})
    fused.load({"weight": torch.cat([q, k, v])})
    named.load({"query.weight": q, "key.weight": k, "value.weight": v})
    assert torch.equal(apart.weight, fused.weight) and torch.equal(apart.weight, named.weight)


def test_merged_parts_of_any_number_and_size() -> None:
    sizes, names = [6, 6, 3, 1], ["a", "b", "c", "d"]
    parts = {
        f"{name}.weight": numbered(size, 2) + 100 * i for i, (name, size) in enumerate(zip(names, sizes, strict=True))
    }
    layers = [
        MergedColumnParallelLinear(2, sizes, names=names, bias=False, tp_rank=rank, tp_size=2) for rank in range(2)
    ]
    for layer in layers:
        layer.load(parts)
    assert [layer.out_sizes for layer in layers] == [[3, 3, 2, 1], [3, 3, 1, 0]]
    wanted = torch.cat([parts["a.weight"][3:], parts["b.weight"][3:], parts["c.weight"][2:], parts["d.weight"][1:]])
    assert torch.equal(layers[1].weight, wanted)


@pytest.mark.parametrize("tp", [2, 4])
def test_pieces_that_are_this_rank_s_already(tp: int) -> None:
    whole = {
        "q_proj.weight": numbered(8, 4),
        "k_proj.weight": numbered(4, 4) + 50,
        "v_proj.weight": numbered(4, 4) + 90,
    }
    for rank in range(tp):
        layer, other = (QKVParallelLinear(4, 2, 4, 2, bias=False, tp_rank=rank, tp_size=tp) for _ in range(2))
        layer.load(whole)
        q, k, v = layer.weight.split(layer.out_sizes)
        other.load({"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v}, sharded=True)
        assert torch.equal(layer.weight, other.weight)
        other.weight.zero_()
        other.load({"weight": layer.weight.clone()}, sharded=True)
        assert torch.equal(layer.weight, other.weight)
    row = RowParallelLinear(7, 2, tp_rank=1, tp_size=2)
    row.load({"weight": numbered(2, 3), "bias": numbered(2)}, sharded=True)
    assert torch.equal(row.weight, numbered(2, 3))


def test_an_empty_shard_takes_its_empty_piece() -> None:
    layer = ColumnParallelLinear(4, 2, tp_rank=2, tp_size=3)
    layer.load({"weight": numbered(2, 4), "bias": numbered(2)})
    layer.load({"weight": numbered(0, 4), "bias": numbered(0)}, sharded=True)
    assert layer.weight.shape == (0, 4)
    qkv = QKVParallelLinear(4, 2, 2, 1, bias=False, tp_rank=2, tp_size=3)
    qkv.load({f"{name}_proj.weight": numbered(0, 4) for name in "qkv"}, sharded=True)
    assert qkv.weight.shape == (0, 4)
    merged = MergedColumnParallelLinear(4, [4, 1], bias=False, tp_rank=1, tp_size=2)
    merged.load({"gate_proj.weight": numbered(2, 4), "up_proj.weight": numbered(0, 4)}, sharded=True)
    assert torch.equal(merged.weight, numbered(2, 4))
    with pytest.raises(LoadError, match=r"up_proj.weight is \[1, 4\]"):
        merged.load({"gate_proj.weight": numbered(2, 4), "up_proj.weight": numbered(1, 4)}, sharded=True)


GOOD = {"q_proj.weight": numbered(8, 4), "k_proj.weight": numbered(4, 4), "v_proj.weight": numbered(4, 4)}


@pytest.mark.parametrize("sharded", [False, True])
def test_an_unknown_part_is_an_error_that_names_the_known_ones(sharded: bool) -> None:
    layer = QKVParallelLinear(4, 2, 4, 2, bias=False, tp_rank=0, tp_size=1)
    with pytest.raises(ValueError, match=r"query_proj\.weight") as caught:
        layer.load({**GOOD, "query_proj.weight": numbered(8, 4)}, sharded=sharded)
    assert isinstance(caught.value, LoadError)
    wrong = {"x_proj.weight" if name == "q_proj.weight" else name: tensor for name, tensor in GOOD.items()}
    with pytest.raises(LoadError) as caught:
        layer.load(wrong, sharded=sharded)
    missing, unknown = caught.value.groups["missing"], [v for k, v in caught.value.groups.items() if k != "missing"]
    assert "q_proj.weight" in missing[0] and "x_proj.weight" in unknown[0][0]


@pytest.mark.parametrize("sharded", [False, True])
def test_everything_wrong_comes_at_once_and_nothing_is_written(sharded: bool) -> None:
    layer = QKVParallelLinear(4, 2, 4, 2, bias=False, tp_rank=0, tp_size=1, prefix="model.layers.3.self_attn.qkv_proj")
    layer.weight.fill_(7)
    with pytest.raises(LoadError) as caught:
        layer.load(
            {"q_proj.weight": numbered(8, 4), "k_proj.weight": numbered(4, 5), "y.weight": numbered(1)}, sharded=sharded
        )
    assert set(caught.value.groups) >= {"missing", "wrong shape"} and len(caught.value.groups) == 3
    text = str(caught.value)
    assert "qkv_proj" in text and "[4, 5]" in text and "[4, 4]" in text and "v_proj.weight" in text
    assert (layer.weight == 7).all()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.bool])
def test_values_of_another_kind_are_not_cast(dtype: torch.dtype, sharded: bool) -> None:
    layer = ReplicatedLinear(4, 2, bias=False, tp_rank=0, tp_size=1)
    with pytest.raises(LoadError, match=str(dtype).removeprefix("torch.")) as caught:
        layer.load({"weight": torch.ones(2, 4).to(dtype)}, sharded=sharded)
    assert "float32" in str(caught.value)


@pytest.mark.parametrize("sharded", [False, True])
def test_floats_are_converted(sharded: bool) -> None:
    layer = ReplicatedLinear(4, 2, bias=False, tp_rank=0, tp_size=1, dtype=torch.bfloat16)
    layer.load({"weight": numbered(2, 4)}, sharded=sharded)
    assert layer.weight.dtype == torch.bfloat16 and layer.weight[1, 3] == 7


class Scaled(QuantMethod):
    """A scale for each part beside the weight."""

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        return {"weight": ParamSpec("float32", (Out(),)), "scale": ParamSpec("float32", (Segment(),))}


@pytest.mark.parametrize("scale", [torch.tensor(3.0), torch.tensor([3.0])], ids=["0-d", "1-d"])
def test_a_scalar_fills_a_parameter_of_one_element(scale: torch.Tensor) -> None:
    layer = ColumnParallelLinear(4, 6, bias=False, tp_rank=1, tp_size=2, quant=Scaled())
    layer.load({"weight": numbered(6), "scale": scale})
    assert layer.scale.tolist() == [3.0]  # type: ignore[operator]
    layer.load({"weight": numbered(3), "scale": scale + 1}, sharded=True)
    assert layer.scale.tolist() == [4.0]  # type: ignore[operator]
    with pytest.raises(LoadError, match=r"scale is \[3\]"):
        layer.load({"weight": numbered(6), "scale": numbered(3)})


def test_each_part_keeps_its_own_scalar_and_a_fused_one_is_given_to_all() -> None:
    layer = MergedColumnParallelLinear(4, [4, 4], bias=False, tp_rank=1, tp_size=2, quant=Scaled())
    parts = {"gate_proj.weight": numbered(4), "up_proj.weight": numbered(4) + 10}
    layer.load({**parts, "gate_proj.scale": torch.tensor(2.0), "up_proj.scale": torch.tensor([5.0])})
    assert layer.scale.tolist() == [2.0, 5.0]  # type: ignore[operator]
    layer.load({"weight": numbered(8), "scale": torch.tensor(9.0)})
    assert layer.scale.tolist() == [9.0, 9.0]  # type: ignore[operator]
    assert layer.segment_of_row().tolist() == [0, 0, 1, 1]


def test_a_norm_and_a_tied_head() -> None:
    norm = RMSNorm(4)
    norm.load({"weight": numbered(4)})
    assert norm.weight.tolist() == [0, 1, 2, 3]
    embedding = VocabParallelEmbedding(5, 2, tp_rank=1, tp_size=2)
    head = ParallelLMHead(5, 2, tied=embedding)
    embedding.load({"weight": numbered(5, 2)})
    assert head.weight is embedding.weight and head.weight.tolist() == [[6, 7], [8, 9]]
