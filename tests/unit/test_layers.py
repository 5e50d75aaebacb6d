"""Layers alone: no description, no process group. Each rank's shard computes its part of what one rank computes."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch.nn.functional import linear

from tpkit.distributed.group import TensorParallel
from tpkit.errors import UsageError
from tpkit.feedforward import Activation
from tpkit.layers import (
    ColumnParallelLinear,
    ForwardContext,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    ReplicatedLinear,
    RMSNorm,
    Rotary,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from tpkit.layers.context import KVCache
from tpkit.layers.mlp import ACTIVATIONS

SIZES = [1, 2, 3, 5]


def _at(rank: int, size: int) -> dict[str, int]:
    return {"tp_rank": rank, "tp_size": size}


def test_a_column_weight_is_cut_into_rows() -> None:
    weight = torch.arange(12.0).reshape(4, 3)
    for rank, rows in enumerate([[0, 1], [2, 3]]):
        layer = ColumnParallelLinear(3, 4, bias=False, **_at(rank, 2))
        layer.load({"weight": weight})
        assert torch.equal(layer.weight, weight[rows])


def test_row_partial_sums_add_up_with_the_bias_once() -> None:
    """[[1, 2, 3, 0], [4, 5, 6, 1]] @ [1, 2, 3, ...]: the ranks give [13, 31] and [7, 15] with bias [1, 1] apart."""
    weight, bias = torch.tensor([[3.0, 5.0, 1.0, 2.0], [7.0, 12.0, 3.0, 4.0]]), torch.tensor([100.0, 200.0])
    x = torch.tensor([1.0, 2.0, 3.0, 2.0])
    partial = []
    for rank in range(2):
        layer = RowParallelLinear(4, 2, reduce_results=False, skip_bias_add=True, **_at(rank, 2))
        layer.load({"weight": weight, "bias": bias})
        y, held = layer(x[2 * rank : 2 * rank + 2])
        partial.append(y)
        assert torch.equal(held, bias)  # whole on every rank: added once, by whoever reduces
    assert partial[0].tolist() == [13, 31]
    assert partial[1].tolist() == [7, 17]
    assert torch.equal(sum(partial) + bias, linear(x, weight, bias))


def test_a_bias_that_every_rank_would_add_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reduce_results=False with a bias that each of 2 ranks would add"):
        RowParallelLinear(4, 4, reduce_results=False, **_at(0, 2))
    RowParallelLinear(4, 4, reduce_results=False, **_at(0, 1))  # one rank adds it once
    RowParallelLinear(4, 4, reduce_results=False, bias=False, **_at(0, 2))


def test_four_query_heads_in_two_kv_heads_on_two_ranks() -> None:
    q, k, v = (torch.arange(n * 2 * 3.0).reshape(n * 2, 3) + 100 * i for i, n in enumerate((4, 2, 2)))
    for rank in range(2):
        layer = QKVParallelLinear(3, 2, 4, 2, bias=False, **_at(rank, 2))
        layer.load({"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v})
        expected = torch.cat([q[4 * rank : 4 * rank + 4], k[2 * rank : 2 * rank + 2], v[2 * rank : 2 * rank + 2]])
        assert torch.equal(layer.weight, expected)
        assert (layer.num_local_heads, layer.num_local_kv_heads) == (2, 1)


def test_offsets_of_qwen3_0_6b() -> None:
    qkv = QKVParallelLinear(1024, 128, 16, 8, bias=False, **_at(0, 1), device="meta")
    assert (qkv.output_offsets, qkv.out_features) == ([0, 2048, 3072], 4096)
    assert MergedColumnParallelLinear(1024, [3072, 3072], bias=False, device="meta").out_features == 6144


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("heads", "kv"), [(4, 2), (9, 3), (4, 1), (7, 1), (6, 6), (2, 2)])
def test_merged_equals_apart(heads: int, kv: int, size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 10)
    parts = {f"{p}_proj.{kind}": torch.randn(n * 4, *rest) for p, n in zip("qkv", (heads, kv, kv), strict=True)
             for kind, rest in (("weight", [10]), ("bias", []))}  # fmt: skip
    seen: dict[str, list[torch.Tensor]] = {"q": [], "k": [], "v": []}
    for rank in range(size):
        layer = QKVParallelLinear(10, 4, heads, kv, **_at(rank, size))
        layer.load(parts)
        again = QKVParallelLinear(10, 4, heads, kv, **_at(rank, size))
        again.load({kind: torch.cat([parts[f"{p}_proj.{kind}"] for p in "qkv"]) for kind in ("weight", "bias")})
        assert torch.equal(layer.weight, again.weight)
        assert torch.equal(layer.bias, again.bias)  # type: ignore[arg-type]
        share = layer.sharded.layer.shares(layer.sharded.layer.spec.out, rank)[0]
        for name, y in zip("qkv", layer(x).split(layer.out_sizes, -1), strict=True):
            if name == "q" or (share is not None and share.owner):
                seen[name].append(y)
    for name, outputs in seen.items():
        whole = linear(x, parts[f"{name}_proj.weight"], parts[f"{name}_proj.bias"])
        torch.testing.assert_close(torch.cat(outputs, -1), whole)


@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_pieces_that_are_this_ranks_already(size: int) -> None:
    gate, up = torch.randn(11, 4), torch.randn(11, 4)
    for rank in range(size):
        layer = MergedColumnParallelLinear(4, [11, 11], bias=False, **_at(rank, size))
        layer.load({"gate_proj.weight": gate, "up_proj.weight": up})
        wanted = layer.weight.clone()
        layer.weight.zero_()
        a, b = wanted.split(layer.out_sizes)
        layer.load({"gate_proj.weight": a, "up_proj.weight": b}, sharded=True)
        assert torch.equal(layer.weight, wanted)
        layer.weight.zero_()
        layer.load({"weight": wanted}, sharded=True)
        assert torch.equal(layer.weight, wanted)


def test_unknown_parts_and_wrong_pieces_are_value_errors_that_name_them() -> None:
    layer = MergedColumnParallelLinear(4, [6, 6], bias=False, prefix="mlp.gate_up_proj", **_at(0, 2))
    with pytest.raises(ValueError, match=r"gate\.weight"):
        layer.load({"gate.weight": torch.zeros(6, 4), "up_proj.weight": torch.zeros(6, 4)})
    with pytest.raises(ValueError, match=r"gate_proj\.weight is \[6, 4\], rank 0 holds \[3, 4\]"):
        layer.load({"gate_proj.weight": torch.zeros(6, 4), "up_proj.weight": torch.zeros(3, 4)}, sharded=True)
    with pytest.raises(ValueError, match=r"gate_proj\.weight is \[5, 4\].*needs \[6, 4\]"):
        layer.load({"gate_proj.weight": torch.zeros(5, 4), "up_proj.weight": torch.zeros(6, 4)})


@pytest.mark.parametrize("size", SIZES)
def test_a_head_shares_the_shard_of_its_embedding(size: int) -> None:
    table, ids = torch.randn(17, 6), torch.tensor([[0, 16, 5, 9]])
    logits, rows = [], torch.zeros(1, 4, 6)
    for rank in range(size):
        embedding = VocabParallelEmbedding(17, 6, **_at(rank, size))
        embedding.load({"weight": table})
        head = ParallelLMHead(17, 6, tied=embedding, gather_output=False)
        assert head.weight is embedding.weight
        logits.append(head(table[3]))
        own = [
            i for i in range(17) if i in range(*embedding.sharded.layer.bounds(head.sharded.layer.spec.out, rank)[0])
        ]
        assert torch.equal(embedding.weight, table[own])
        rows = rows + torch.stack([table[i] if i in own else torch.zeros(6) for i in ids[0].tolist()])
    torch.testing.assert_close(torch.cat(logits), table @ table[3])
    assert torch.equal(rows[0], table[ids[0]])  # together the ranks have each row once


def test_disable_tp_keeps_everything_on_every_rank() -> None:
    weight, x = torch.randn(6, 4), torch.randn(2, 4)
    for layer in (
        ColumnParallelLinear(4, 6, bias=False, disable_tp=True, **_at(1, 3)),
        RowParallelLinear(4, 6, bias=False, disable_tp=True, **_at(1, 3)),
        ReplicatedLinear(4, 6, bias=False, **_at(1, 3)),
    ):
        layer.load({"weight": weight})
        torch.testing.assert_close(layer(x), linear(x, weight))  # and no other rank is needed


def test_a_step_that_needs_the_other_ranks_says_so() -> None:
    layer = RowParallelLinear(4, 4, bias=False, **_at(0, 2))
    layer.load({"weight": torch.eye(4)})
    with pytest.raises(UsageError, match="rank 0 of 2 has no process group"):
        layer(torch.zeros(2))
    with pytest.raises(UsageError, match="2 input features, the input has 4"):
        layer(torch.zeros(4))


def test_an_empty_shard_gives_nothing_and_calls_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = ColumnParallelLinear(4, 2, **_at(2, 3))
    monkeypatch.setattr(type(layer.quant_method), "apply", lambda *_: pytest.fail("an empty shard was multiplied"))
    assert layer(torch.zeros(5, 4)).shape == (5, 0)


def test_a_scalar_fills_a_parameter_of_one_element() -> None:
    layer = ColumnParallelLinear(1, 1, bias=False, **_at(0, 1))
    layer.load({"weight": torch.tensor(3.0)})
    assert layer.weight.item() == 3


def test_parameters_do_not_require_grad() -> None:
    assert not any(p.requires_grad for p in ColumnParallelLinear(4, 4).parameters())


def test_rms_norm_is_that_of_torch() -> None:
    norm, x = RMSNorm(8, 1e-5), torch.randn(3, 8)
    norm.load({"weight": torch.randn(8)})
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (8,), norm.weight, 1e-5))


@pytest.mark.parametrize("pairs", ["half", "interleaved"])
def test_rotary_turns_pairs_as_complex_numbers_turn(pairs: Any) -> None:
    rotary = Rotary(6, 100.0, pairs=pairs)
    x = torch.randn(1, 2, 5, 8)
    y = rotary(x, ForwardContext(5, x.device))
    assert torch.equal(y[..., 6:], x[..., 6:])  # the rest of the head is left alone
    at = [(i, i + 3) for i in range(3)] if pairs == "half" else [(2 * i, 2 * i + 1) for i in range(3)]
    for i, (a, b) in enumerate(at):
        angle = torch.arange(5.0) * 100.0 ** (-i / 3)
        turned = torch.complex(x[..., a], x[..., b]) * torch.polar(torch.ones(5), angle)
        torch.testing.assert_close(torch.complex(y[..., a], y[..., b]), turned)


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("past", [0, 4])
@pytest.mark.parametrize("length", [1, 5])
def test_masks_show_the_past_and_no_more_than_the_window(window: int | None, past: int, length: int) -> None:
    cache = KVCache([], batch=1, length=20, dtype=torch.float32)
    cache.used = past
    mask, causal = ForwardContext(length, torch.device("cpu"), cache).mask(window)
    seen = torch.tensor(
        [[0 <= i - j < (window or 99) for j in range(past + length)] for i in range(past, past + length)]
    )
    if mask is not None:
        assert not causal and torch.equal(mask, seen)
    elif causal:
        assert past == 0 and torch.equal(seen, torch.ones(length, length).tril().bool())
    else:
        assert seen.all()


def test_a_full_cache_says_how_many_tokens_it_holds() -> None:
    cache = KVCache([(1, 2, 2)], batch=1, length=3, dtype=torch.float32)
    with pytest.raises(UsageError, match="holds 3 tokens of 1 sequences; 4 of 1 are needed"):
        cache.check(1, 4)


def test_place_is_rank_and_size_together_or_a_group() -> None:
    with pytest.raises(UsageError, match="rank and size together"):
        TensorParallel.of(None, rank=1)
    with pytest.raises(UsageError, match="rank 3 of 2"):
        ColumnParallelLinear(4, 4, **_at(3, 2))


def test_every_activation_that_a_description_may_name_is_computed() -> None:
    assert set(ACTIVATIONS) == set(get_args(Activation)) - {"child"}
