"""Token embedding and output head, divided by vocabulary rows. Uneven shares need no padded rows and no fake tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tpkit.distributed.group import TensorParallel
from tpkit.dtypes import torch_dtype
from tpkit.errors import UsageError
from tpkit.layers.alone import Setting, sharded_alone
from tpkit.layers.context import ForwardContext
from tpkit.layers.parallel import ParallelLinear
from tpkit.layers.sharded import Sharded, ShardedModule
from tpkit.layout import fused
from tpkit.partition import Axis, Features, Side, side_size

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LearnedPositions", "ParallelLMHead", "VocabParallelEmbedding"]


def _sides(rows: int, width: int, setting: Setting) -> tuple[Side, Side]:
    axis = Axis(name="vocab", units=rows, divided=not setting.disable_tp)
    return (Features(name="", axis=axis),), (Features(name="", unit=width),)


class VocabParallelEmbedding(ShardedModule):
    """Looks up token ids; each rank holds a run of rows, and the ranks' results are added up.

    Args:
        num_embeddings: rows of the whole table.
        embedding_dim: features of a row.
        scale: multiplies what is looked up.
        scale_rounded: the scale is rounded to the dtype of what is looked up first.
        setting: see `Setting`; there is no bias.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        scale: float | None = None,
        scale_rounded: bool = False,
        **setting: Any,
    ) -> None:
        how = Setting(**{"bias": False, **setting})
        if how.bias:
            raise UsageError("an embedding has no bias")
        out, in_ = _sides(num_embeddings, embedding_dim, how)
        super().__init__(sharded_alone(how, out, in_, (fused("", out),), embedding=True), how.place)
        self.output_scale, self.scale_rounded = scale, scale_rounded

    @classmethod
    def of(cls, sharded: Sharded, tp: TensorParallel, scale: float | None = None, scale_rounded: bool = False) -> Self:
        """Returns an embedding for a shard that is divided already."""
        made = cls.__new__(cls)
        ShardedModule.__init__(made, sharded, tp)
        made.output_scale, made.scale_rounded = scale, scale_rounded
        return made

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Looks up.

        Args:
            ids: ``[...]`` integers, each within the whole table.

        Returns:
            ``[..., width]``, the same on every rank.

        Raises:
            UsageError: for ids outside the table (checked on CPU; elsewhere the device stops).
        """
        self._check(ids)
        layer = self.sharded.layer
        ((start, stop),) = layer.bounds(layer.spec.out, self.sharded.rank)
        assert self.quant_method is not None  # noqa: S101 - every embedding has one
        dtype = torch_dtype(self.sharded.dtype)  # what is looked up starts the model: decoded values may be wider
        if not self.out_divided:
            y = self.quant_method.embedding(self, ids).to(dtype)
        elif stop == start:
            y = self.tp.all_reduce(torch.zeros(*ids.shape, self.in_features, dtype=dtype, device=ids.device))
        else:
            own = (ids >= start) & (ids < stop)
            rows = self.quant_method.embedding(self, torch.where(own, ids - start, 0)).to(dtype)
            # a row of another rank gives zeros here, so that the sum is that rank's row, exactly
            y = self.tp.all_reduce(torch.where(own.unsqueeze(-1), rows, 0))
        if self.output_scale is None:
            return y
        return y * (torch.tensor(self.output_scale, dtype=y.dtype) if self.scale_rounded else self.output_scale)

    def _check(self, ids: torch.Tensor) -> None:
        """A row that no rank holds would be looked up as zeros."""
        rows = side_size(self.sharded.layer.spec.out)
        if torch.compiler.is_compiling() or not ids.numel() or ids.device.type == "meta":
            return
        if ids.device.type != "cpu":
            torch._assert_async(((ids >= 0) & (ids < rows)).all())  # without waiting for the device
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= rows:
            raise UsageError(f"{self._name()}: token ids from {low} to {high}; the table has rows 0 to {rows - 1}")


class LearnedPositions(ShardedModule):
    """Adds a learned row for each position to the hidden state; every rank holds the whole table."""

    takes_context = True
    first_row: int

    @classmethod
    def of(cls, sharded: Sharded, tp: TensorParallel, offset: int = 0) -> Self:
        """Returns a table for a shard that is made already; `offset` is the row of position 0."""
        made = cls.__new__(cls)
        ShardedModule.__init__(made, sharded, tp)
        made.first_row = offset
        return made

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Returns ``[B, L, hidden]`` with the rows of the pass' positions added.

        Raises:
            UsageError: for positions that the table does not have.
        """
        last, rows = self.first_row + context.past + context.length, side_size(self.sharded.layer.spec.out)
        if last > rows:
            needed = context.past + context.length
            raise UsageError(f"{self._name()}: {needed} tokens; the model learned {rows - self.first_row} positions")
        assert self.quant_method is not None  # noqa: S101 - every table has one
        return x + self.quant_method.embedding(self, context.positions + self.first_row).to(x.dtype)


class ParallelLMHead(ParallelLinear):
    """Projects to logits; each rank computes a run of the vocabulary, and every rank gets all logits.

    Args:
        num_embeddings: rows of the whole vocabulary.
        embedding_dim: features of the hidden state.
        tied: an embedding whose shard it shares; nothing is then loaded for the head.
        gather_output: give all logits on every rank; False: this rank's run.
        setting: see `Setting`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        tied: VocabParallelEmbedding | None = None,
        gather_output: bool = True,
        **setting: Any,
    ) -> None:
        if tied is not None:
            held = [side_size(side) for side in (tied.sharded.layer.spec.out, tied.sharded.layer.spec.in_)]
            if [num_embeddings, embedding_dim] != held or setting:
                raise UsageError(
                    f"a head of {[num_embeddings, embedding_dim]} {setting or ''} cannot share an embedding of {held}",
                    hint="give the embedding's sizes, and nothing else: all the rest is the embedding's",
                )
            super().__init__(tied.sharded, tied.tp, gather_output=gather_output, tied=tied)
            return
        how = Setting(**{"bias": False, **setting})
        out, in_ = _sides(num_embeddings, embedding_dim, how)
        super().__init__(sharded_alone(how, out, in_, (fused("", out),)), how.place, gather_output=gather_output)

    @classmethod
    def of(cls, sharded: Sharded, tp: TensorParallel, **flags: Any) -> Self:
        return super().of(sharded, tp, **{"gather_output": True, **flags})
