"""From GGUF's blocks to float32, on any device. Layouts: ggml's block structs, https://github.com/ggml-org/ggml.

Every function takes blocks ``[..., bytes]`` of one type and returns their values ``[..., elements]``. The order of
multiplications is ggml's, so that values agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tpkit.quant.codes import fp4, unpack
from tpkit_gguf.types import BLOCKS

__all__ = ["decode"]

#: elements decoded at a time; bounds what steps in between take
_AT_ONCE = 1 << 21


def decode(octets: torch.Tensor, encoding: str) -> torch.Tensor:
    """Decodes rows of whole blocks.

    Args:
        octets: uint8 ``[rows, blocks * bytes of a block]``.
        encoding: the block type, e.g. ``Q4_K``.

    Returns:
        float32 ``[rows, blocks * elements of a block]``.
    """
    per, size = BLOCKS[encoding]
    rows, blocks = octets.shape[0], octets.shape[1] // size
    values = torch.empty(rows, blocks * per, dtype=torch.float32, device=octets.device)
    if values.numel():
        step = max(1, _AT_ONCE // values.shape[1])
        for at in range(0, rows, step):
            piece = octets[at : at + step].reshape(-1, blocks, size)
            values[at : at + step] = _DECODERS[encoding](piece).flatten(-2)
    return values


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Returns the float16 at a byte of every block as float32 ``[..., 1]``."""
    octets = blocks[..., at : at + 2].clone(memory_format=torch.contiguous_format)
    return octets.view(torch.float16).to(torch.float32)


def _planes(octets: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Unpacks values that lie `bits` wide in bytes: of each run of bytes first all lowest values, then the next."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=octets.device).unsqueeze(-1)
    runs = octets.reshape(*octets.shape[:-1], octets.shape[-1] // run, 1, run)
    return ((runs >> shifts) & ((1 << bits) - 1)).flatten(-3)


def _grouped(values: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
    """Returns ``scale * value (- offset)`` for values of groups that share a scale."""
    groups = values.to(torch.float32).view(*scale.shape, values.shape[-1] // scale.shape[-1])
    scaled = scale.unsqueeze(-1) * groups
    return (scaled if offset is None else scaled - offset.unsqueeze(-1)).flatten(-2)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_planes(blocks[..., 2:], 4, 16).to(torch.float32) - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _planes(blocks[..., 4:], 4, 16).to(torch.float32) + _half(blocks, 2)


def _five_bits(octets: torch.Tensor) -> torch.Tensor:
    """Joins 4 bytes of high bits and 16 of low nibbles."""
    return (_planes(octets[..., 4:], 4, 16) | (unpack(octets[..., :4], 1) << 4)).to(torch.float32)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_five_bits(blocks[..., 2:]) - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _five_bits(blocks[..., 4:]) + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[..., 2:].view(torch.int8).to(torch.float32)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    # ggml doubles the values and halves the scale: 2 ** -128 still is a float32
    exponents = blocks[..., :1].to(torch.int32) - 128
    scale = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return scale * (2 * fp4(_planes(blocks[..., 1:], 4, 16)))


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = blocks[..., :16]
    scale = _half(blocks, 80) * (scales & 15).to(torch.float32)
    offset = _half(blocks, 82) * (scales >> 4).to(torch.float32)
    return _grouped(_planes(blocks[..., 16:80], 2, 32), scale, offset)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = _planes(blocks[..., 96:104], 4, 8) | (_planes(blocks[..., 104:108], 2, 4) << 4)
    scale = _half(blocks, 108) * (scales.to(torch.float32) - 32)
    values = _planes(blocks[..., 32:96], 2, 32) | (_planes(blocks[..., :32], 1, 32) << 2)
    return _grouped(values.to(torch.float32) - 4, scale)  # a set high bit means: nothing taken away


def _scales_and_offsets(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scales and offsets of the 8 groups of Q4_K and Q5_K: 6 bits each, in bytes 4 to 16."""
    first, second, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([first & 63, (rest & 15) | ((first >> 6) << 4)], -1)
    offsets = torch.cat([second & 63, (rest >> 4) | ((second >> 6) << 4)], -1)
    return _half(blocks, 0) * scales.to(torch.float32), _half(blocks, 2) * offsets.to(torch.float32)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _grouped(_planes(blocks[..., 16:], 4, 32), *_scales_and_offsets(blocks))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    values = _planes(blocks[..., 48:], 4, 32) | (_planes(blocks[..., 16:48], 1, 32) << 4)
    return _grouped(values, *_scales_and_offsets(blocks))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    scale = _half(blocks, 208) * blocks[..., 192:208].view(torch.int8).to(torch.float32)
    values = _planes(blocks[..., :128], 4, 64) | (_planes(blocks[..., 128:192], 2, 32) << 4)
    return _grouped(values.to(torch.float32) - 32, scale)


_DECODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "MXFP4": _mxfp4,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
