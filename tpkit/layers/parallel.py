"""The one projection behind all styles: computes its shard, then does what its style ends with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tpkit.distributed.group import TensorParallel
from tpkit.errors import PluginError, UsageError
from tpkit.layers.sharded import Sharded, ShardedModule

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ParallelLinear"]


class ParallelLinear(ShardedModule):
    """A projection on one rank: computes its shard, then does what its style ends with. See `linear` for those.

    Args:
        sharded: the shard.
        tp: this rank's place.
        gather_output: give the whole output on every rank, not this rank's features.
        input_is_parallel: the input already is this rank's features (False: it is whole, and cut here).
        reduce_results: add the ranks' partial results.
        skip_bias_add: return ``(output, bias)`` and leave the adding to the caller.
        scale: multiplies the output.
        softcap: the output becomes ``softcap * tanh(output / softcap)``.
        compute: it multiplies in this type, and gives it.
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
        compute: torch.dtype | None = None,
        tied: ShardedModule | None = None,
    ) -> None:
        super().__init__(sharded, tp, tied=tied)
        self.compute_dtype = compute
        self.gather_output = gather_output
        self.input_is_parallel = input_is_parallel
        self.reduce_results = reduce_results
        self.skip_bias_add = skip_bias_add
        self.output_scale, self.output_softcap = scale, softcap  # `scale` may be a parameter of the quant method
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

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's summand of what `forward` gives: for a caller that adds it up with something else.

        Args:
            x: ``[..., in]``, as `forward` takes it.

        Returns:
            ``[..., out]``; what every rank has whole counts on the first one.
        """
        if self.in_divided and not self.input_is_parallel:
            x = self._own_input(x)
        if self.output_softcap is not None:
            raise UsageError(f"{self._name()}: a soft cap of a sum is no sum of soft caps")
        y = self._multiply(x, self.bias if self.tp.rank == 0 else None)
        return self._finish(y if self.in_divided or self.tp.rank == 0 else torch.zeros_like(y))

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[-1] != self.in_features:
            raise UsageError(
                f"{self._name()}: rank {self.tp.rank} of {self.tp.size} computes with {self.in_features} input "
                f"features, the input has {x.shape[-1]}"
            )
        if self.in_features == 0 or self.out_features == 0:
            # an empty shard still meets the other ranks, with the type that theirs have
            kind = x.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
            return x.new_zeros(*x.shape[:-1], self.out_features, dtype=dtype)
        assert self.quant_method is not None  # noqa: S101 - every projection has one
        if self.compute_dtype is not None:
            return self._in_other_type(x, bias, self.compute_dtype)
        y: object = self.quant_method.apply(self, x, bias)
        if not isinstance(y, torch.Tensor) or y.shape != (*x.shape[:-1], self.out_features):
            raise PluginError(
                f"{self._name()}: apply of {type(self.quant_method).__name__} gave "
                f"{list(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__} "
                f"for an input of {list(x.shape)}; {self.out_features} output features are needed"
            )
        return y

    def _in_other_type(self, x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        assert self.quant_method is not None  # noqa: S101 - every projection has one
        weight = self.quant_method.dequantize(self)
        return torch.nn.functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    def _finish(self, y: torch.Tensor) -> torch.Tensor:
        if self.output_scale is not None:
            y = y * self.output_scale
        if self.output_softcap is not None:
            y = torch.tanh(y / self.output_softcap) * self.output_softcap
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
