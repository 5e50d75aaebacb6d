"""Packed integers and small floats as tensors: what most formats share. Exact, on any device."""

from __future__ import annotations

import torch

__all__ = ["FP4", "e8m0", "fp4", "unpack"]

#: values of the codes of e2m1, the 4-bit float of the Open Compute Project's MX formats, specification v1.0, 5.3.3
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def unpack(words: torch.Tensor, bits: int, dim: int = -1) -> torch.Tensor:
    """Unpacks unsigned integers from words, lowest bits first, values running on from word to word.

    Args:
        words: uint8 or int32 ``[..., n, ...]``.
        bits: of a value, 1 to 8; where they do not divide a word, a value may lie in two words.
        dim: the packed dimension.

    Returns:
        uint8 ``[..., n * word bits // bits, ...]``.
    """
    moved = words.movedim(dim, -1)
    # little-endian: the lowest bits come first; flat, since one word counts as contiguous whatever its stride
    octets = moved.reshape(-1).view(torch.uint8).view(*moved.shape[:-1], moved.shape[-1] * words.element_size())
    mask = (1 << bits) - 1
    if bits == 8:
        return octets.movedim(-1, dim)
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, device=words.device, dtype=torch.uint8)
        return ((octets.unsqueeze(-1) >> shifts) & mask).flatten(-2).movedim(-1, dim)
    count = octets.shape[-1] * 8 // bits
    starts = torch.arange(0, count * bits, bits, device=words.device)
    low, shift = starts // 8, (starts % 8).to(torch.int32)
    high = (low + 1).clamp(max=octets.shape[-1] - 1)
    pairs = octets[..., low].to(torch.int32) | (octets[..., high].to(torch.int32) << 8)
    return ((pairs >> shift) & mask).to(torch.uint8).movedim(-1, dim)


def fp4(codes: torch.Tensor) -> torch.Tensor:
    """Returns the float32 values of e2m1 codes 0 to 15."""
    table = torch.tensor(FP4, device=codes.device)
    return table[codes.to(torch.int64)]


def e8m0(scale: torch.Tensor) -> torch.Tensor:
    """Returns the float32 value ``2 ** (code - 127)`` of power-of-two scales, stored as uint8 or float8_e8m0fnu.

    Code 255 is NaN; code 0 is 2 ** -127, a subnormal of float32.
    """
    codes = scale.view(torch.uint8).to(torch.int32)
    values = torch.ldexp(torch.ones_like(codes, dtype=torch.float32), codes - 127)
    return torch.where(codes == 255, torch.full_like(values, float("nan")), values)
