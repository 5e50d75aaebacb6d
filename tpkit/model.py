"""A language model on one rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tpkit.checkpoint.load import Loaded
from tpkit.distributed.group import TensorParallel
from tpkit.errors import SpecError, UsageError
from tpkit.layers.container import Container
from tpkit.layers.context import ForwardContext, KVCache
from tpkit.layers.sharded import ShardedModule
from tpkit.making import Maker, add_child
from tpkit.planning import ModelPlan
from tpkit.registry import Registry

__all__ = ["Model"]


class Model(Container):
    """A language model on this rank. For inference: its parameters do not require grad.

    Attributes:
        spec: the bound description.
        plan: what every rank holds and reads.
        tp: this rank's place.
        packed_modules_mapping: packed projection -> the names of its parts on disk.
        loaded: what loading took, once weights are loaded.
    """

    def __init__(self, plan: ModelPlan, tp: TensorParallel, device: torch.device, registry: Registry) -> None:
        super().__init__(plan.spec.root.forward)
        self.spec, self.plan, self.tp, self.device = plan.spec, plan, tp, device
        self.vocab_size = int(plan.spec.values["vocab_size"])
        self.loaded: Loaded | None = None
        self.peak_anon_bytes: int | None = None
        maker = Maker(plan, tp, device, registry)
        for child in plan.spec.root.children:
            add_child(self, child, maker.make(child))
        _check_ends(plan)
        self.cache_shapes = tuple(maker.context.cache_shapes)
        self.state_shapes = tuple(maker.context.state_shapes)
        self.sharded_modules: Mapping[str, ShardedModule] = maker.made

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it computes in and its logits have."""
        found: torch.dtype = getattr(torch, self.plan.dtype)
        return found

    @property
    def packed_modules_mapping(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for declaration in self.plan.declarations.values():
            packs = getattr(declaration.node.options, "packs", ())
            if packs:
                name, parts = declaration.node.name, [pack.name for pack in packs]
                # modules of one name that are packed in different ways are told apart by their paths
                found[name if found.get(name, parts) == parts else declaration.node.path] = parts
        return found

    def param_bytes(self) -> int:
        """Returns the bytes of this rank's weights as they are held now; a shared one counts once."""
        blobs = {
            id(blob): blob for m in self.sharded_modules.values() for held in m.blobs.values() for blob in held.values()
        }
        return sum(p.numel() * p.element_size() for p in (*self.parameters(), *blobs.values()))

    def new_cache(self, batch: int, length: int) -> KVCache:
        """Returns an empty KV cache for `batch` sequences of up to `length` tokens, for this rank's kv heads."""
        return KVCache(
            self.cache_shapes,
            self.state_shapes,
            batch=batch,
            length=length,
            dtype=self.dtype,
            device=self.device,
        )

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, cache: KVCache | None = None, *, last_only: bool = False
    ) -> torch.Tensor:
        """Computes logits, causally.

        Args:
            input_ids: ``[B, L]`` int64, the same on every rank.
            cache: of earlier tokens; it takes up the new ones. None: these are all.
            last_only: compute the logits of the last token alone: all that decoding needs of a long prompt.

        Returns:
            ``[B, L, vocab_size]`` in the model's dtype, on every rank; ``[B, 1, vocab_size]`` with `last_only`.

        Raises:
            UsageError: for ids that are not ``[B, L]`` integers within the vocabulary (checked on CPU), or a cache that
                they do not fit.
        """
        self._check_ids(input_ids)
        if cache is not None:
            if (cache.shapes, cache.state_shapes) != (self.cache_shapes, self.state_shapes):
                raise UsageError("the KV cache is of another model", hint="make it with new_cache of this one")
            cache.check(*input_ids.shape)
        context = ForwardContext(input_ids.shape[1], input_ids.device, cache, last_only=last_only)
        logits = super().forward(input_ids, context)
        context.finish()
        return logits

    def _check_ids(self, ids: object) -> None:
        if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.int32):
            raise UsageError(f"input_ids are an int64 tensor, not {getattr(ids, 'dtype', type(ids).__name__)}")
        if ids.ndim != 2 or ids.shape[1] == 0:
            raise UsageError(f"input_ids are [B, L] with L of at least 1, not {list(ids.shape)}")


def _check_ends(plan: ModelPlan) -> None:
    """A tree without an embedding or a head would take or give hidden states in place of tokens."""
    nodes = [declaration.node for declaration in plan.declarations.values()]
    heads = [node for node in nodes if node.kind == "projection" and node.word == "vocab"]
    tables = [node for node in nodes if node.kind == "module"]
    if not tables or len(heads) != 1:
        raise SpecError(
            f"{plan.spec.source}: a language model has an embedding and one head (a projection of style vocab), "
            f"this one has {len(tables)} and {len(heads)}"
        )
