"""What is under test: a method, the author's reference, and the layers and sizes to try them with."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, lcm
from typing import Any

import torch

from tpkit.layers import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from tpkit.layers.sharded import ShardedModule
from tpkit.params import LinearSpec, ParamSpec
from tpkit.quant import QuantMethod
from tpkit.testing.finding import Finding, guarded

__all__ = ["PRECISION", "Encoded", "Sizes", "Style", "Subject", "Tensors", "linear_spec"]

Tensors = dict[str, torch.Tensor]

#: how far an output in a lower dtype may be from the reference, over its largest value
PRECISION = {torch.bfloat16: 4e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Encoded:
    """Tensors as a checkpoint holds them for one linear, and the weight ``[out, in]`` that they mean (float64)."""

    stored: Tensors
    reference: torch.Tensor


@dataclass(frozen=True)
class Style:
    """A layer to try: its class, its sizes, and the parts that it is stored in.

    Attributes:
        name: for messages.
        layer: class of the layer.
        arguments: its sizes, by position.
        parts: name and rows of each segment.
        width: input features.
        apart: the parts are stored under their names; False: as one tensor.
        flags: keyword arguments of the layer.
        dtype: of the model.
    """

    name: str
    layer: type[ShardedModule]
    arguments: tuple[Any, ...]
    parts: tuple[tuple[str, int], ...]
    width: int
    apart: bool = False
    flags: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.parts)

    def build(
        self,
        method: QuantMethod,
        rank: int = 0,
        size: int = 1,
        *,
        bias: bool = False,
    ) -> ShardedModule:
        """Returns a rank's shard, unfilled."""
        settings: dict[str, Any] = dict(
            bias=bias, dtype=self.dtype, quant=method, tp_rank=rank, tp_size=size, **self.flags
        )
        return self.layer(*self.arguments, **settings)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes at which a method's words and blocks are both cut evenly and not.

    Attributes:
        wide, narrow: input features; the first divides well, the second does not.
        tall, short: output features likewise.
        few: as few output features as there may be.
        head: features of a head.
    """

    wide: int
    narrow: int
    tall: int
    short: int
    few: int
    head: int

    @classmethod
    def of(cls, specs: Mapping[str, ParamSpec], step_in: int, step_out: int) -> Sizes:
        """Chooses them so that every block and word occurs more than once, and a short one where that is allowed."""
        pers = {
            along: [1, *(dim.per for spec in specs.values() for dim in spec.dims if dim.along == along)]
            for along in ("in", "out", "flat")
        }
        most_in, most_out, flat = max(pers["in"]), max(pers["out"]), min(max(pers["flat"]), 1 << 16)
        area = 2.5 * flat if flat > 1 else 0  # elements of a weight that shows a flat block more than once
        few = step_out * ceil(7 / step_out)
        return cls(
            wide=_even(step_in, max(48, area / few), pers["in"]),
            narrow=_odd(step_in, max(23, 2.5 * most_in, area / few), most_in),
            tall=_even(step_out, 24, pers["out"]),
            short=_odd(step_out, max(17, 2.5 * most_out), most_out),
            few=few,
            head=_odd(step_out, max(5, 2 * most_out / 9), most_out),
        )


def _even(step: int, least: float, pers: Sequence[int]) -> int:
    """Returns an even number of steps, of words and of blocks."""
    unit = 2 * lcm(step, *pers)
    if unit > 4096:  # blocks that do not go together
        unit = 2 * lcm(step, max(pers))
    return unit * max(1, ceil(least / unit))


def _odd(step: int, least: float, per: int) -> int:
    """Returns an odd number of steps that, if it can, ends inside a block."""
    count = ceil(least / step) | 1
    if per > 1 and step % per and not (count * step) % per:
        count += 2
    return count * step


class Subject:
    """A method under test.

    Args:
        method: the instance.
        encode, decode: the author's; see `QuantConformance`.
        dtype, step_in, step_out, tolerance, resident, fused, optional, config, dtype_matters: see `QuantConformance`.
    """

    def __init__(
        self,
        method: QuantMethod,
        encode: Callable[[torch.Tensor], Tensors],
        decode: Callable[[Tensors, int, int], torch.Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        step_in: int = 1,
        step_out: int = 1,
        tolerance: float = 1e-5,
        resident: float = 1.35,
        fused: bool = True,
        optional: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        dtype_matters: bool = False,
    ) -> None:
        given: object = method  # an author's: checked, not believed
        if not isinstance(given, QuantMethod):
            raise Finding("method", f"`method` is {given!r}")
        self.method, self._encode, self._decode = method, encode, decode
        self.dtype, self.step_in, self.step_out = dtype, step_in, step_out
        self.tolerance, self.resident = tolerance, resident
        #: largest error of an output
        self.allowed = max(tolerance, PRECISION.get(dtype, 0.0))
        self.fused, self.optional, self.config = fused, tuple(optional), config
        self.dtype_matters = dtype_matters
        self._encoded: dict[tuple[int, int, int], Encoded] = {}
        #: one whole tensor on one rank is computed right; None: not tried yet
        self.sound: bool | None = None

    # the author's reference

    def encoded(self, rows: int, width: int, seed: int = 0) -> Encoded:
        """Returns an example of a size; a seed gives the same one each time, and each seed another magnitude."""
        key = (rows, width, seed)
        if key not in self._encoded:
            weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * (0.5 + seed)
            with torch.random.fork_rng(devices=[]), guarded("reference", f"encode() of a weight {[rows, width]}"):
                torch.manual_seed(seed)
                given: object = self._encode(weight)
                if not isinstance(given, dict) or not all(isinstance(t, torch.Tensor) for t in given.values()):
                    raise Finding("reference", f"encode() returned {type(given).__name__}, not a dict of tensors")
            stored = {str(name): tensor.detach().contiguous() for name, tensor in given.items()}
            self._encoded[key] = Encoded(stored, self.decoded(stored, rows, width))
        return self._encoded[key]

    def decoded(self, stored: Tensors, rows: int, width: int) -> torch.Tensor:
        """Returns what the author says stored tensors mean."""
        given = {name: tensor.clone() for name, tensor in stored.items()}
        with guarded("reference", f"decode() of {[rows, width]}"):
            made: object = self._decode(given, rows, width)
        if not isinstance(made, torch.Tensor) or made.shape != (rows, width):
            shape = list(made.shape) if isinstance(made, torch.Tensor) else type(made).__name__
            raise Finding("reference", f"decode() returned {shape} for a weight {[rows, width]}")
        reference = made.detach().to(torch.float64)
        if not bool(reference.isfinite().all()) or not bool(reference.any()):
            raise Finding("reference", f"decode() of {[rows, width]} is not finite, or all zero: it would show nothing")
        return reference

    def tensors(self, style: Style, seed: int = 0) -> Tensors:
        """Returns a whole layer's tensors by name on disk."""
        if not style.apart:
            return dict(self.encoded(style.rows, style.width, seed).stored)
        return {
            f"{part}.{name}": tensor
            for number, (part, rows) in enumerate(style.parts)
            for name, tensor in self.encoded(rows, style.width, seed + number).stored.items()
        }

    def references(self, style: Style, seed: int = 0) -> list[torch.Tensor]:
        """Returns the weight of each part."""
        if not style.apart:
            whole = self.encoded(style.rows, style.width, seed).reference
            return list(whole.split([rows for _, rows in style.parts]))
        return [
            self.encoded(rows, style.width, seed + number).reference for number, (_, rows) in enumerate(style.parts)
        ]

    # layers

    def _style(
        self,
        name: str,
        layer: type[ShardedModule],
        arguments: tuple[Any, ...],
        parts: tuple[tuple[str, int], ...],
        width: int,
        apart: bool = False,
        flags: Mapping[str, Any] | None = None,
    ) -> Style:
        return Style(name, layer, arguments, parts, width, apart, flags or {}, self.dtype)

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes to try."""
        width, rows = (step * ceil(256 / step) for step in (self.step_in, self.step_out))
        return Sizes.of(self.declared(linear_spec(rows, width)), self.step_in, self.step_out)

    def declared(self, linear: LinearSpec) -> dict[str, ParamSpec]:
        """Returns the checked answer of create_weights."""
        with guarded("create-weights", f"create_weights of {linear.out_features} x {linear.in_features}"):
            return dict(self.method.parameters(linear, False))

    @cached_property
    def plain(self) -> Style:
        """One tensor, whole words and blocks."""
        return self.column(self.sizes.tall, self.sizes.wide)

    @cached_property
    def ragged(self) -> Style:
        """One tensor whose sizes divide badly."""
        return self.column(self.sizes.short, self.sizes.narrow)

    def column(self, rows: int, width: int) -> Style:
        return self._style(f"column {width} -> {rows}", ColumnParallelLinear, (width, rows), (("", rows),), width)

    def row(self, rows: int, width: int) -> Style:
        flags = {"reduce_results": False}
        return self._style(
            f"row {width} -> {rows}", RowParallelLinear, (width, rows), (("", rows),), width, flags=flags
        )

    def merged(self, rows: Sequence[int], width: int, *, apart: bool) -> Style:
        parts = tuple(zip(("gate_proj", "up_proj"), rows, strict=True))
        name = f"merged {width} -> {list(rows)}, stored {'apart' if apart else 'fused'}"
        return self._style(name, MergedColumnParallelLinear, (width, list(rows)), parts, width, apart)

    def qkv(self, heads: int, kv_heads: int, width: int, *, apart: bool) -> Style:
        dim = self.sizes.head
        parts = (("q_proj", heads * dim), ("k_proj", kv_heads * dim), ("v_proj", kv_heads * dim))
        name = f"qkv {width} -> {heads}/{kv_heads} heads of {dim}, stored {'apart' if apart else 'fused'}"
        return self._style(name, QKVParallelLinear, (width, dim, heads, kv_heads), parts, width, apart)

    def head(self, rows: int, width: int) -> Style:
        flags = {"gather_output": False}
        return self._style(f"head {width} -> {rows}", ParallelLMHead, (rows, width), (("", rows),), width, flags=flags)

    def embedding(self, rows: int, width: int) -> Style:
        return self._style(f"embedding {rows} x {width}", VocabParallelEmbedding, (rows, width), (("", rows),), width)

    # methods

    def twin(self) -> QuantMethod:
        """Returns a copy of the method, as a spawned process gets it if it can be pickled."""
        try:
            made: QuantMethod = pickle.loads(pickle.dumps(self.method))
        except Exception:
            return copy.copy(self.method)
        return made

    def variants(self) -> list[QuantMethod]:
        """Returns the method, and if it has kernels one that has to do without."""
        if not self.method.kernels:
            return [self.method]
        without = self.twin()
        vars(without)["kernels"] = ()  # of this instance alone
        return [self.method, without]


def linear_spec(
    rows: int | Sequence[int], width: int, *, dtype: str = "float32", embedding: bool = False, **stored: Any
) -> LinearSpec:
    """Returns a projection as a method sees it."""
    sizes = [rows] if isinstance(rows, int) else list(rows)
    names = [""] if len(sizes) == 1 else list("qkv"[: len(sizes)])
    segments = tuple(zip(names, sizes, strict=True))
    return LinearSpec(name="kit.proj", in_features=width, segments=segments, dtype=dtype, embedding=embedding, **stored)
