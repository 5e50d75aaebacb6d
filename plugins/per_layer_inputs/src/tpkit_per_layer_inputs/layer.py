"""Inputs of the layers on one rank: all of them are made once in a pass, and each layer takes its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpkit import SpecError
from tpkit.layers import ForwardContext, RMSNorm, RoleModule, VocabParallelEmbedding
from tpkit.layers.mlp import ACTIVATIONS

if TYPE_CHECKING:
    from tpkit.modules import Children
    from tpkit_per_layer_inputs import PerLayerEmbeddingOptions, PerLayerInputOptions

__all__ = ["INPUTS", "EmbeddingLayer", "InputLayer", "MultiplyLayer"]

#: what the inputs are called among the values that modules leave for others in a pass
INPUTS = "per_layer_inputs"


class EmbeddingLayer(RoleModule):
    """Embeds the tokens and leaves the inputs of all layers.

    Args:
        options: bound words of the description.
        children: tokens, table, in_proj and norm: role -> (name, module).
    """

    takes_context = True

    def __init__(self, options: PerLayerEmbeddingOptions, children: Children) -> None:
        super().__init__(children)
        self._apart, self._scale = (options.layers, options.width), options.scale
        into = self.projection("in_proj")
        for role, needed in (("tokens", into.in_features), ("table", into.out_features)):
            found = self.child(role)
            if not isinstance(found, VocabParallelEmbedding):
                raise SpecError(f"per_layer_embedding: its {role} is an embedding, not a {type(found).__name__}")
            if found.in_features != needed:
                raise SpecError(f"{found.path}: rows of {found.in_features} features; as {role} they have {needed}")
        norm = self.child("norm")
        if not isinstance(norm, RMSNorm) or norm.size != options.width:
            raise SpecError("per_layer_embedding: its norm is an rms norm over: layer")

    def forward(self, ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Embeds.

        Args:
            ids: ``[B, L]`` integers, each within both tables.
            context: takes the inputs, ``[B, L, layers, width]``, as `INPUTS`.

        Returns:
            ``[B, L, hidden]``; as the inputs, the same on every rank.
        """
        tokens, table, norm = self.child("tokens"), self.child("table"), self.child("norm")
        assert tokens is not None and table is not None and norm is not None  # noqa: S101 - all are required
        x: torch.Tensor = tokens(ids)
        seen, own = (y.unflatten(-1, self._apart) for y in (self.projection("in_proj")(x), table(ids)))
        context.leave(INPUTS, (norm(seen) + own) * self._scale)
        return x


class InputLayer(RoleModule):
    """Lets the input of a layer into the hidden state; a rank computes with its run of the input's features.

    Args:
        options: bound words of the description.
        children: gate_proj and out_proj: role -> (name, module).
    """

    takes_context = True

    def __init__(self, options: PerLayerInputOptions, children: Children) -> None:
        super().__init__(children)
        if options.activation not in ACTIVATIONS:
            raise SpecError(f"per_layer_input: an activation by its name is needed, not {options.activation!r}")
        self._index, self._width = options.index, options.width
        self._act = ACTIVATIONS[options.activation]
        shard = self.projection("gate_proj").sharded
        ((self._start, self._stop),) = shard.layer.bounds(shard.layer.spec.out, shard.rank)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Computes what is added to the hidden state.

        Args:
            x: ``[B, L, hidden]``.
            context: has the inputs of all layers, ``[B, L, layers, width]``.

        Returns:
            ``[B, L, hidden]``, the same on every rank.
        """
        inputs: torch.Tensor = context.left(INPUTS)
        layers, width = inputs.shape[-2:]
        if width != self._width or self._index >= layers:
            raise SpecError(
                f"per_layer_input needs input {self._index}, of {self._width} features; there are {layers}, of {width}"
            )
        own = inputs[..., self._index, self._start : self._stop]
        y: torch.Tensor = self.projection("out_proj")(self._act(self.projection("gate_proj")(x)) * own)
        return y


class MultiplyLayer(RoleModule):
    """Multiplies with a number that every rank holds.

    Args:
        children: factor: role -> (name, module).
    """

    def __init__(self, children: Children) -> None:
        super().__init__(children)
        factor = self.parameter("factor")
        if factor is None or factor.numel() != 1:
            raise SpecError("multiply: its factor is a parameter of one number")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``[...]``, as `x` is."""
        factor = self.parameter("factor")
        assert factor is not None  # noqa: S101 - refused above
        return x * factor
