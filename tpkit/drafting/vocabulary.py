"""Words by which projections and norms are recognised, in small letters, the likeliest first."""

from __future__ import annotations

import re

__all__ = [
    "ACTIVATIONS",
    "BUFFERS",
    "CORRECTION",
    "DOWN",
    "GATE",
    "GATE_UP",
    "HEAD_NORM",
    "NORM",
    "OUT",
    "PER_HEAD",
    "QKV",
    "ROUTER",
    "SINKS",
    "UP",
    "K",
    "Q",
    "V",
]

Q = frozenset(["q_proj", "q", "wq", "query", "q_lin", "query_proj", "to_q", "attn_q", "linear_q"])
K = frozenset(["k_proj", "k", "wk", "key", "k_lin", "key_proj", "to_k", "attn_k", "linear_k"])
V = frozenset(["v_proj", "v", "wv", "value", "v_lin", "value_proj", "to_v", "attn_v", "linear_v"])
QKV = frozenset(
    [
        "qkv_proj",
        "qkv",
        "c_attn",
        "query_key_value",
        "wqkv",
        "w_pack",
        "in_proj",
        "qkv_lin",
        "attn_qkv",
        "linear_qkv",
        "to_qkv",
    ]
)
OUT = (
    "o_proj",
    "out_proj",
    "wo",
    "o",
    "dense",
    "out_lin",
    "to_out",
    "attn_output",
    "attn_out",
    "linear_out",
    "linear_proj",
    "c_proj",
    "proj",
    "output",
)
GATE = frozenset(["gate_proj", "gate", "w1", "wg", "gate_lin", "ffn_gate", "linear_gate", "w_gate"])
UP = frozenset(
    [
        "up_proj",
        "up",
        "w3",
        "ffn_up",
        "fc1",
        "fc_in",
        "c_fc",
        "dense_h_to_4h",
        "lin1",
        "w_in",
        "wi",
        "linear_in",
        "up_lin",
        "w_up",
        "linear_up",
    ]
)
GATE_UP = frozenset(["gate_up_proj", "gate_up", "w12", "gate_and_up_proj", "linear_fc1", "w13", "input_linear"])
DOWN = (
    "down_proj",
    "down",
    "w2",
    "fc2",
    "fc_out",
    "dense_4h_to_h",
    "lin2",
    "w_out",
    "ffn_down",
    "linear_out",
    "c_proj",
    "linear_fc2",
    "w_down",
    "out_proj",
    "wo",
    "proj",
    "output",
    "output_linear",
)
NORM = re.compile(r"norm|(^|_)ln(_|\d|$)", re.IGNORECASE)
HEAD_NORM = {
    "q_norm": re.compile(r"(q|query)_?(layer)?_?(norm|ln)|norm_q|ln_q", re.IGNORECASE),
    "k_norm": re.compile(r"(k|key)_?(layer)?_?(norm|ln)|norm_k|ln_k", re.IGNORECASE),
}
ACTIVATIONS = frozenset(
    [
        "gelu",
        "gelu_fast",
        "gelu_new",
        "gelu_pytorch_tanh",
        "linear",
        "mish",
        "quick_gelu",
        "relu",
        "relu2",
        "relu6",
        "silu",
        "swish",
        "tanh",
    ]
)
#: tensors that are computed and stored all the same
BUFFERS = frozenset(("inv_freq", "masked_bias", "position_ids", "causal_mask"))
#: what chooses among experts
ROUTER = re.compile(r"gate|router|classifier|wg", re.IGNORECASE)
#: a number for each expert that is added where experts are chosen
CORRECTION = re.compile(r"correction|(expert|score|router|routing|gate)\w*bias", re.IGNORECASE)
SINKS = re.compile(r"sink", re.IGNORECASE)
#: the style of a number for each head
PER_HEAD = "style: per_head"
