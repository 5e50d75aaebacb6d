"""Gemma 4 text: the logits of transformers, at once and with a cache; and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tpkit
from tests.families import rewrite, tensors_of
from tests.model.test_families_tp import TOLERANCE, off
from tests.ranks import Ranks
from tpkit import SpecError

Make = Callable[[str], tuple[Path, torch.Tensor, torch.Tensor]]

SMALL: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "intermediate_size": 96,
    "vocab_size": 256, "vocab_size_per_layer_input": 256, "hidden_size": 64, "hidden_size_per_layer_input": 8,
    "num_hidden_layers": 3, "sliding_window": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}  # fmt: skip
ODD = {
    "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 107, "vocab_size": 257,
    "vocab_size_per_layer_input": 259, "hidden_size": 72, "hidden_size_per_layer_input": 7,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "inputs": {},
    "odd": {**ODD, "attention_bias": True},
    "keys-as-values": {
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 5.0,
    },
    "keys-as-values-odd": {
        **ODD, "attention_k_eq_v": True, "num_global_key_value_heads": 9, "tie_word_embeddings": False,
    },
}  # fmt: skip


def written(folder: Path, **fields: Any) -> torch.Tensor:
    """Writes a checkpoint with random weights, its config.json spelt as on the hub; returns its logits for `ids`."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    fields = {**SMALL, **fields}
    model = Gemma4ForCausalLM(Gemma4TextConfig(**fields)).float()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("layer_scalar") or (tensor.ndim == 1 and "norm" in name):
                tensor.copy_(1 + torch.randn_like(tensor) * 0.2)
            elif name.endswith(("weight", "bias")):
                tensor.copy_(torch.randn_like(tensor) * 0.15)
    model.save_pretrained(folder)
    theirs = Gemma4ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = theirs(ids()).logits
    # saving moves these two below per_layer_config
    hub = {key: fields.get(key) for key in ("global_head_dim", "num_global_key_value_heads")}
    rewrite(folder, per_layer_config=..., **hub)
    return logits.contiguous()


