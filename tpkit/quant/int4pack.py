"""PyTorch's CPU kernel for 4-bit weights in groups, for models in bfloat16. Shared by the methods that it serves.

It computes ``(code - 8) * scale`` in bfloat16 and adds up in float32, as a bfloat16 product of the decoded weight does;
so a method may use it where its scales are bfloat16 as stored, and its zero point is 8: nothing is rounded that
dequantising would not round. https://github.com/pytorch/pytorch, aten/src/ATen/native/cpu/int4mm_kernel.cpp
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn.functional import linear, pad

from tpkit.quant.base import Kernel

__all__ = ["GROUPS", "INT4PACK", "dequantize", "multiply", "pack", "prefers_gemm"]

#: what a method offers in `kernels`, with its group size as `in_multiple`. It packs 64 outputs at a time: from 320 on
#: what it pads stays within what a kernel's packing may cost
INT4PACK = Kernel(name="int4pack", devices=("cpu",), dtypes=("bfloat16",), out_minimum=320)
#: inputs that share a scale, of which it takes one
GROUPS = (32, 64, 128, 256)
#: outputs that its packing takes at a time, on any CPU
ROWS = 64


def pack(layer: Any, codes: torch.Tensor, scale: torch.Tensor) -> bool:
    """Repacks a layer's weight: holds ``packed`` and ``scales_and_zeros``, if this CPU packs in a way that can be read.

    Args:
        layer: the layer.
        codes: ``[out, groups * group size]``, 0 to 15; what a short last group lacks is 8.
        scale: ``[out, groups]`` bfloat16.

    Returns:
        whether it did; if not, nothing was changed.
    """
    rows = -len(codes) % ROWS
    words = pad(codes.to(torch.int32), (0, 0, 0, rows), value=8)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(words, 1)
    for half in (ROWS // 2, ROWS // 4):  # 512-bit and 256-bit vectors
        seen = packed.view(-1, words.shape[1], half)
        if torch.equal(_unpacked(seen), words.to(torch.uint8)):
            scales = pad(scale.t(), (0, rows)).unsqueeze(2)
            layer.hold("packed", seen)
            layer.hold("scales_and_zeros", torch.cat([scales, torch.zeros_like(scales)], 2).contiguous())
            return True
    return False


def dequantize(layer: Any, group: int) -> torch.Tensor:
    """Returns the weight of a packed layer, float32 ``[out, in]``."""
    scale = layer.scales_and_zeros[:, : layer.out_features, 0].t().float()
    each = scale.repeat_interleave(group, 1)[:, : layer.in_features]
    codes = _unpacked(layer.packed)[: layer.out_features, : layer.in_features]
    return codes.float().sub_(8).mul_(each)


def multiply(layer: Any, x: torch.Tensor, bias: torch.Tensor | None, group: int) -> torch.Tensor:
    """Returns ``x @ W.T (+ bias)`` for a packed layer, by whichever way this CPU is quick at for so many rows.

    Args:
        layer: the layer.
        x: ``[..., in]``.
        bias: ``[out]``.
        group: inputs that share a scale.
    """
    rows = x.numel() // max(x.shape[-1], 1)
    graded = x.requires_grad and torch.is_grad_enabled()  # the kernel has no derivative
    if x.dtype != torch.bfloat16 or not rows or graded or prefers_gemm(rows):
        return linear(x, dequantize(layer, group).to(x.dtype), bias)
    if rows >= 128:  # without instructions for bfloat16 its GEMM is the slowest of the three
        return linear(x.float(), dequantize(layer, group), None if bias is None else bias.float()).to(x.dtype)
    scales = layer.scales_and_zeros
    flat = pad(x.reshape(rows, -1), (0, len(scales) * group - x.shape[-1])).contiguous()
    packed = layer.packed.view(scales.shape[1], -1)
    y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, packed, group, scales)
    y = y[:, : layer.out_features].reshape(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def prefers_gemm(rows: int) -> bool:
    """Says whether this CPU is quicker with a decoded weight: from 16 rows on, if it has instructions for bfloat16."""
    return rows >= 16 and _has_bfloat16()


@cache
def _has_bfloat16() -> bool:
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is not None and bool(supported())


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Returns codes ``[out, in]`` uint8 of ``[blocks, in, half]``: a byte has a row, and the row `half` further on."""
    blocks, width, half = packed.shape
    octets = packed.transpose(1, 2).contiguous()
    return torch.stack([octets & 15, octets >> 4], 1).view(blocks * 2 * half, width)
