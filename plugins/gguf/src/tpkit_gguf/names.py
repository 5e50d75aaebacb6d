"""GGUF's tensor names as Hugging Face has them, and the rows that GGUF stores in another order.

Names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#standardized-tensor-names
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tpkit.checkpoint import View

__all__ = ["ARCHITECTURES", "head_orders", "hf_name"]

#: architectures whose tensors are named here: model_type and class in config.json
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "olmoe": ("olmoe", "OlmoeForCausalLM"),
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
#: in a llama, which has experts if it is a Mixtral
_OF_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+?)(?:\.(\d+))?\.(weight|bias)")


def hf_name(name: str, arch: str = "") -> str:
    """Returns the Hugging Face name of a tensor; one that is not known keeps its own, so that loading reports it.

    Args:
        name: as the file has it. Experts lie in one tensor; before 2024 each had its own (``ffn_gate.7``).
        arch: the file's architecture.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return name
    block, part, expert, kind = found.groups()
    inside = _IN_BLOCK | _OF_MIXTRAL if arch == "llama" else _IN_BLOCK
    module = _OUTSIDE.get(part) if block is None else inside.get(part if expert is None else f"{part}_exps")
    if module is None or (expert is not None and block is None):
        return name
    if expert is not None:
        above, _, last = module.rpartition(".")
        module = f"{above}.{int(expert)}.{last}"
    return f"{module}.{kind}" if block is None else f"model.layers.{int(block)}.{module}.{kind}"


def head_orders(names: Iterable[str], heads: int, kv_heads: int, head_dim: int) -> dict[str, View]:
    """Returns, for a llama's query and key projections, where their rows lie.

    llama.cpp rotates neighbours, Hugging Face halves: row ``(head, half, j)`` is stored as ``(head, j, half)``. Rows
    are moved whole, so packed ones are too.

    Args:
        names: Hugging Face names of the tensors.
        heads, kv_heads: heads of the queries and of the keys.
        head_dim: rows of a head.
    """
    counts = {"q_proj": heads, "k_proj": kv_heads}
    orders: dict[str, View] = {}
    for name in names:
        module = name.rpartition(".")[0]
        count = counts.get(module.rpartition(".")[2])
        if count is not None:
            orders[module] = View(0, (count, 2, head_dim // 2), (head_dim, 1, 2))
    return orders
