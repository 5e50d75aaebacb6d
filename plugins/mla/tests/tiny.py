"""Tiny checkpoints written by transformers, each with its logits, and how far this module's are from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tpkit
from tpkit import Model

DENSE = Path(__file__).with_name("dense.yaml")
#: relative to the largest logit, in float32
TOLERANCE = 1e-4
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
#: name -> model_type, fields of its config
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("deepseek_v2", {}),
    "v2-q_proj": ("deepseek_v2", {"q_lora_rank": None}),
    "v2-yarn": ("deepseek_v2", {"rope_parameters": YARN, "attention_bias": True}),
    "v3": ("deepseek_v3", {"rms_norm_eps": 1e-2}),
    "v3-q_proj": ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
    "v3-half": ("deepseek_v3", {"rope_interleave": False}),
    "v3-biased": ("deepseek_v3", {"attention_bias": True, "num_attention_heads": 7, "hidden_size": 112}),
    "v3-yarn": ("deepseek_v3", {"rope_parameters": YARN}),
    "v3-yarn-half": ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 1.0}, "rope_interleave": False}),
    "v3-yarn-no-mscale": (
        "deepseek_v3", {"rope_parameters": {k: v for k, v in YARN.items() if not k.startswith("mscale")}},
    ),
    "v3-few-heads": ("deepseek_v3", {"num_attention_heads": 2}),
}  # fmt: skip
_SIZES = {
    "vocab_size": 250, "hidden_size": 96, "intermediate_size": 136, "num_hidden_layers": 2, "num_attention_heads": 6,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "max_position_embeddings": 128, "first_k_dense_replace": 2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Made:
    """A checkpoint and its reference: ids ``[2, 14]``, logits ``[2, 14, vocab]`` float32."""

    folder: Path
    ids: torch.Tensor
    logits: torch.Tensor


def make(family: str, fields: dict[str, Any], folder: Path) -> Made:
    """Writes a model whose weights are all random, norms around 1, and returns its logits, with eager attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {**_SIZES, **fields}
    config = AutoConfig.for_model(family, **sizes, num_key_value_heads=sizes["num_attention_heads"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            random = torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.25)
            parameter.copy_(random + (1.0 if "norm" in name else 0.0))
        model.save_pretrained(folder)
        ids = torch.stack([torch.arange(14) * 7 % 200 + 3, torch.arange(14) * 11 % 190 + 5])
        return Made(folder, ids, model(ids).logits.float())


def load(made: Made, description: Path | str = DENSE, **how: Any) -> Model:
    return tpkit.build(tpkit.load_spec(description, config=made.folder), checkpoint=made.folder, **how)


def off(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Returns the largest difference relative to the reference's largest value."""
    assert logits.shape == reference.shape
    return ((logits.float() - reference).abs().max() / reference.abs().max()).item()


def cached(model: Model, ids: torch.Tensor, *pieces: int) -> torch.Tensor:
    """Returns all logits, computed piece by piece with a cache."""
    cache = model.new_cache(*ids.shape)
    return torch.cat([model(piece, cache) for piece in ids.split(list(pieces), dim=1)], dim=1)


def differences(made: Made, description: Path | str = DENSE) -> tuple[float, float, float]:
    """Builds the model on all ranks; returns the differences at once, token by token, and in larger pieces."""
    model = load(made, description)
    with torch.inference_mode():
        plain, single = model(made.ids), cached(model, made.ids, 5, *[1] * 9)
        several = cached(model, made.ids, 1, 8, 3, 2)
    return off(plain, made.logits), off(single, made.logits), off(several, made.logits)


def quantised(made: Made, method: str) -> tuple[torch.Tensor, float, float]:
    """Quantises while loading; returns the logits, and how far pieces with a cache are from them."""
    spec = tpkit.load_spec(DENSE, config=made.folder, quant={"method": method})
    model = tpkit.build(spec, checkpoint=made.folder)
    with torch.inference_mode():
        plain = model(made.ids)
        single, several = cached(model, made.ids, 5, *[1] * 9), cached(model, made.ids, 1, 8, 3, 2)
    return plain, off(single, plain), off(several, plain)
