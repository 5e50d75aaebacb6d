"""The contract of quant methods, tried by four that store weights in different ways and never see a rank.

Every rank's output equals its part of what the decoded whole computes, wherever the cuts fall.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tpkit.layers import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from tpkit.layers.parallel import ParallelLinear
from tpkit.params import Flat, In, LinearSpec, Out, ParamSpec, Segment
from tpkit.quant import QuantMethod


class Blocks(QuantMethod):
    """Integers, and one scale for each block of 4 outputs and 6 inputs."""

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        scale = ParamSpec(torch.float32, dims=(Out(block=4), In(block=6)))
        return {"weight": ParamSpec(torch.int8, dims=(Out(), In())), "scale": scale}

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return nn.functional.linear(x, layer.weight * layer.expand("scale"), bias)

    @staticmethod
    def decode(stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        scale = stored["scale"].repeat_interleave(4, 0)[:out].repeat_interleave(6, 1)[:, :in_]
        return stored["weight"] * scale

    @staticmethod
    def encode(out: int, in_: int) -> dict[str, torch.Tensor]:
        return {
            "weight": torch.randint(-9, 9, (out, in_), dtype=torch.int8),
            "scale": torch.rand(-(-out // 4), -(-in_ // 6)),
        }


class Words(QuantMethod):
    """Eight 4-bit values in a word along the input, one scale for each group of 6 inputs."""

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        scales = ParamSpec(torch.float32, dims=(In(block=6), Out()))
        return {"qweight": ParamSpec(torch.int32, dims=(In(pack=8), Out())), "scales": scales}

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        values = layer.trim("qweight", _unpack(layer.qweight)) * layer.expand("scales")
        return nn.functional.linear(x, values.t(), bias)

    @staticmethod
    def decode(stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        return (_unpack(stored["qweight"])[:in_] * stored["scales"].repeat_interleave(6, 0)[:in_]).t()

    @staticmethod
    def encode(out: int, in_: int) -> dict[str, torch.Tensor]:
        words = torch.randint(-(2**31), 2**31, (-(-in_ // 8), out), dtype=torch.int64).to(torch.int32)
        return {"qweight": words, "scales": torch.rand(-(-in_ // 6), out)}


def _unpack(words: torch.Tensor) -> torch.Tensor:
    wide = words.to(torch.int64).unsqueeze(1)
    return ((wide >> (4 * torch.arange(8).view(1, 8, 1))) & 15).flatten(0, 1).float() - 8


class Flattened(QuantMethod):
    """Two values in a byte and a scale for 5 of them, along the flattened weight: blocks run on from row to row."""

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        absmax = ParamSpec(torch.float32, dims=(Flat(block=5),))
        return {"weight": ParamSpec(torch.uint8, dims=(Flat(pack=2),)), "absmax": absmax}

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        values = layer.trim("weight", _nibbles(layer.weight)) * layer.expand("absmax")
        return nn.functional.linear(x, values.view(layer.out_features, layer.in_features), bias)

    @staticmethod
    def decode(stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        values = _nibbles(stored["weight"])[: out * in_] * stored["absmax"].repeat_interleave(5)[: out * in_]
        return values.view(out, in_)

    @staticmethod
    def encode(out: int, in_: int) -> dict[str, torch.Tensor]:
        count = out * in_
        codes = torch.randint(0, 256, (-(-count // 2),), dtype=torch.uint8)
        return {"weight": codes, "absmax": torch.rand(-(-count // 5))}


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack([codes >> 4, codes & 15], 1).flatten().float() - 8


class PerPart(QuantMethod):
    """One scale for each of q, k and v; never a common one."""

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        return {
            "weight": ParamSpec(torch.int8, dims=(Out(), In())),
            "scale": ParamSpec(torch.float32, dims=(Segment(),)),
        }

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        scale = layer.scale[layer.segment_of_row()].unsqueeze(1)
        return nn.functional.linear(x, layer.weight * scale, bias)

    @staticmethod
    def decode(stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        return stored["weight"] * stored["scale"]

    @staticmethod
    def encode(out: int, in_: int) -> dict[str, torch.Tensor]:
        return {"weight": torch.randint(-9, 9, (out, in_), dtype=torch.int8), "scale": torch.rand(()) + 0.5}


METHODS = [Blocks, Words, Flattened, PerPart]


def _outputs(layers: list[ParallelLinear], x: torch.Tensor) -> list[torch.Tensor]:
    """Puts the ranks' outputs together by segment; a replicated part must be the same wherever it is held."""
    spec = layers[0].sharded.layer.spec
    wholes = [torch.full((*x.shape[:-1], part.size), float("nan")) for part in spec.out]
    for rank, layer in enumerate(layers):
        bounds = layer.sharded.layer.bounds(spec.out, rank)
        for whole, (start, stop), y in zip(wholes, bounds, layer(x).split(layer.out_sizes, -1), strict=True):
            held = whole[..., start:stop]
            assert held.isnan().all() or torch.allclose(held, y, atol=1e-5)
            whole[..., start:stop] = y
    return wholes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("in_", [24, 17])
