"""The same weights stored, divided, typed and built in other ways give the same logits."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tpkit
from tests.families import Families, Made, Tiny, fuse, rewrite, tensors_of
from tests.model.test_families_tp import TOLERANCE, in_chunks, off
from tests.ranks import Ranks


def logits_of(description: str, folder: Path, ids: torch.Tensor, build: Mapping[str, Any]) -> torch.Tensor:
    spec = tpkit.load_spec(description, config=folder, overrides=build.get("overrides"))
    model = tpkit.build(spec, checkpoint=folder, **{k: v for k, v in build.items() if k != "overrides"})
    with torch.inference_mode():
        return model(ids).clone()


def all_equal(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the logits, which every rank must have alike to the last bit."""
    for result in results[1:]:
        assert torch.equal(result, results[0])
    return results[0]


UNEVEN = Tiny(family="qwen2", heads=9, kv=3, ffn=131, vocab=257, hidden=144)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_weights_fused_on_disk(tp: int, families: Families, ranks: Ranks, tmp_path: Path) -> None:
    made = families.make(UNEVEN)
    folder = families.copy(UNEVEN, tmp_path / "fused")
    stored = fuse(tensors_of(folder))
    assert "model.layers.1.self_attn.qkv_proj.bias" in stored and not any("gate_proj" in name for name in stored)
    rewrite(folder, stored)
    assert off(all_equal(ranks(tp).run(logits_of, "qwen2", folder, made.ids, {})), made.logits) < TOLERANCE


@pytest.mark.parametrize("shard_size", ["40KB", "200KB"])
def test_weights_in_several_files(shard_size: str, families: Families, ranks: Ranks) -> None:
    made = families.make(Tiny(family="qwen3", shard_size=shard_size))
    assert len(list(made.folder.glob("model-*.safetensors"))) > 1
    assert off(all_equal(ranks(3).run(logits_of, "qwen3", made.folder, made.ids, {})), made.logits) < TOLERANCE


def test_a_weight_per_rank(families: Families, ranks: Ranks) -> None:
    made = families.make(UNEVEN)
    assert (
        off(all_equal(ranks(3).run(logits_of, "qwen2", made.folder, made.ids, {"split": (1, 5, 2)})), made.logits)
        < TOLERANCE
    )


LAYER = "tree.model.layers"


@pytest.mark.parametrize(
    "overrides",
    [
        {f"{LAYER}.self_attn.qkv_proj.disable_tp": True, f"{LAYER}.self_attn.o_proj.disable_tp": True},
        {f"{LAYER}.mlp.gate_up_proj.disable_tp": True, f"{LAYER}.mlp.down_proj.disable_tp": True},
        {"tree.lm_head.disable_tp": True},
        {"tree.model.embed_tokens.style": "replicated"},
    ],
    ids=["attention", "mlp", "head", "embedding"],
)
def test_projections_that_are_not_divided(overrides: dict[str, Any], families: Families, ranks: Ranks) -> None:
    made = families.make(UNEVEN)
    results = ranks(2).run(logits_of, "qwen2", made.folder, made.ids, {"overrides": overrides})
    assert off(all_equal(results), made.logits) < TOLERANCE


ATTENTION = "tree.model.layers.self_attn"


@pytest.mark.parametrize(
    ("tiny", "projections"),
    [
        (Tiny(family="olmo2", heads=6, hidden=96), [f"{ATTENTION}.qkv_proj", f"{ATTENTION}.o_proj"]),
        (
            Tiny(family="cohere", heads=6, hidden=96, tied=True, fields='{"use_qk_norm": true}'),
            [f"{ATTENTION}.qkv_proj", f"{ATTENTION}.o_proj"],
        ),
        (
            Tiny(family="bloom", heads=6, kv=6, hidden=96, tied=True),
            [f"tree.transformer.h.self_attention.{name}" for name in ("query_key_value", "dense")],
        ),
    ],
    ids=["norms over all heads", "weights per head", "slopes"],
)
def test_what_lies_on_the_heads_follows_projections_that_are_not_divided(
    tiny: Tiny, projections: list[str], families: Families, ranks: Ranks
) -> None:
    made = families.make(tiny)
    overrides = {f"{path}.disable_tp": True for path in projections}
    results = ranks(3).run(logits_of, tiny.description, made.folder, made.ids, {"overrides": overrides})
    assert off(all_equal(results), made.logits) < TOLERANCE


