"""Projections divided over ranks. Usable alone: no description and no process group are needed.

layer = ColumnParallelLinear(64, 256, bias=False, tp_rank=0, tp_size=3)
layer.load({"weight": full_weight})        # keeps this rank's rows
y = layer(x)                               # [..., 86]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tpkit.distributed.group import TensorParallel
from tpkit.errors import UsageError
from tpkit.layers.sharded import Setting, Sharded, ShardedModule, sharded_alone
from tpkit.layout import apart, fused
from tpkit.partition import Axis, Features

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "ParallelLinear",
    "QKVParallelLinear",
    "ReplicatedLinear",
    "RowParallelLinear",
]


class ParallelLinear(ShardedModule):
    """A projection on one rank: computes its shard, then does what its style ends with. Use one of the classes below.

    Args:
        sharded: the shard.
        tp: this rank's place.
        gather_output: give the whole output on every rank, not this rank's features.
        input_is_parallel: the input already is this rank's features (False: it is whole, and cut here).
        reduce_results: add the ranks' partial results.
        skip_bias_add: return ``(output, bias)`` and leave the adding to the caller.
        scale: multiplies the output.
        softcap: the output becomes ``softcap * tanh(output / softcap)``.
        tied: a module whose parameters it shares.
    """

    def __init__(
        self,
        sharded: Sharded,
        tp: TensorParallel,
        *,
        gather_output: bool = False,
        input_is_parallel: bool = True,
        reduce_results: bool = True,
        skip_bias_add: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        tied: ShardedModule | None = None,
    ) -> None:
        super().__init__(sharded, tp, tied=tied)
        self.gather_output = gather_output
        self.input_is_parallel = input_is_parallel
        self.reduce_results = reduce_results
        self.skip_bias_add = skip_bias_add
        self.scale, self.softcap = scale, softcap
        if self.in_divided and not reduce_results and self.bias is not None and not skip_bias_add:
            raise UsageError(
                f"{self._name()}: reduce_results=False with a bias that each of {tp.size} ranks would add",
                hint="use skip_bias_add=True and add the returned bias once, after reducing",
            )

    @classmethod
    def of(cls, sharded: Sharded, tp: TensorParallel, **flags: Any) -> Self:
        """Returns a projection for a shard that is divided already."""
        made = cls.__new__(cls)
        ParallelLinear.__init__(made, sharded, tp, **flags)
        return made

    def _name(self) -> str:
        return self.sharded.layer.spec.path or type(self).__name__

    def forward(self, x: torch.Tensor) -> Any:
        """Multiplies.

        Args:
            x: ``[..., in]``; this rank's features of a divided input, unless `input_is_parallel` is False.

        Returns:
            ``[..., out]``, this rank's features of a divided output unless `gather_output`; with `skip_bias_add`
            a tuple of that and the bias (or None).
        """
        if self.in_divided and not self.input_is_parallel:
            x = self._own_input(x)
        reduces = self.in_divided and self.reduce_results
        fuse = self.bias if not self.skip_bias_add and not self.in_divided else None
        y = self._multiply(x, fuse)
        if reduces:
            y = self.tp.all_reduce(y)
        gathers = self.gather_output and self.out_divided
        if gathers:
            y = self._gather(y)
        if self.skip_bias_add:
            bias = self._gather(self.bias) if gathers and self.bias is not None else self.bias
            return self._finish(y), bias
        if self.bias is not None and fuse is None:
            y = y + self.bias  # after the reduction: once, not once per rank
        return self._finish(y)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[-1] != self.in_features:
            raise UsageError(
                f"{self._name()}: rank {self.tp.rank} of {self.tp.size} computes with {self.in_features} input "
                f"features, the input has {x.shape[-1]}"
            )
        if self.in_features == 0 or self.out_features == 0:
            return x.new_zeros(*x.shape[:-1], self.out_features)  # an empty shard still meets the other ranks
        assert self.quant_method is not None  # noqa: S101 - every projection has one
        return self.quant_method.apply(self, x, bias)

    def _finish(self, y: torch.Tensor) -> torch.Tensor:
        if self.scale is not None:
            y = y * self.scale
        if self.softcap is not None:
            y = torch.tanh(y / self.softcap) * self.softcap
        return y

    def _own_input(self, x: torch.Tensor) -> torch.Tensor:
        layer, offset, pieces = self.sharded.layer, 0, []
        for part, (start, stop) in zip(layer.spec.in_, layer.bounds(layer.spec.in_, self.tp.rank), strict=True):
            pieces.append(x[..., offset + start : offset + stop])
            offset += part.size
        if x.shape[-1] != offset:
            raise UsageError(f"{self._name()}: the whole input has {offset} features, this one has {x.shape[-1]}")
        return torch.cat(pieces, dim=-1) if len(pieces) > 1 else pieces[0]

    def _gather(self, y: torch.Tensor) -> torch.Tensor:
        """Puts the ranks' features together in the logical order: by segment, each kv head once."""
        layer = self.sharded.layer
        out, ranks = layer.spec.out, range(self.tp.size)
        sizes = [layer.sizes(out, rank) for rank in ranks]
        whole = self.tp.all_gather_last(y, [sum(row) for row in sizes])
        pieces = []
        for number in range(len(out)):
            reached = 0
            for rank in ranks:
                start, stop = layer.bounds(out, rank)[number]
                if stop > reached:  # an earlier rank's replica holds the rest
                    at = sum(map(sum, sizes[:rank])) + sum(sizes[rank][:number])
                    pieces.append((at + reached - start, at + stop - start))
                    reached = stop
        if [a for a, _ in pieces[1:]] == [b for _, b in pieces[:-1]]:
            return whole
        return torch.cat([whole[..., a:b] for a, b in pieces], dim=-1)