def test_column(method: Any, size: int, in_: int) -> None:
    torch.manual_seed(0)
    stored, x = method.encode(22, in_), torch.randn(3, in_)
    layers = [ColumnParallelLinear(in_, 22, bias=False, quant=method(), tp_rank=r, tp_size=size) for r in range(size)]
    for layer in layers:
        layer.load(stored)
    torch.testing.assert_close(_outputs(layers, x), [x @ method.decode(stored, 22, in_).t()])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("in_", [48, 23])
def test_row(method: Any, size: int, in_: int) -> None:
    torch.manual_seed(0)
    stored, x = method.encode(7, in_), torch.randn(3, in_)
    total = torch.zeros(3, 7)
    for rank in range(size):
        layer = RowParallelLinear(
            in_,
            7,
            bias=False,
            quant=method(),
            reduce_results=False,
            input_is_parallel=False,
            tp_rank=rank,
            tp_size=size,
        )
        layer.load(stored)
        total += layer(x)
    torch.testing.assert_close(total, x @ method.decode(stored, 7, in_).t())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize(("heads", "kv", "dim"), [(9, 3, 5), (4, 1, 8), (4, 2, 6)])
def test_packed_parts_stored_apart(method: Any, size: int, heads: int, kv: int, dim: int) -> None:
    torch.manual_seed(0)
    parts = {name: (method.encode(n * dim, 19), n * dim) for name, n in zip("qkv", (heads, kv, kv), strict=True)}
    tensors = {f"{name}_proj.{key}": t for name, (stored, _) in parts.items() for key, t in stored.items()}
    x = torch.randn(2, 19)
    layers = [
        QKVParallelLinear(19, dim, heads, kv, bias=False, quant=method(), tp_rank=r, tp_size=size) for r in range(size)
    ]
    for layer in layers:
        layer.load(tensors)
    wanted = [x @ method.decode(stored, rows, 19).t() for stored, rows in parts.values()]
    torch.testing.assert_close(_outputs(layers, x), wanted)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 9])
def test_packed_parts_fused_on_disk_share_one_grid_of_blocks(method: Any, size: int) -> None:
    torch.manual_seed(0)
    stored, x = method.encode(26, 19), torch.randn(2, 19)
    layers = [
        MergedColumnParallelLinear(19, [13, 13], bias=False, quant=method(), tp_rank=r, tp_size=size)
        for r in range(size)
    ]
    for layer in layers:
        layer.load(stored)
    whole = x @ method.decode(stored, 26, 19).t()
    torch.testing.assert_close(_outputs(layers, x), list(whole.split(13, -1)))


def test_cuts_fall_on_groups_where_that_is_fair_and_then_nothing_has_to_be_expanded_element_by_element() -> None:
    even = [
        RowParallelLinear(48, 7, bias=False, quant=Words(), tp_rank=r, tp_size=2, reduce_results=False) for r in (0, 1)
    ]
    assert [layer.in_features for layer in even] == [24, 24]  # the least common multiple of 8 and 6
    assert all(layer.aligned("qweight") and layer.aligned("scales") for layer in even)
    odd = RowParallelLinear(23, 7, bias=False, quant=Words(), tp_rank=1, tp_size=5, reduce_results=False)
    assert not odd.aligned("qweight")
