"""Module types that are tables of rows: token embedding, learned positions. Declarations, as in `tpkit.modules`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from tpkit.modules import Child, Children, Declared, ModuleType, Options, Plain, Sides, hidden
from tpkit.partition import Axis, Features

if TYPE_CHECKING:
    from torch import nn

    from tpkit.layers.building import BuildContext

__all__ = ["Embedding", "Positions"]


class EmbeddingOptions(Options):
    """Words of ``module: embedding``. `scale_rounded`: the scale is rounded to the dtype of the table first."""

    style: Literal["vocab", "replicated"] = "vocab"
    rows: int = Field(default="vocab_size")  # type: ignore[assignment]
    width: int = Field(default="hidden_size")  # type: ignore[assignment]
    scale: float | None = None
    scale_rounded: bool = False
    quant: Annotated[str | dict[str, Any] | None, Plain()] = None


class Embedding(ModuleType):
    """Token embedding; it holds its own weight ``[rows, width]``."""

    Options = EmbeddingOptions

    @classmethod
    def declare(cls, options: EmbeddingOptions, hidden_size: int, children: Mapping[str, Child]) -> Declared:
        axis = Axis(name="vocab", units=options.rows, divided=options.style == "vocab")
        return Declared(sides={"": Sides(in_=hidden(options.width), out=(Features(name="", axis=axis),))})

    @classmethod
    def build(cls, options: EmbeddingOptions, children: Children, context: BuildContext) -> nn.Module:
        from tpkit.layers.embedding import VocabParallelEmbedding

        return VocabParallelEmbedding.of(
            context.own_shard(), context.tp, scale=options.scale, scale_rounded=options.scale_rounded
        )


class PositionsOptions(Options):
    """Words of ``module: positions``: learned positions, added to the hidden state.

    Attributes:
        rows: positions.
        offset: row of position 0; the table has that many rows more.
    """

    style: Literal["replicated"] = "replicated"
    rows: int = Field(default="max_position_embeddings")  # type: ignore[assignment]
    offset: int = Field(default=0, ge=0)


class Positions(ModuleType):
    """Learned positions; it holds its own weight ``[rows + offset, hidden_size]``."""

    Options = PositionsOptions

    @classmethod
    def declare(cls, options: PositionsOptions, hidden_size: int, children: Mapping[str, Child]) -> Declared:
        return Declared(sides={"": Sides(in_=hidden(hidden_size), out=hidden(options.rows + options.offset))})

    @classmethod
    def build(cls, options: PositionsOptions, children: Children, context: BuildContext) -> nn.Module:
        from tpkit.layers.embedding import LearnedPositions

        return LearnedPositions.of(context.own_shard(), context.tp, offset=options.offset)
