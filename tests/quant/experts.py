"""Tiny quantised checkpoints with experts, each with the logits that transformers computes from its decoded weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tpkit
from tests.families import rewrite, tensors_of
from tests.quant.formats import FORMATS, Format, encode_all, fp8_tensor, mxfp4

__all__ = [
    "FAMILIES",
    "FORMS",
    "PHASES",
    "SHORT",
    "Case",
    "case_of",
    "differences",
    "logits_of",
    "off",
    "some_ids",
    "write",
]

#: groups of ranks that work at the same time: every size from 1 to 5 once
PHASES = [[range(5)], [range(4), range(4, 5)], [range(3), range(3, 5)]]
#: two and three ranks at the same time, for the fast suite
SHORT = [[range(2), range(2, 5)]]

_SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
#: widths of experts that end inside a block of 32, or that ranks cut inside one; experts that nothing divides
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 112, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": 7, "num_experts_per_tok": 3,
        "norm_topk_prob": True, "mlp_only_layers": [1], "num_hidden_layers": 3,
    },
    "gpt_oss": {
        "hidden_size": 96, "intermediate_size": 128, "num_local_experts": 5, "num_experts_per_tok": 2,
        "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip


#: formats of projections: those of a model without experts, and one more
FORMS = {
    **FORMATS,
    "modelopt_fp8": Format("modelopt", {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}, fp8_tensor),
}

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A quantised checkpoint with its reference.

    Attributes:
        description: name of the description.
        folder: config.json and the weights.
        ids: ``[2, 14]`` int64.
        logits: ``[2, 14, vocab]`` float32.
        overrides: words of the description.
    """

    description: str
    folder: Path
    ids: torch.Tensor
    logits: torch.Tensor
    overrides: Mapping[str, Any] = field(default_factory=dict)


def off(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Returns the largest difference relative to the reference's largest value."""
    assert logits.shape == reference.shape
    return float((logits.float() - reference).abs().max() / reference.abs().max())


def differences(case: Case, phases: list[list[range]], groups: tuple[int, ...]) -> dict[tuple[int, int], float]:
    """Builds a model on groups of ranks, its experts in so many groups; returns this rank's largest differences."""
    found = {}
    spec = tpkit.load_spec(case.description, config=case.folder, overrides=dict(case.overrides))
    for phase in phases:
        made = [(members, dist.new_group(list(members))) for members in phase]
        group = next(group for members, group in made if dist.get_rank() in members)
        for ep in groups:
            size = dist.get_world_size(group)
            if ep <= size:
                model = tpkit.build(spec, checkpoint=case.folder, dtype=torch.float32, tp=group, ep=ep)
                found[size, ep] = off(model(case.ids), case.logits)
    return found


def write(family: str, folder: Path, **fields: Any) -> Path:
    """Writes an unquantised checkpoint of random float32 weights, as ``save_pretrained`` does."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **(_SIZES | FAMILIES.get(family, {}) | fields))
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "norm" in name and name.endswith("weight")
            parameter.copy_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.2) + (1.0 if norm else 0))
    model.save_pretrained(folder)
    return folder


def some_ids() -> torch.Tensor:
    """Returns ``[2, 14]`` tokens."""
    return torch.stack([torch.arange(14) * 7 % 120 + 3, torch.arange(14) * 11 % 120 + 5])


def is_quantised(stem: str) -> bool:
    """Says whether a module is a projection of attention, a feed-forward or an expert: no router, head or embedding."""
    last = stem.rpartition(".")[2]
    return last.endswith("_proj") or last in ("w1", "w2", "w3")


def case_of(family: str, form: str, folder: Path, plain_ones: Sequence[str] = (), **fields: Any) -> Case:
    """Writes a checkpoint whose projections, those of each expert too, have random weights in a format.

    Args:
        family: of `FAMILIES`.
        form: of `FORMS`.
        folder: where it goes.
        plain_ones: names of projections that stay as they are, as the list in config.json has them.
        fields: of config.json.
    """
    plain, ids = write(family, folder / "dense", **fields), some_ids()
    tensors = tensors_of(plain)
    stored, dense, config = _blocks(tensors, form) if family == "gpt_oss" else _projections(tensors, form, plain_ones)
    rewrite(plain, dense)
    logits = logits_of(plain, ids)
    quantised = folder / "quantised"
    quantised.mkdir()
    (quantised / "config.json").write_text((plain / "config.json").read_text())
    rewrite(quantised, stored, quantization_config=config)
    return Case(family, quantised, ids, logits)


def _projections(tensors: Tensors, form: str, plain_ones: Sequence[str]) -> tuple[Tensors, Tensors, dict[str, Any]]:
    chosen, kept = FORMS[form], [name.removeprefix("re:") for name in plain_ones]

    def choose(stem: str) -> Format | None:
        return chosen if is_quantised(stem) and not any(re.fullmatch(name, stem) for name in kept) else None

    stored, dense = encode_all(tensors, choose)
    config: dict[str, Any] = {"quant_method": chosen.method, **chosen.config}
    if "config_groups" in config:  # every linear module that is not listed is meant
        config["ignore"] = [*config["ignore"], "re:.*\\.gate$", *plain_ones]
    return stored, dense, config


def _blocks(tensors: Tensors, form: str) -> tuple[Tensors, Tensors, dict[str, Any]]:
    """Stacked experts in blocks of 32 inputs; unquantised they are ``[experts, in, out]``, in blocks [experts, out]."""
    torch.manual_seed(7)
    stored, dense = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, in_, out = stored.pop(name).shape
        held, weights = zip(*(mxfp4(out, in_) for _ in range(experts)), strict=True)
        dense[name] = torch.stack(weights).transpose(1, 2)
        stored |= {f"{name}_{key}": torch.stack([each[key] for each in held]) for key in held[0]}
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return stored, dense, {"quant_method": form, "modules_to_not_convert": kept}


def logits_of(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Returns what transformers computes in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits: torch.Tensor = model(ids).logits
    return logits
