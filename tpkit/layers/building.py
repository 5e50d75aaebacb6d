"""What module types may ask for while their modules are built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tpkit.distributed.group import TensorParallel
from tpkit.errors import PluginError, SpecError
from tpkit.layers.rotary import Rotary
from tpkit.layers.sharded import Sharded
from tpkit.spec.rope import with_lengths

if TYPE_CHECKING:
    from tpkit.modules import RopeOptions

__all__ = ["BuildContext"]


@dataclass
class BuildContext:
    """What module types may ask for while they are built.

    Attributes:
        tp: this rank's place.
        device: where parameters live.
        own: the shard of the module's own parameters, if it declared any.
    """

    tp: TensorParallel
    device: torch.device
    own: Sharded | None = None
    cache_shapes: list[tuple[int, int, int]] = field(default_factory=list)
    state_shapes: list[tuple[int, ...]] = field(default_factory=list)
    _rotaries: dict[object, Rotary] = field(default_factory=dict)

    def own_shard(self) -> Sharded:
        """Returns the shard of the module's own parameters.

        Raises:
            PluginError: if the module type declared no sides of its own ("").
        """
        if self.own is None:
            raise PluginError("a module type asks for its own shard, but declares no side ''")
        return self.own

    def cache_slot(self, kv_heads: int, head_dim: int, value_dim: int | None = None) -> int:
        """Reserves a place in the KV cache for this rank's kv heads and returns its number.

        Args:
            kv_heads: heads whose keys and values are kept.
            head_dim: features of a key.
            value_dim: features of a value; None: as many.
        """
        self.cache_shapes.append((kv_heads, head_dim, head_dim if value_dim is None else value_dim))
        return len(self.cache_shapes) - 1

    def state_slot(self, *shape: int) -> int:
        """Reserves a place in the cache for a state ``[B, *shape]`` that does not grow, and returns its number."""
        self.state_shapes.append(shape)
        return len(self.state_shapes) - 1

    def rotary(self, options: RopeOptions, head_dim: int) -> Rotary:
        """Returns the rotary embedding for these options; layers with the same share one."""
        key = (repr(options), head_dim)
        if key not in self._rotaries:
            scaling = with_lengths(options.scaling, original_length=options.original_length, max_length=options.longest)
            dims, turned = int(head_dim * options.partial) if options.dims is None else options.dims, None
            if dims > head_dim:
                raise SpecError(f"rope turns {dims} features of a head of {head_dim}: {options.turning}")
            if scaling is not None and scaling["rope_type"] == "proportional":  # frequencies as if all of them turned
                dims, turned = head_dim, dims // 2
            self._rotaries[key] = Rotary(
                dims,
                options.theta,
                pairs=options.pairs,
                scaling=scaling,
                turned=turned,
                device=self.device,
            )
        return self._rotaries[key]