@pytest.mark.parametrize("tp", [1, 3])
def test_bfloat16_is_close_to_float32(tp: int, families: Families, ranks: Ranks) -> None:
    made = families.make(Tiny(family="qwen3", dtype="bfloat16"))
    logits = all_equal(ranks(tp).run(logits_of, "qwen3", made.folder, made.ids, {}))
    assert logits.dtype == torch.bfloat16
    assert off(logits, made.logits) < 0.05
    exact = all_equal(ranks(tp).run(logits_of, "qwen3", made.folder, made.ids, {"dtype": torch.float32}))
    assert off(exact, made.logits) < TOLERANCE


VARIANTS = {
    "biases everywhere": Tiny(fields='{"attention_bias": true, "mlp_bias": true}', heads=6, kv=2, ffn=67, hidden=48),
    "biases of attention": Tiny(family="qwen3", fields='{"attention_bias": true}'),
    "windows in the upper layers": Tiny(
        family="qwen2", layers=3, fields='{"use_sliding_window": true, "sliding_window": 8, "max_window_layers": 1}'
    ),
    "windows by name": Tiny(
        family="qwen3",
        fields='{"use_sliding_window": true, "sliding_window": 5, '
        '"layer_types": ["sliding_attention", "full_attention"]}',
    ),
    "no window": Tiny(family="mistral", fields='{"sliding_window": null}'),
    "window of one": Tiny(family="mistral", fields='{"sliding_window": 1}'),
    "heads wider than the state": Tiny(fields='{"head_dim": 24}'),
    "another activation": Tiny(fields='{"hidden_act": "gelu_pytorch_tanh"}'),
    "a large epsilon": Tiny(family="qwen3", fields='{"rms_norm_eps": 0.5}'),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_config_json_may_change(variant: str, families: Families, ranks: Ranks) -> None:
    tiny = VARIANTS[variant]
    made = families.make(tiny)
    for tp in (1, 3):
        plain = all_equal(ranks(tp).run(logits_of, tiny.description, made.folder, made.ids, {}))
        assert off(plain, made.logits) < TOLERANCE
    model = tpkit.build(tpkit.load_spec(tiny.description, config=made.folder), checkpoint=made.folder)
    with torch.inference_mode():
        assert off(in_chunks(model, made.ids), made.logits) < TOLERANCE


@pytest.mark.parametrize("tp", [1, 2, 5])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_tied_head(family: str, tp: int, families: Families, ranks: Ranks) -> None:
    made = families.make(Tiny(family=family, tied=True, vocab=257))
    assert "lm_head.weight" not in tensors_of(made.folder)
    assert off(all_equal(ranks(tp).run(logits_of, family, made.folder, made.ids, {})), made.logits) < TOLERANCE


ROPES = {
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "default": {"rope_type": "default", "rope_theta": 300.0},
}  # fmt: skip


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type"])
@pytest.mark.parametrize("kind", ROPES)
def test_rotary_frequencies_in_all_spellings(kind: str, spelling: str, families: Families, tmp_path: Path) -> None:
    import json

    tiny = Tiny(fields=json.dumps({"rope_parameters": ROPES[kind]}))
    made = families.make(tiny)
    folder = families.copy(tiny, tmp_path / "m")
    if spelling != "rope_parameters":
        scaling = {k: v for k, v in ROPES[kind].items() if k != "rope_theta"}
        if spelling == "type":
            scaling["type"] = scaling.pop("rope_type")
        old = {"rope_theta": ROPES[kind]["rope_theta"], "rope_scaling": scaling if kind != "default" else None}
        rewrite(folder, rope_parameters=..., **old)
    plain = families.make(Tiny())
    assert off(plain.logits, made.logits) > 0.01, "the scaling changes nothing: the test would not notice its absence"
    assert off(logits_of("llama", folder, made.ids, {}), made.logits) < TOLERANCE


def dummies(tp_dtype: str) -> tuple[torch.Tensor, dict[str, list[int]]]:
    spec = tpkit.load_spec("qwen3", config=Tiny(family="qwen3", heads=9, kv=3, ffn=131, vocab=257).config())
    model = tpkit.build(spec, dummy_weights=True, dtype=tp_dtype)
    with torch.inference_mode():
        return model(torch.arange(20).reshape(2, 10)), {n: list(p.shape) for n, p in model.named_parameters()}


def test_dummy_weights_do_not_depend_on_the_ranks(ranks: Ranks) -> None:
    ((alone, shapes),) = ranks(1).run(dummies, "float32")
    assert alone.std() > 0 and alone.isfinite().all()
    for tp in (2, 3):
        results = ranks(tp).run(dummies, "float32")
        assert off(all_equal([logits for logits, _ in results]), alone) < TOLERANCE
        assert results[0][1]["model.layers.0.mlp.down_proj.weight"] != shapes["model.layers.0.mlp.down_proj.weight"]


@pytest.fixture
def alone(families: Families) -> tuple[Made, tpkit.Model]:
    made = families.make()
    return made, tpkit.build(tpkit.load_spec("llama", config=made.folder), checkpoint=made.folder)


def test_names_in_state_dict_are_the_checkpoint_s_with_packed_ones_for_their_parts(
    alone: tuple[Made, tpkit.Model],
) -> None:
    made, model = alone
    stored = fuse(tensors_of(made.folder))
    state = model.state_dict()
    assert {name: tensor.shape for name, tensor in state.items()} == {name: t.shape for name, t in stored.items()}
    for name, tensor in state.items():
        assert torch.equal(tensor, stored[name]), name
    assert model.packed_modules_mapping == {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }


def test_a_copy_of_a_model_is_one(alone: tuple[Made, tpkit.Model]) -> None:
    made, model = alone
    twin = copy.deepcopy(model)
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.zero_()
        assert off(twin(made.ids), made.logits) < TOLERANCE
        assert not model(made.ids).any()


def test_a_copy_of_a_tied_model_stays_tied(families: Families) -> None:
    made = families.make(Tiny(tied=True))
    model = copy.deepcopy(tpkit.build(tpkit.load_spec("llama", config=made.folder), checkpoint=made.folder))
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    assert model.param_bytes() == sum(t.numel() * 4 for t in tensors_of(made.folder).values())


def test_a_model_is_for_inference(alone: tuple[Made, tpkit.Model]) -> None:
    _, model = alone
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_batch_is_its_rows(alone: tuple[Made, tpkit.Model]) -> None:
    made, model = alone
    with torch.inference_mode():
        rows = torch.cat([model(row[None]) for row in made.ids])
        assert torch.allclose(model(made.ids), rows, atol=1e-4)


def test_the_last_token_s_logits_alone(alone: tuple[Made, tpkit.Model]) -> None:
    made, model = alone
    with torch.inference_mode():
        cache = model.new_cache(2, 14)
        last = model(made.ids, cache, last_only=True)
    assert last.shape == (2, 1, 256) and cache.used == 14
    assert off(last, made.logits[:, -1:]) < TOLERANCE


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (torch.tensor([[1, 256]]), "model.embed_tokens: token ids from 1 to 256; the table has rows 0 to 255"),
        (torch.tensor([[-1, 3]]), "token ids from -1 to 3"),
        (torch.tensor([1, 2]), r"\[B, L\] with L of at least 1, not \[2\]"),
        (torch.zeros(1, 0, dtype=torch.int64), r"not \[1, 0\]"),
        (torch.zeros(1, 2), "not torch.float32"),
    ],
)
def test_ids_that_cannot_be_meant(ids: torch.Tensor, said: str, alone: tuple[Made, tpkit.Model]) -> None:
    with pytest.raises(tpkit.UsageError, match=said):
        alone[1](ids)


def overfill(folder: Path, ids: torch.Tensor) -> None:
    model = tpkit.build(tpkit.load_spec("llama", config=folder), checkpoint=folder)
    cache = model.new_cache(2, 4)
    with pytest.raises(tpkit.UsageError, match="holds 4 tokens of 2 sequences; 2 of 1 are needed"):
        model(ids[:1, :2], cache)
    model(ids[:, :4], cache)
    with pytest.raises(tpkit.UsageError, match="holds 4 tokens of 2 sequences; 5 of 2 are needed"):
        model(ids[:, 4:5], cache)


def test_what_does_not_fit_the_cache_is_refused_on_every_rank(families: Families, ranks: Ranks) -> None:
    """Also on the one that has no head: it would wait for the others."""
    made = families.make()
    ranks(5).run(overfill, made.folder, made.ids)


@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        pytest.param(
            "inductor",
            marks=[pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")],
        ),
    ],
)
def test_compiled(backend: str, alone: tuple[Made, tpkit.Model]) -> None:
    made, model = alone
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend=backend)
    with torch.no_grad():
        assert off(compiled(made.ids), made.logits) < TOLERANCE
        assert off(in_chunks(model, made.ids), made.logits) < TOLERANCE
