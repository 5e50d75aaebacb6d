"""Random weights as several formats store them, each with what they mean: decoded by formula, code by code.

Nothing here shares code with the plugins. Formulas: see docs/plugins.md and the READMEs of the plugins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["FORMATS", "Format", "encode_all", "mxfp4"]

Tensors = dict[str, torch.Tensor]
#: stored tensors of one linear, and its decoded weight ``[out, in]`` float32
Encoded = tuple[Tensors, torch.Tensor]


@dataclass(frozen=True)
class Format:
    """A format.

    Attributes:
        method: its registry name.
        config: quantization_config without quant_method; as options of a description, `options`.
        encode: random weights of a size, in this format.
    """

    method: str
    config: Mapping[str, Any]
    encode: Callable[[int, int], Encoded]
    options: Mapping[str, Any] | None = None


def _blocks(scale: torch.Tensor, out: int, in_: int, rows: int, columns: int) -> torch.Tensor:
    return scale[torch.arange(out) // rows][:, torch.arange(in_) // columns]


def _pack(codes: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Packs codes into int32 words along a dimension, lowest bits first."""
    codes, per = codes.movedim(dim, -1).to(torch.int64), 32 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per)).unflatten(-1, (-1, per))
    words = sum(codes[..., v] << (bits * place) for place, v in enumerate(order or range(per)))
    return (words - (words >> 31 << 32)).to(torch.int32).movedim(-1, dim).contiguous()  # type: ignore[union-attr]


def fp8_block(out: int, in_: int, block: int = 32) -> Encoded:
    codes = (torch.randn(out, in_) * 60).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-out // block), -(-in_ // block)) * 0.004 + 0.001
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * _blocks(scale, out, in_, block, block)


def fp8_tensor(out: int, in_: int) -> Encoded:
    codes, scale = (torch.randn(out, in_) * 60).to(torch.float8_e4m3fn), torch.rand(()) * 0.01 + 0.0005
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def gptq_act_order(out: int, in_: int, group: int = 32) -> Encoded:
    """Version 2 zero points; inputs belong to groups in any order."""
    groups = -(-in_ // group)
    codes, zeros = torch.randint(0, 16, (in_, out)), torch.randint(0, 16, (groups, out))
    scales = (torch.rand(groups, out) * 0.04 + 0.005).half()
    g_idx = (torch.arange(in_) // group)[torch.randperm(in_)].to(torch.int32)
    dense = torch.stack([(codes[k] - zeros[g]) * scales[g].float() for k, g in enumerate(g_idx.tolist())])
    stored = {"qweight": _pack(codes, 4, 0), "qzeros": _pack(zeros, 4, 1), "scales": scales, "g_idx": g_idx}
    return stored, dense.t()


def awq(out: int, in_: int, group: int = 32) -> Encoded:
    groups, order = -(-in_ // group), (0, 2, 4, 6, 1, 3, 5, 7)
    codes, zeros = torch.randint(0, 16, (in_, out)), torch.randint(0, 16, (groups, out))
    scales = (torch.rand(groups, out) * 0.04 + 0.005).half()
    dense = torch.stack([(codes[k] - zeros[k // group]) * scales[k // group].float() for k in range(in_)])
    stored = {"qweight": _pack(codes, 4, 1, order), "qzeros": _pack(zeros, 4, 1, order), "scales": scales}
    return stored, dense.t()


def ct_int4(out: int, in_: int, group: int = 32) -> Encoded:
    codes, scale = torch.randint(-8, 8, (out, in_)), (torch.rand(out, -(-in_ // group)) * 0.04 + 0.005).bfloat16()
    stored = {
        "weight_packed": _pack(codes + 8, 4, 1),
        "weight_scale": scale,
        "weight_shape": torch.tensor([out, in_]),
    }
    return stored, codes * _blocks(scale.float(), out, in_, 1, group)


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nvfp4(out: int, in_: int) -> Encoded:
    codes = torch.randint(0, 16, (out, in_))
    scale = (torch.rand(out, in_ // 16) * 100 + 20).to(torch.float8_e4m3fn)
    top = torch.rand(()) * 0.001 + 0.0002
    values = FP4[codes % 8] * torch.where(codes < 8, 1.0, -1.0)
    packed = (codes[:, ::2] + (codes[:, 1::2] << 4)).to(torch.uint8)
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": top}, values * _blocks(
        scale.float(), out, in_, 1, 16
    ) * top


def mxfp4(out: int, in_: int) -> Encoded:
    """32 inputs in a block of 16 bytes, the even one in the low half; scales are powers of two above 2 ** -127."""
    codes, exponents = torch.randint(0, 16, (out, in_)), torch.randint(121, 126, (out, in_ // 32))
    values = FP4[codes % 8] * torch.where(codes < 8, 1.0, -1.0)
    packed = (codes[:, ::2] + (codes[:, 1::2] << 4)).to(torch.uint8).view(out, in_ // 32, 16)
    scale = torch.exp2(exponents.float() - 127)
    return {"blocks": packed, "scales": exponents.to(torch.uint8)}, values * _blocks(scale, out, in_, 1, 32)


def nf4(out: int, in_: int) -> Encoded:
    """Blocks of 64 run on from row to row; the high nibble comes first."""
    count = out * in_
    table = torch.linspace(-1, 1, 16) ** 3
    codes, absmax = torch.randint(0, 16, (count,)), torch.rand(-(-count // 64)) * 0.3 + 0.1
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [out, in_]}
    stored = {
        "weight": (codes[1::2] + (codes[::2] << 4)).to(torch.uint8).unsqueeze(1),
        "weight.absmax": absmax,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return stored, (table[codes] * absmax[torch.arange(count) // 64]).view(out, in_)


_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_CT = {
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4}},
    "ignore": ["lm_head"],
}

FORMATS = {
    "fp8_block": Format("fp8", {"activation_scheme": "dynamic", "weight_block_size": [32, 32]}, fp8_block),
    "fp8_tensor": Format("fp8", {"activation_scheme": "dynamic"}, fp8_tensor),
    "gptq_act_order": Format(
        "gptq",
        {"bits": 4, "group_size": 32, "desc_act": True, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq_act_order,
    ),
    "awq": Format("awq", {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq),
    "ct_int4": Format("compressed-tensors", _CT, ct_int4),
    "nvfp4": Format("modelopt", {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}, nvfp4),
    "nf4": Format("bitsandbytes", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4),
}


def encode_all(tensors: Mapping[str, torch.Tensor], choose: Callable[[str], Format | None]) -> tuple[Tensors, Tensors]:
    """Replaces weights by random ones in the format that `choose` says for their module.

    Returns:
        the checkpoint's tensors, and the same checkpoint dense.
    """
    torch.manual_seed(7)
    stored: Tensors = {}
    dense: Tensors = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        form = choose(stem) if name != stem else None
        if form is None:
            stored[name] = dense[name] = tensor
            continue
        held, dense[name] = form.encode(*tensor.shape)
        stored |= {f"{stem}.{key}": value for key, value in held.items()}
    return stored, dense
