"""PyTorch's CPU kernel for int8 weights with a scale for each output, for models in bfloat16.

It adds up products of bfloat16 and int8, both exact, in float32; the scale is applied to the result. So nothing of the
weight is rounded at all, where dequantising rounds it to bfloat16. The weight needs no repacking.
https://github.com/pytorch/pytorch, aten/src/ATen/native/cpu/int8mm_kernel.cpp
"""

from __future__ import annotations

import torch

from tpkit.quant.base import Kernel
from tpkit.quant.int4pack import prefers_gemm

__all__ = ["INT8PACK", "multiply"]

#: what a method offers in `kernels`; other widths are read past their end, on CPUs with 512-bit vectors up to 32 inputs
INT8PACK = Kernel(name="int8pack", devices=("cpu",), dtypes=("bfloat16",), in_multiple=32, whole=False)


def multiply(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """Returns ``x @ (codes * scale).T (+ bias)``, or None where dequantising is quicker or another type is asked for.

    Args:
        x: ``[..., in]``.
        codes: int8 ``[out, in]``.
        scale: float ``[out]``.
        bias: ``[out]``.
    """
    rows = x.numel() // max(x.shape[-1], 1)
    if x.dtype != torch.bfloat16 or not rows or prefers_gemm(rows) or (x.requires_grad and torch.is_grad_enabled()):
        return None
    flat, ones = x.reshape(rows, -1).contiguous(), torch.ones_like(scale, dtype=torch.bfloat16)
    y = torch.ops.aten._weight_int8pack_mm(flat, codes, ones).float() * scale
    y = y if bias is None else y + bias
    found: torch.Tensor = y.to(torch.bfloat16).reshape(*x.shape[:-1], -1)
    return found
