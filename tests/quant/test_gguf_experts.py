"""GGUF files with experts on real ranks: written with the gguf package, compared with the weights that it decodes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import rewrite, tensors_of
from tests.quant.experts import Case, logits_of, some_ids, write
from tests.quant.test_experts import check
from tests.ranks import Ranks

gguf = pytest.importorskip("gguf")
pytest.importorskip("tpkit_gguf")

PHASES = [[range(2), range(2, 5)]]
#: architecture and fields of config.json; two or three blocks of 32 in a row, five experts
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("llama", {"intermediate_size": 96}),
    "qwen3_moe": ("qwen3moe", {"moe_intermediate_size": 96, "num_experts": 5, "norm_topk_prob": True}),
    "qwen2_moe": (
        "qwen2moe",
        {"moe_intermediate_size": 64, "num_experts": 5, "shared_expert_intermediate_size": 96, "norm_topk_prob": False},
    ),
    "olmoe": ("olmoe", {"intermediate_size": 64, "num_experts": 5, "norm_topk_prob": False, "rms_norm_eps": 1e-5}),
}
EVERYWHERE = {"hidden_size": 64, "num_hidden_layers": 2, "mlp_only_layers": [], "num_experts_per_tok": 2}


def kind_of(name: str, tensor: torch.Tensor) -> Any:
    """Returns a type that differs between gate and up of one layer, and between layers; routers and norms are plain."""
    if tensor.ndim == 1 or name.endswith(("gate.weight", "norm.weight")) or re.search(r"\.1\..*(down_proj|w2)", name):
        return gguf.GGMLQuantizationType["F32"]
    return gguf.GGMLQuantizationType["Q4_0" if re.search(r"\.0\..*(gate_proj|w1|q_proj)", name) else "Q8_0"]


def case_of(family: str, folder: Path) -> Case:
    arch, fields = FAMILIES[family]
    plain = write(family, folder / "dense", **EVERYWHERE, **fields)
    config = json.loads((plain / "config.json").read_text())
    tensors, stacks = tensors_of(plain), dict[str, list[str]]()
    for name in sorted(tensors, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        stacks.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.", name), []).append(name)
    writer, dense = _writer(folder / "model.gguf", arch, config), dict(tensors)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), 2)
    for stem, parts in stacks.items():
        whole = torch.stack([tensors[name] for name in parts]) if ".experts." in stem else tensors[stem]
        heads = {"q_proj": 4, "k_proj": 2}.get(stem.split(".")[-2]) if arch == "llama" else None
        kind = kind_of(stem, whole)
        data = gguf.quants.quantize(_turned(whole, heads).squeeze().numpy(), kind)
        writer.add_tensor(names.get_name(stem, (".weight", ".bias")), data, raw_dtype=kind)
        values = torch.from_numpy(gguf.quants.dequantize(data, kind).copy()).reshape(whole.shape)
        values = values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2) if heads else values
        dense |= dict(zip(parts, values, strict=True)) if ".experts." in stem else {stem: values}
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    rewrite(plain, dense)
    return Case(family, folder / "model.gguf", some_ids(), logits_of(plain, some_ids()))


def _turned(weight: torch.Tensor, heads: int | None) -> torch.Tensor:
    """Rows of a llama's queries and keys as the file has them: neighbours are rotated, not halves."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2) if heads else weight


def _writer(file: Path, arch: str, config: dict[str, Any]) -> Any:
    writer = gguf.GGUFWriter(file, arch)
    rope = config.get("rope_parameters") or config
    fields = {
        "block_count": 2, "context_length": 64, "embedding_length": config["hidden_size"], "head_count": 4,
        "head_count_kv": 2, "key_length": 16, "value_length": 16, "feed_forward_length": config["intermediate_size"],
        "rope_freq_base": rope["rope_theta"], "layer_norm_rms_eps": config["rms_norm_eps"], "expert_count": 5,
        "expert_used_count": 2, "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }  # fmt: skip
    for field, value in fields.items():
        if value is not None:
            getattr(writer, f"add_{field}")(value)
    return writer


@pytest.mark.parametrize("family", ["qwen3_moe", *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES)])
def test_experts_of_a_gguf_file(family: str, tmp_path: Path, ranks: Ranks) -> None:
    check(case_of(family, tmp_path), ranks, PHASES, (1, 2))
