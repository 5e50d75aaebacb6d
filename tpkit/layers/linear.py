"""Projections divided over ranks. Usable alone: no description and no process group are needed.

layer = ColumnParallelLinear(64, 256, bias=False, tp_rank=0, tp_size=3)
layer.load({"weight": full_weight})        # keeps this rank's rows
y = layer(x)                               # [..., 86]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpkit.errors import UsageError
from tpkit.layers.alone import Setting, sharded_alone
from tpkit.layers.parallel import ParallelLinear
from tpkit.layout import apart, fused
from tpkit.partition import Axis, Features

__all__ = [
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "ReplicatedLinear",
    "RowParallelLinear",
]


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
        heads = Axis(
            name="heads",
            units=num_heads,
            groups=num_heads if num_kv_heads is None else num_kv_heads,
            divided=not how.disable_tp,
        )
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
