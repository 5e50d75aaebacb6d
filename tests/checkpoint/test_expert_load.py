"""Projections of experts that stand alone: tensors in memory go through the loader's plan, however they are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.quant.methods import Rows
from tpkit import Blob, LinearSpec, LoadError, ParamSpec, UsageError
from tpkit.layers import ColumnParallelExperts, MergedColumnParallelExperts, RowParallelExperts, Sorted

EXPERTS, WIDTH, HIDDEN = 5, 7, 16
PLACES = [(1, 1), (2, 1), (2, 2), (3, 2), (4, 2), (5, 1), (5, 3), (5, 5)]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


GATE, UP = random(EXPERTS, WIDTH, HIDDEN), random(EXPERTS, WIDTH, HIDDEN) + 1
DOWN, BIAS = random(EXPERTS, HIDDEN, WIDTH), random(EXPERTS, HIDDEN)
FORMS = {
    "apart": {f"{n}.{p}.weight": w[n] for n in range(EXPERTS) for p, w in (("gate_proj", GATE), ("up_proj", UP))},
    "each fused": {f"{n}.gate_up_proj.weight": torch.cat([GATE[n], UP[n]]) for n in range(EXPERTS)},
    "stacked": {"gate_proj.weight": GATE, "up_proj.weight": UP},
    "stacked and fused": {"gate_up_proj.weight": torch.cat([GATE, UP], 1)},
    "bare": {"gate_up_proj": torch.cat([GATE, UP], 1)},
}


def up_and_down(rank: int, size: int, ep: int, form: str) -> tuple[Any, Any]:
    place: dict[str, Any] = {"tp_rank": rank, "tp_size": size, "ep": ep}
    up = MergedColumnParallelExperts(HIDDEN, [WIDTH, WIDTH], EXPERTS, bias=False, **place)
    up.load(FORMS[form])
    down = RowParallelExperts(WIDTH, HIDDEN, EXPERTS, **place)
    down.load({f"{n}.down_proj.{k}": t[n] for n in range(EXPERTS) for k, t in (("weight", DOWN), ("bias", BIAS))})
    return up, down


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("size", "ep"), PLACES)
def test_the_summands_of_all_ranks_are_the_experts(size: int, ep: int, form: str) -> None:
    x, counts = random(2 * EXPERTS, HIDDEN), [n % 5 for n in range(EXPERTS)]
    wanted = [(x[:c] @ GATE[n].T * (x[:c] @ UP[n].T)) @ DOWN[n].T + BIAS[n] for n, c in enumerate(counts)]
    total = [torch.zeros_like(each) for each in wanted]
    for rank in range(size):
        up, down = up_and_down(rank, size, ep, form)
        mine = range(up.first, up.first + len(up))
        assert (down.first, len(down)) == (up.first, len(up))
        rows = Sorted(torch.tensor([counts[n] for n in mine], dtype=torch.int64))
        given = torch.cat([x[: counts[n]] for n in mine]) if len(up) else x[:0]
        gate, both = up(given, rows).split(up.out_sizes, -1) if len(up) else (given[:, :0], given[:, :0])
        y = down(gate * both, rows, bias=down.leads) if len(up) else given
        for n, piece in zip(mine, y.split([counts[n] for n in mine]), strict=True):
            total[n] += piece
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(total, wanted, strict=True))


def test_unquantised_experts_are_one_tensor_after_loading_too() -> None:
    up, _ = up_and_down(1, 2, 1, "stacked")
    pointers = [each.weight.data_ptr() for each in up]
    assert pointers == [pointers[0] + n * each.weight.nbytes for n, each in enumerate(up)]
    up.load(FORMS["apart"])
    assert [each.weight.data_ptr() for each in up] == pointers


def test_quantised_experts_take_scales_under_bare_names() -> None:
    codes = (random(EXPERTS, WIDTH, HIDDEN) * 30).to(torch.int8)
    scale = random(EXPERTS, WIDTH, 4).abs()
    for given in (
        {"up_proj.weight": codes, "up_proj.scale": scale},
        {"up_proj": codes, "up_proj_scale": scale},
        {f"{n}.up_proj.{key}": t[n] for n in range(EXPERTS) for key, t in (("weight", codes), ("scale", scale))},
    ):
        layer = ColumnParallelExperts(
            HIDDEN, WIDTH, EXPERTS, bias=False, quant=Rows(Rows.Options(group=4)), tp_rank=2, tp_size=3, ep=2
        )
        layer.load(given)
        for number, each in zip(range(layer.first, EXPERTS), layer, strict=True):
            wanted = codes[number] * scale[number].repeat_interleave(4, 1)
            assert torch.equal(each.quant_method.dequantize(each), wanted)


class Described(Rows):
    """Has a text beside each weight."""

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        return {**super().create_weights(layer), "state": ParamSpec("uint8", dims=(Blob(),))}


def test_a_tensor_of_any_length_comes_to_its_expert() -> None:
    held = {"weight": torch.ones(EXPERTS, HIDDEN, WIDTH).to(torch.int8), "scale": torch.ones(EXPERTS, HIDDEN, 1)}
    layer = RowParallelExperts(WIDTH, HIDDEN, EXPERTS, bias=False, quant=Described(), tp_rank=1, tp_size=2, ep=2)
    given = {f"{n}.down_proj.{key}": tensor[n] for n in range(EXPERTS) for key, tensor in held.items()}
    layer.load(given | {f"{n}.down_proj.state": torch.full((n + 1,), n, dtype=torch.uint8) for n in range(EXPERTS)})
    assert [each.blobs["state"][""].tolist() for each in layer] == [[3] * 4, [4] * 5]
    stacked = {f"down_proj.{key}": tensor for key, tensor in held.items()}
    layer.load(stacked | {"down_proj.state": torch.arange(10, dtype=torch.uint8).view(5, 2)})
    assert [each.blobs["state"][""].tolist() for each in layer] == [[6, 7], [8, 9]]
    with pytest.raises(LoadError, match=r"down_proj\.state is \[4, 2\], experts needs one for each of 5"):
        layer.load(stacked | {"down_proj.state": torch.ones(4, 2).byte()})


def test_what_is_missing_foreign_or_misshapen_is_refused_by_name() -> None:
    layer = RowParallelExperts(WIDTH, HIDDEN, EXPERTS, bias=False, tp_rank=0, tp_size=2)
    whole = {f"{n}.down_proj.weight": DOWN[n] for n in range(EXPERTS)}
    for given, said in (
        ({k: v for k, v in whole.items() if k[0] != "3"}, r"3\.down_proj\.weight"),
        ({**whole, "5.down_proj.weight": DOWN[0]}, r"5\.down_proj\.weight"),
        ({**whole, "2.down_proj.weight": DOWN[0, :-1]}, r"2\.down_proj\.weight"),
        ({"down_proj.weight": DOWN[:-1]}, r"down_proj\.weight"),
        ({**whole, "down_proj.weight": DOWN}, "stored both"),
    ):
        with pytest.raises(LoadError, match=said):
            layer.load(given)
    with pytest.raises(UsageError, match="3 expert-parallel groups of 2 ranks"):
        RowParallelExperts(WIDTH, HIDDEN, EXPERTS, bias=False, tp_rank=0, tp_size=2, ep=3)
    with pytest.raises(UsageError, match="different names"):
        MergedColumnParallelExperts(HIDDEN, [WIDTH, WIDTH], EXPERTS, names=("a", "a"), tp_rank=0, tp_size=1)
