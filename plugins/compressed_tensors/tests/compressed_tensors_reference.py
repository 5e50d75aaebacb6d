"""What the stored tensors of a linear mean, bit by bit and number by number: nothing here is the plugin's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def pack(values: torch.Tensor, bits: int, free: bool = False) -> torch.Tensor:
    """Packs unsigned values of each row into words of 32 bits: in one run, or with what does not fit left free."""
    rows = []
    for row in values.tolist():
        per = 32 // bits if free else len(row)
        words = b""
        for start in range(0, len(row), per):
            run = row[start : start + per]
            number = sum(value << (bits * place) for place, value in enumerate(run))
            words += number.to_bytes(4 * -(-len(run) * bits // 32), "little")
        rows.append(np.frombuffer(words, dtype="<i4"))
    return torch.from_numpy(np.stack(rows).astype(np.int32))


def unpack(words: torch.Tensor, bits: int, count: int, free: bool = False) -> torch.Tensor:
    """Takes the first `count` unsigned values out of each row."""
    rows = []
    for row in words.numpy().astype("<i4"):
        pieces = [word.tobytes() for word in row] if free else [row.tobytes()]
        per = 32 // bits if free else count
        numbers = [int.from_bytes(piece, "little") for piece in pieces]
        rows.append([(n >> (bits * place)) & ((1 << bits) - 1) for n in numbers for place in range(per)][:count])
    return torch.tensor(rows)


class Linear:
    """Makes and decodes linears of one scheme.

    Args:
        weights: of the scheme, as in a config_groups entry.
        form: the format.
        free: words have free bits.
    """

    def __init__(self, weights: dict[str, Any], form: str, free: bool = False) -> None:
        self.bits, self.strategy = weights["num_bits"], weights["strategy"]
        self.symmetric = weights.get("symmetric", True)
        self.group, self.block = weights.get("group_size"), weights.get("block_structure")
        self.ordered = weights.get("actorder") == "group"
        self.float, self.form, self.free = weights["type"] == "float", form, free

    def scale_shape(self, out: int, in_: int) -> tuple[int, ...]:
        if self.strategy == "block":
            return -(-out // self.block[0]), -(-in_ // self.block[1])
        return {"tensor": (1,), "channel": (out, 1)}.get(self.strategy) or (out, -(-in_ // self.group))

    def encode(self, weight: torch.Tensor) -> Tensors:
        """Any values will do: what they mean is asked."""
        out, in_ = weight.shape
        shape, top = self.scale_shape(out, in_), 1 << self.bits
        made: Tensors = {"weight_scale": torch.rand(shape) * weight.abs().max() + 0.1}
        zeros = torch.randint(0, top, shape)
        if self.form.startswith("mx"):
            made["weight_scale"] = torch.randint(120, 130, shape, dtype=torch.uint8)
        if self.form == "nvfp4-pack-quantized":
            made["weight_scale"] = (made["weight_scale"] * 50).to(torch.float8_e4m3fn)
            made["weight_global_scale"] = torch.rand(1) * 100 + 50
            made["input_global_scale"] = torch.rand(1)
        if self.form == "pack-quantized":
            made["weight_packed"] = pack(torch.randint(0, top, (out, in_)), self.bits, self.free)
            made["weight_shape"] = torch.tensor([out, in_])
            if not self.symmetric:
                made["weight_zero_point"] = pack(zeros.t(), self.bits, self.free).t().contiguous()
            if self.ordered:
                made["weight_g_idx"] = torch.randperm(in_, dtype=torch.int32) // self.group
            return made
        if self.float and self.bits == 4:
            made["weight_packed"] = torch.randint(0, 256, (out, in_ // 2), dtype=torch.uint8)
        elif self.float:
            made["weight"] = (torch.randn(out, in_) * 20).to(torch.float8_e4m3fn)
        else:
            made["weight"] = torch.randint(-top // 2, top // 2, (out, in_), dtype=torch.int8)
            if not self.symmetric:
                made["weight_zero_point"] = (zeros - top // 2).to(torch.int8)
            made["input_scale"], made["input_zero_point"] = torch.rand(1), torch.zeros(1, dtype=torch.int8)
        return made

    def decode(self, stored: Tensors, out: int, in_: int) -> torch.Tensor:
        scale = stored["weight_scale"]
        scale = torch.exp2(scale.float() - 127) if self.form.startswith("mx") else scale.float()
        if self.form == "nvfp4-pack-quantized":
            scale = scale / stored["weight_global_scale"]
        return self.values(stored, out, in_) * self.each(scale, stored, out, in_)

    def values(self, stored: Tensors, out: int, in_: int) -> torch.Tensor:
        if self.form == "pack-quantized":
            codes = unpack(stored["weight_packed"], self.bits, in_, self.free)
            zeros: Any = 1 << (self.bits - 1)
            if not self.symmetric:
                zeros = unpack(stored["weight_zero_point"].t(), self.bits, out, self.free).t()
                zeros = self.each(zeros, stored, out, in_)
            return (codes - zeros).float()
        if self.float and self.bits == 4:
            table = torch.tensor(E2M1 + [-value for value in E2M1])
            both = stored["weight_packed"].long()
            return torch.stack([table[both % 16], table[both // 16]], 2).flatten(1)
        weight = stored["weight"].float()
        return weight if self.symmetric else weight - self.each(stored["weight_zero_point"].float(), stored, out, in_)

    def each(self, shared: torch.Tensor, stored: Tensors, out: int, in_: int) -> torch.Tensor:
        """Gives every weight its own."""
        rows, columns = torch.arange(out), torch.arange(in_)
        if self.strategy in ("tensor", "channel"):
            return shared.reshape(-1, 1).expand(out, in_)
        if self.strategy == "block":
            return shared[rows // self.block[0]][:, columns // self.block[1]]
        return shared[:, stored["weight_g_idx"].long() if self.ordered else columns // self.group]
