"""Faults of dividing sizes and heads, each by the smallest input that shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkit
from tests.families import Families, Tiny
from tests.model.test_families_tp import TOLERANCE, off
from tests.model.test_forms import all_equal, logits_of
from tests.ranks import Ranks
from tests.small import on_rank, plan, weights, write
from tpkit import LoadError, SpecError
from tpkit.layers import ParallelLMHead, QKVParallelLinear, VocabParallelEmbedding
from tpkit.partition import Axis, divide


@pytest.mark.parametrize(("heads", "kv", "tp"), [(6, 2, 4), (12, 6, 4), (4, 2, 5)])
def test_heads_that_do_not_divide_compute_what_one_rank_computes(
    heads: int, kv: int, tp: int, families: Families, ranks: Ranks
) -> None:
    """Six heads on four ranks, six kv heads on four ranks, fewer heads than ranks: not refused, not padded."""
    made = families.make(Tiny(heads=heads, kv=kv, hidden=8 * heads, ffn=72, vocab=96, layers=1))
    assert off(all_equal(ranks(tp).run(logits_of, "llama", made.folder, made.ids, {})), made.logits) < TOLERANCE


def test_query_heads_that_do_not_come_in_kv_groups_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path, num_attention_heads=6, num_key_value_heads=4)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(tpkit.TpkitError, match=r"6.*4") as caught:
        tpkit.plan_model(tpkit.load_spec("llama", config=folder), ranks=2)
    assert "num_key_value_heads" in str(caught.value) or "multiple" in str(caught.value)


def negative_logits() -> tuple[torch.Tensor, torch.Tensor]:
    tp = dist.get_world_size(), dist.get_rank()
    head, embedding = (kind(3, 2, tp=dist.group.WORLD) for kind in (ParallelLMHead, VocabParallelEmbedding))
    table = torch.tensor([[-1.0, 0.0], [-2.0, 5.0], [-3.0, 7.0]])
    head.load({"weight": table})
    embedding.load({"weight": table})
    assert tp[0] == head.tp.size
    return head(torch.tensor([[1.0, 0.0]])), embedding(torch.tensor([2, 0, 1]))


@pytest.mark.parametrize("tp", [1, 2, 4, 5])
def test_padded_rows_of_a_vocabulary_do_not_exist(tp: int, ranks: Ranks) -> None:
    """A padding logit of zero would beat logits that are all negative; a padding row would add to a looked-up one."""
    for logits, rows in ranks(tp).run(negative_logits):
        assert logits.tolist() == [[-1, -2, -3]] and int(logits.argmax()) == 0
        assert rows.tolist() == [[-3, 7], [-1, 0], [-2, 5]]


@pytest.mark.parametrize("tp", range(1, 10))
def test_no_cut_falls_inside_a_head(tp: int) -> None:
    """More ranks than kv heads: half a head of k per rank loads, and fails in the first forward."""
    for rank in range(tp):
        layer = QKVParallelLinear(16, 8, 8, 4, tp_rank=rank, tp_size=tp)
        assert all(size % 8 == 0 for size in layer.out_sizes)
        assert layer.num_local_heads == layer.num_local_kv_heads * (
            layer.num_local_heads // max(1, layer.num_local_kv_heads)
        )


@pytest.mark.parametrize("style", ["column", "merged_column"])
def test_attention_that_is_not_told_its_heads_is_refused(style: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        plan(write(tmp_path), overrides={"tree.model.layers.self_attn.qkv_proj.style": style})
    assert "qkv_proj" in str(caught.value) and style in str(caught.value) and "qkv" in str(caught.value)


def test_a_replica_of_a_kv_head_goes_to_the_ranks_of_its_query_heads(tmp_path: Path) -> None:
    """Two kv heads on four ranks: 0, 0, 1, 1, for weight and bias alike; rank modulo two would have its shape."""
    bias = {
        f"model.layers.0.self_attn.{n}_proj.bias": torch.arange(float(rows))
        for n, rows in (("q", 64), ("k", 16), ("v", 16), ("o", 32))
    }
    tensors = weights(num_attention_heads=8, num_hidden_layers=1) | bias
    folder = write(tmp_path, tensors, num_attention_heads=8, num_hidden_layers=1, attention_bias=True)
    for rank, owner in enumerate([0, 0, 1, 1]):
        qkv = on_rank(folder, rank, 4).get_submodule("model.layers.0.self_attn.qkv_proj")
        for name, held in (("weight", qkv.weight), ("bias", qkv.bias)):
            q, k, v = held.split([16, 8, 8])
            stem = "model.layers.0.self_attn"
            assert torch.equal(q, tensors[f"{stem}.q_proj.{name}"][16 * rank : 16 * rank + 16])
            assert torch.equal(k, tensors[f"{stem}.k_proj.{name}"][8 * owner : 8 * owner + 8])
            assert torch.equal(v, tensors[f"{stem}.v_proj.{name}"][8 * owner : 8 * owner + 8])


def test_known_owners_of_kv_heads() -> None:
    shares = divide(Axis(name="heads", units=8, groups=2), 4)
    assert [share.group_start for share in shares] == [0, 0, 1, 1]
    assert [share.owner for share in shares] == [True, False, True, False]


@pytest.mark.parametrize(("heads", "kv", "tp"), [(4, 4, 2), (6, 2, 2), (9, 3, 2), (4, 2, 4)])
def test_local_head_counts_are_those_of_the_weights(heads: int, kv: int, tp: int, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": kv}
    folder = write(tmp_path, **fields)
    for rank in range(tp):
        model = on_rank(folder, rank, tp)
        attention = model.get_submodule("model.layers.1.self_attn")
        rows = model.get_parameter("model.layers.1.self_attn.qkv_proj.weight").shape[0]
        assert rows == 8 * (attention.heads + 2 * attention.kv_heads)
        assert model.get_parameter("model.layers.1.self_attn.o_proj.weight").shape == (32, 8 * attention.heads)
        assert model.new_cache(1, 5).keys[1].shape == (1, attention.kv_heads, 5, 8)


def test_a_projection_may_be_wider_than_the_hidden_state(families: Families, ranks: Ranks, tmp_path: Path) -> None:
    """Hidden 40, but 6 heads of 8: each of two ranks has 24 of 48 query rows, not 20."""
    folder = write(tmp_path, hidden_size=40, num_attention_heads=6, num_key_value_heads=6)
    for rank in range(2):
        assert on_rank(folder, rank, 2).get_submodule("model.layers.0.self_attn.qkv_proj").out_sizes == [24, 24, 24]
    made = families.make(Tiny(family="qwen3", heads=6, kv=6, hidden=40, fields='{"head_dim": 8}'))
    assert off(all_equal(ranks(2).run(logits_of, "qwen3", made.folder, made.ids, {})), made.logits) < TOLERANCE


def test_a_norm_of_each_head_needs_no_other_rank_and_is_whole_everywhere(families: Families) -> None:
    folder = families.make(Tiny(family="qwen3")).folder
    norms = [
        on_rank(folder, rank, 2, source="qwen3").get_parameter("model.layers.0.self_attn.q_norm.weight")
        for rank in range(2)
    ]
    assert norms[0].shape == (16,) and torch.equal(norms[0], norms[1])


def test_a_norm_over_a_width_that_is_not_known_here_is_refused() -> None:
    config = Tiny(family="qwen3").config()
    with pytest.raises(tpkit.SpecError, match=r"q_norm.*'heads'.*all_heads, head"):
        spec = tpkit.load_spec("qwen3", config=config, overrides={"tree.model.layers.self_attn.q_norm.over": "heads"})
        tpkit.plan_model(spec, ranks=2)


def test_a_norm_weight_of_the_full_width_does_not_fit_a_norm_of_each_head(families: Families, tmp_path: Path) -> None:
    from tests.families import rewrite, tensors_of

    folder = families.copy(Tiny(family="qwen3"), tmp_path / "m")
    name = "model.layers.0.self_attn.q_norm.weight"
    rewrite(folder, tensors_of(folder) | {name: torch.ones(64)})
    with pytest.raises(LoadError, match=r"q_norm.weight is \[64\] in model.safetensors, .* needs \[16\]"):
        plan(folder, source="qwen3")
