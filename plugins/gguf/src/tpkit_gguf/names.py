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
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def hf_name(name: str) -> str:
    """Returns the Hugging Face name of a tensor; one that is not known keeps its own, so that loading reports it."""
    found = _NAME.fullmatch(name)
    if found is None:
        return name
    block, part, kind = found.groups()
    module = _OUTSIDE.get(part) if block is None else _IN_BLOCK.get(part)
    if module is None:
        return name
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