def ids() -> torch.Tensor:
    return torch.stack([torch.arange(14) * 7 % 190 + 3, torch.arange(14) * 11 % 210 + 5])


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Returns the checkpoint of a case, its ids and logits; made once."""
    root, logits = tmp_path_factory.mktemp("gemma4"), dict[str, torch.Tensor]()

    def made(case: str) -> tuple[Path, torch.Tensor, torch.Tensor]:
        if case not in logits:
            logits[case] = written(root / case, **CASES[case])
        return root / case, ids(), logits[case]

    return made


def differences(folder: Path, tokens: torch.Tensor, logits: torch.Tensor) -> tuple[float, float, float]:
    """Builds on all ranks; returns the differences at once, in pieces with a cache, and token by token."""
    model = tpkit.build(tpkit.load_spec("gemma4_text", config=folder), checkpoint=folder)
    with torch.inference_mode():
        found = [off(model(tokens), logits)]
        for sizes in ([9, 1, 4], [1] * 14):
            cache = model.new_cache(*tokens.shape)
            parts = [model(part, cache) for part in tokens.split(sizes, dim=1)]
            found.append(off(torch.cat(parts, dim=1), logits))
    return found[0], found[1], found[2]


def cases() -> list[Any]:
    return [
        pytest.param(case, tp, marks=[] if tp in (1, 3) else [pytest.mark.slow], id=f"{case}-tp{tp}")
        for case in CASES
        for tp in (1, 2, 3, 4, 5)
    ]


@pytest.mark.parametrize(("case", "tp"), cases())
def test_logits_are_those_of_transformers(case: str, tp: int, make: Make, ranks: Ranks) -> None:
    for found in ranks(tp).run(differences, *make(case)):
        assert max(found) < TOLERANCE, "{:.1e} at once, {:.1e} in pieces, {:.1e} one by one".format(*found)


def test_each_part_is_computed(make: Make) -> None:
    """A part that random weights do not show would pass the test above without being there."""
    folder, tokens, logits = make("keys-as-values-odd")
    model = tpkit.build(tpkit.load_spec("gemma4_text", config=folder), checkpoint=folder)
    layer = model.model.layers[1]
    for part in (
        layer.scaled.layer_scalar.value,
        layer.post_per_layer_input_norm.weight,
        layer.self_attn.k_norm.weight,
    ):
        kept = part.data.clone()
        part.data.mul_(1.5)
        with torch.inference_mode():
            assert off(model(tokens), logits) > 10 * TOLERANCE
        part.data.copy_(kept)
    assert differences(folder, tokens, logits)[0] < TOLERANCE


@pytest.mark.parametrize("case", ["inputs", "keys-as-values"])
def test_heads_may_be_given_by_layer_as_transformers_saves_them(case: str, make: Make) -> None:
    folder, _, _ = make(case)
    config = json.loads((folder / "config.json").read_text())
    ours = tpkit.load_spec("gemma4_text", config=config)
    changed = {"head_dim": 32} if case == "inputs" else {"head_dim": 32, "num_key_value_heads": 1}
    saved = {k: v for k, v in config.items() if k not in ("global_head_dim", "num_global_key_value_heads")}
    saved["per_layer_config"] = {"1": changed, "2": changed}
    theirs = tpkit.load_spec("gemma4_text", config=saved)
    assert _heads(theirs) == _heads(ours)
    assert _heads(tpkit.load_spec("gemma4_text", config=saved | {"per_layer_config": {}})) == [(16, 2)] * 3
    with pytest.raises(SpecError, match="'3' is no number of one of 3 layers"):
        tpkit.load_spec("gemma4_text", config=saved | {"per_layer_config": {"3": changed}})
    with pytest.raises(SpecError, match="layers to their fields is needed"):
        tpkit.load_spec("gemma4_text", config=saved | {"per_layer_config": [changed]})


def _heads(spec: Any) -> list[tuple[int, int]]:
    options = [node.options for node in spec.root.walk() if node.word == "attention"]
    return [(each.head_dim, each.kv_heads) for each in options]


def test_keys_stand_for_values_in_full_layers(make: Make) -> None:
    folder, _, _ = make("keys-as-values")
    names = load_file(folder / "model.safetensors")
    assert "model.layers.0.self_attn.v_proj.weight" in names
    assert "model.layers.1.self_attn.v_proj.weight" not in names
    plan = tpkit.plan_model(
        tpkit.load_spec("gemma4_text", config=folder), ranks=3, checkpoint=tpkit.open_checkpoint(folder)
    )
    parts = [[p.name for p in plan.layers[f"model.layers.{n}.self_attn.qkv_proj"].spec.out] for n in (0, 1)]
    assert parts == [["q", "k", "v"], ["q", "k"]]


def test_it_is_found_in_a_larger_model(make: Make, tmp_path: Path) -> None:
    folder, tokens, logits = make("inputs")
    inner = Path(shutil.copytree(folder, tmp_path / "larger"))
    config = json.loads((inner / "config.json").read_text())
    renamed = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors_of(inner).items()}
    rewrite(inner, renamed | {"model.vision_tower.patch.weight": torch.zeros(2, 2)})
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": config}
    (inner / "config.json").write_text(json.dumps(outer))
    assert differences(inner, tokens, logits)[0] < TOLERANCE


def test_without_rope_parameters_it_turns_as_transformers_says(make: Make) -> None:
    folder, _, _ = make("inputs")
    config = json.loads((folder / "config.json").read_text())
    given = tpkit.load_spec("gemma4_text", config=folder)
    bare = tpkit.load_spec("gemma4_text", config={k: v for k, v in config.items() if k != "rope_parameters"})
    assert _ropes(given) == _ropes(bare)


def _ropes(spec: Any) -> list[Any]:
    return [node.options.rope for node in spec.root.walk() if node.word == "attention"]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"num_kv_shared_layers": 1}, "not num_kv_shared_layers does not hold"),
        ({"enable_moe_block": True, "num_experts": 4}, "not enable_moe_block and not num_experts does not hold"),
        ({"use_double_wide_mlp": True}, "not use_double_wide_mlp does not hold"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention != 'all' does not hold"),
        ({"per_layer_config": {"0": {"sliding_window": 4}}}, r"0\.sliding_window: is 4.* does not read it"),
        ({"attn_logit_softcapping": 30.0}, "this description does not read it"),
    ],
)
def test_what_is_not_covered_is_refused(fields: dict[str, Any], problem: str, make: Make) -> None:
    config = json.loads((make("inputs")[0] / "config.json").read_text())
    with pytest.raises(SpecError, match=problem):
        tpkit.load_spec("gemma4_text", config=config | fields)