def _side(name: str, axis: str, size: int, setting: Setting) -> Features:
    return Features(name=name, axis=Axis(name=axis, units=size, divided=not setting.disable_tp))


class ReplicatedLinear(ParallelLinear):
    """A projection that every rank holds and computes whole. See `Setting` for the keyword arguments.

    Args:
        input_size, output_size: features.
        skip_bias_add: return ``(output, bias)``.
    """

    def __init__(self, input_size: int, output_size: int, *, skip_bias_add: bool = False, **setting: Any) -> None:
        how = Setting(**setting)
        out, in_ = (Features(name="", unit=output_size),), (Features(name="", unit=input_size),)
        super().__init__(sharded_alone(how, out, in_, (fused("", out),)), how.place, skip_bias_add=skip_bias_add)


class ColumnParallelLinear(ParallelLinear):
    """A projection whose output features are divided over ranks. See `Setting` for the keyword arguments.

    Args:
        input_size, output_size: features of the whole projection.
        gather_output: give the whole output on every rank.
        skip_bias_add: return ``(output, bias)``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        **setting: Any,
    ) -> None:
        how = Setting(**setting)
        out, in_ = (_side("", "out", output_size, how),), (Features(name="", unit=input_size),)
        sharded = sharded_alone(how, out, in_, (fused("", out),))
        super().__init__(sharded, how.place, gather_output=gather_output, skip_bias_add=skip_bias_add)


class MergedColumnParallelLinear(ParallelLinear):
    """Several column projections of one input as one, each divided by itself. Its output is ``[part, part, ...]``.

    Args:
        input_size: features of the input.
        output_sizes: features of each part.
        names: name of each part; by default gate_proj and up_proj for two, else their numbers.
        gather_output: give the whole output on every rank, part by part.
        skip_bias_add: return ``(output, bias)``.
        setting: see `Setting`.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        *,
        names: Sequence[str] | None = None,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        **setting: Any,
    ) -> None:
        how = Setting(**setting)
        if names is None:
            names = ["gate_proj", "up_proj"] if len(output_sizes) == 2 else [str(n) for n in range(len(output_sizes))]
        if len(names) != len(output_sizes) or len(set(names)) != len(names):
            raise UsageError(
                f"{len(output_sizes)} parts {list(output_sizes)} need as many different names, not {list(names)}"
            )
        out = tuple(_side(name, "out", size, how) for name, size in zip(names, output_sizes, strict=True))
        in_ = (Features(name="", unit=input_size),)
        sharded = sharded_alone(how, out, in_, (apart(names, out), fused("", out)))
        super().__init__(sharded, how.place, gather_output=gather_output, skip_bias_add=skip_bias_add)


class QKVParallelLinear(ParallelLinear):
    """Query, key and value projections as one, divided by heads; kv heads are replicated where ranks outnumber them.

    Query heads are dealt so that every rank has the same number of them for each of its kv heads.

    Args:
        hidden_size: features of the input.
        head_dim: features of a head.
        num_heads, num_kv_heads: heads of the whole projection; by default as many kv heads as query heads.
        names: names of the parts.
        gather_output: give the whole ``[q, k, v]`` on every rank.
        skip_bias_add: return ``(output, bias)``.
        setting: see `Setting`.

    Attributes:
        num_local_heads, num_local_kv_heads: heads of this rank.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        names: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
        gather_output: bool = False,
        skip_bias_add: bool = False,
        **setting: Any,
    ) -> None:
        how = Setting(**setting)
        heads = Axis(name="heads", units=num_heads, groups=num_kv_heads or num_heads, divided=not how.disable_tp)
        out = tuple(Features(name=n, axis=heads, unit=head_dim, grouped=i > 0) for i, n in enumerate("qkv"))
        in_ = (Features(name="", unit=hidden_size),)
        sharded = sharded_alone(how, out, in_, (apart(names, out), fused("", out)))
        super().__init__(sharded, how.place, gather_output=gather_output, skip_bias_add=skip_bias_add)

    @property
    def num_local_heads(self) -> int:
        return self.out_sizes[0] // self.sharded.layer.spec.out[0].unit

    @property
    def num_local_kv_heads(self) -> int:
        return self.out_sizes[1] // self.sharded.layer.spec.out[1].unit


class RowParallelLinear(ParallelLinear):
    """A projection whose input features are divided over ranks; their partial results are added up.

    Args:
        input_size, output_size: features of the whole projection.
        input_is_parallel: the input already is this rank's features; False: it is whole, and cut here.
        reduce_results: add the partial results; False leaves that to the caller.
        skip_bias_add: return ``(output, bias)``. The bias is the whole one, to be added once.
        setting: see `Setting`.

    Raises:
        UsageError: for ``reduce_results=False`` with a bias that every rank would add (a ValueError).
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        input_is_parallel: bool = True,
        reduce_results: bool = True,
        skip_bias_add: bool = False,
        **setting: Any,
    ) -> None:
        how = Setting(**setting)
        out, in_ = (Features(name="", unit=output_size),), (_side("", "in", input_size, how),)
        super().__init__(
            sharded_alone(how, out, in_, (fused("", out),)),
            how.place,
            input_is_parallel=input_is_parallel,
            reduce_results=reduce_results,
            skip_bias_add=skip_bias_add,
        )
