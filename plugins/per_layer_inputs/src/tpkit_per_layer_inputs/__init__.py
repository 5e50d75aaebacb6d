"""Module types for models that give each layer an input of its own, beside the hidden state: a few features per token.

``per_layer_embedding`` makes them all from the tokens, before the first layer; ``per_layer_input`` uses those of one
layer. ``multiply`` is the number that the hidden state of such a layer is multiplied with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from tpkit.feedforward import Activation
from tpkit.modules import Axis, Child, Children, Declared, Features, ModuleType, Options, Role, Sides, hidden

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "Multiply",
    "PerLayerEmbedding",
    "PerLayerEmbeddingOptions",
    "PerLayerInput",
    "PerLayerInputOptions",
]


class PerLayerEmbeddingOptions(Options):
    """Words of ``module: per_layer_embedding``.

    Attributes:
        layers: layers that have an input.
        width: features of the input of one.
        scale: the sum of both halves of an input is multiplied with it.
    """

    layers: int = Field(default="num_hidden_layers")  # type: ignore[assignment]
    width: int
    scale: float = 1.0


class PerLayerEmbedding(ModuleType):
    """Embeds the tokens, and leaves what the layers get beside: ``scale * (norm(in_proj(x)) + table(ids))``.

    `tokens` embeds the ids, and x is what it gives. `table` is an embedding too, whose rows are the inputs of all
    layers side by side; so is what in_proj gives. The norm goes ``over: layer``, the features of one. Both tables may
    be divided by rows; in_proj is whole on every rank, since each needs all of what it gives.
    """

    Options = PerLayerEmbeddingOptions
    roles = (
        Role(name="tokens", module=True),
        Role(name="table", module=True),
        Role(name="in_proj", styles=("replicated",)),
        Role(name="norm"),
    )

    @classmethod
    def declare(cls, options: PerLayerEmbeddingOptions, hidden_size: int, children: Mapping[str, Child]) -> Declared:
        every = hidden(options.layers * options.width)
        return Declared(
            sides={"in_proj": Sides(in_=hidden(hidden_size), out=every)},
            widths={"layer": options.width},
        )

    @classmethod
    def build(cls, options: PerLayerEmbeddingOptions, children: Children, context: Any) -> nn.Module:
        from tpkit_per_layer_inputs.layer import EmbeddingLayer

        return EmbeddingLayer(options, children)


class PerLayerInputOptions(Options):
    """Words of ``module: per_layer_input``.

    Attributes:
        width: features of the input.
        activation: of the gate.
        index: whose input it is, counted from 0; the layer around it unless this says otherwise.
    """

    width: int
    activation: Activation
    index: int = Field(default="layer", ge=0)  # type: ignore[assignment]


class PerLayerInput(ModuleType):
    """``out_proj(activation(gate_proj(x)) * input)``, where the input is the layer's own.

    The features of the input are divided over the ranks, unless both projections say ``disable_tp``.
    """

    Options = PerLayerInputOptions
    roles = (Role(name="gate_proj", styles=("column",)), Role(name="out_proj", styles=("row",)))

    @classmethod
    def declare(cls, options: PerLayerInputOptions, hidden_size: int, children: Mapping[str, Child]) -> Declared:
        inner = (Features(name="", axis=Axis(name="layer input", units=options.width)),)
        return Declared(
            sides={
                "gate_proj": Sides(in_=hidden(hidden_size), out=inner),
                "out_proj": Sides(in_=inner, out=hidden(hidden_size)),
            }
        )

    @classmethod
    def build(cls, options: PerLayerInputOptions, children: Children, context: Any) -> nn.Module:
        from tpkit_per_layer_inputs.layer import InputLayer

        return InputLayer(options, children)


class Multiply(ModuleType):
    """``factor * x``, where the factor is a parameter of one number."""

    roles = (Role(name="factor"),)

    @classmethod
    def declare(cls, options: Any, hidden_size: int, children: Mapping[str, Child]) -> Declared:
        return Declared(sides={})

    @classmethod
    def build(cls, options: Any, children: Children, context: Any) -> nn.Module:
        from tpkit_per_layer_inputs.layer import MultiplyLayer

        return MultiplyLayer(children)
