"""From a plan to modules: the tree of a description as an ``nn.Module`` on this rank, weights loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tpkit.checkpoint.dummy import DummyReader
from tpkit.checkpoint.hub import locate
from tpkit.checkpoint.load import Loaded, load_model
from tpkit.checkpoint.memory import AnonymousMemory
from tpkit.checkpoint.open import open_checkpoint
from tpkit.checkpoint.reader import Reader
from tpkit.distributed.group import TensorParallel
from tpkit.errors import PluginError, SpecError, UsageError
from tpkit.layers.container import Container, run
from tpkit.layers.context import ForwardContext, KVCache
from tpkit.layers.embedding import ParallelLMHead
from tpkit.layers.norm import RMSNorm
from tpkit.layers.rotary import Rotary
from tpkit.layers.sharded import Sharded, ShardedModule
from tpkit.planning import ModelPlan, derived_checkpoint, plan_model
from tpkit.registry import Registry
from tpkit.spec.bound import BoundSpec, Node

if TYPE_CHECKING:
    from tpkit.modules import RopeOptions

__all__ = ["BuildContext", "Model", "build"]


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
    cache_shapes: list[tuple[int, int]] = field(default_factory=list)
    _rotaries: dict[object, Rotary] = field(default_factory=dict)

    def own_shard(self) -> Sharded:
        """Returns the shard of the module's own parameters.

        Raises:
            PluginError: if the module type declared no sides of its own ("").
        """
        if self.own is None:
            raise PluginError("a module type asks for its own shard, but declares no side ''")
        return self.own

    def cache_slot(self, kv_heads: int, head_dim: int) -> int:
        """Reserves a place in the KV cache for this rank's kv heads and returns its number."""
        self.cache_shapes.append((kv_heads, head_dim))
        return len(self.cache_shapes) - 1

    def rotary(self, options: RopeOptions, head_dim: int) -> Rotary:
        """Returns the rotary embedding for these options; layers with the same share one."""
        key = (options.model_dump_json(), head_dim)
        if key not in self._rotaries:
            self._rotaries[key] = Rotary(
                int(head_dim * options.partial),
                options.theta,
                pairs=options.pairs,
                scaling=options.scaling,
                device=self.device,
            )
        return self._rotaries[key]


class Model(nn.Module):
    """A language model on this rank. For inference: its parameters do not require grad.

    Attributes:
        spec: the bound description.
        plan: what every rank holds and reads.
        tp: this rank's place.
        packed_modules_mapping: packed projection -> the names of its parts on disk.
        loaded: what loading took, once weights are loaded.
    """

    def __init__(self, plan: ModelPlan, tp: TensorParallel, device: torch.device, registry: Registry) -> None:
        super().__init__()
        self.spec, self.plan, self.tp, self.device = plan.spec, plan, tp, device
        self.vocab_size = int(plan.spec.values["vocab_size"])
        self.loaded: Loaded | None = None
        self.peak_anon_bytes: int | None = None
        maker = _Maker(plan, tp, device, registry)
        for child in plan.spec.root.children:
            self.add_module(child.name, maker.make(child))
        self.cache_shapes = tuple(maker.context.cache_shapes)
        self.sharded_modules: Mapping[str, ShardedModule] = maker.made
        # in a list: every rank makes the frequencies anew, they are no part of the model's state
        self._rotaries = list(maker.context._rotaries.values())

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
                found[declaration.node.name] = [pack.name for pack in packs]
        return found

    def param_bytes(self) -> int:
        """Returns the bytes of this rank's parameters; a shared one counts once."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def new_cache(self, batch: int, length: int) -> KVCache:
        """Returns an empty KV cache for `batch` sequences of up to `length` tokens, for this rank's kv heads."""
        return KVCache(self.cache_shapes, batch=batch, length=length, dtype=self.dtype, device=self.device)

    def forward(
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
            UsageError: for ids that are not ``[B, L]`` integers within the vocabulary (checked on CPU).
        """
        self._check_ids(input_ids)
        context = ForwardContext(input_ids.shape[1], input_ids.device, cache)
        logits = input_ids
        for child in self.children():
            if last_only and isinstance(child, ParallelLMHead):
                logits = logits[:, -1:]
            logits = run(child, logits, context)
        if cache is not None:
            cache.used += input_ids.shape[1]
        return logits

    def _check_ids(self, ids: torch.Tensor) -> None:
        if ids.ndim != 2 or ids.is_floating_point() or ids.shape[1] == 0:
            raise UsageError(f"input_ids are [B, L] integers with L of at least 1, not {list(ids.shape)} {ids.dtype}")
        if torch.compiler.is_compiling() or not ids.numel():
            return
        if ids.device.type != "cpu":
            # without waiting for the device; a row that no rank holds would otherwise be looked up as zeros
            torch._assert_async(((ids >= 0) & (ids < self.vocab_size)).all())
        elif not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise UsageError(
                f"token ids from {int(ids.min())} to {int(ids.max())}; the vocabulary is 0 to {self.vocab_size - 1}"
            )


class _Maker:
    """Makes modules of nodes, with this rank's shards."""

    def __init__(self, plan: ModelPlan, tp: TensorParallel, device: torch.device, registry: Registry) -> None:
        self.plan, self.tp, self.registry = plan, tp, registry
        self.context = BuildContext(tp=tp, device=device)
        self.made: dict[str, ShardedModule] = {}

    def make(self, node: Node) -> nn.Module:
        if node.kind == "repeat":
            return nn.ModuleList(self.make(child) for child in node.children)
        if node.kind == "container":
            container = Container(node.forward)
            for child in node.children:
                container.add_module(child.name, self.make(child))
            return container
        if node.kind == "projection":
            return self._keep(node, self._projection(node))
        if node.kind == "norm":
            return self._keep(node, RMSNorm.of(self._sharded(node), self.tp, node.options.eps))
        return self._module(node)

    def _module(self, node: Node) -> nn.Module:
        children = {child.role: (child.name, self.make(child)) for child in node.children}
        self.context.own = self._sharded(node) if node.path in self.plan.layers else None
        built: nn.Module = self.registry.load("module", node.word).build(node.options, children, self.context)
        return self._keep(node, built) if isinstance(built, ShardedModule) else built

    def _projection(self, node: Node) -> nn.Module:
        options = node.options
        flags: dict[str, Any] = {"scale": options.scale, "softcap": options.softcap}
        if options.tied:
            if options.tied.to not in self.made:
                raise SpecError(
                    f"{node.where}: {node.path} is tied to {options.tied.to}, which must be written before it"
                )
            flags["tied"] = self.made[options.tied.to]
        built: nn.Module = self.registry.load("style", node.word).build(self._sharded(node), self.tp, **flags)
        return built

    def _sharded(self, node: Node) -> Sharded:
        return Sharded(
            layer=self.plan.layers[node.path],
            rank=self.tp.rank,
            method=self.plan.methods.get(node.path),
            device=self.context.device,
            dtype=self.plan.dtype,
        )

    def _keep(self, node: Node, module: nn.Module) -> nn.Module:
        if isinstance(module, ShardedModule):
            self.made[node.path] = module
        return module


def build(
    spec: BoundSpec,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
    tp: object = None,
    dummy_weights: bool = False,
    seed: int = 0,
    split: Sequence[float] | None = None,
    registry: Registry | None = None,
    reader: Reader | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Builds a model on this rank and loads its weights. Every rank of the group calls it with the same arguments.

    Args:
        spec: a bound description, see `load_spec`.
        checkpoint: folder or file; None: the local copy of the hub id that the description names.
        dtype: a torch dtype, its name, or "auto": the checkpoint's.
        device: where parameters live; None: this rank's CUDA device if the ranks talk over NCCL, else torch's default.
        tp: a ProcessGroup or a 1-d DeviceMesh; None: every rank of an initialised torch.distributed world, else one.
        dummy_weights: seeded random weights, no checkpoint.
        seed: of the random weights.
        split: a weight per rank, for unequal devices.
        registry: plugins; None: what is installed.
        reader: reads the checkpoint's bytes; None: mapped files.
        progress: called with bytes read and bytes to read.

    Returns:
        the model in eval mode.

    Raises:
        TpkitError: anything that does not fit, on the rank where it happens; `RankError` on the others.
    """
    place = TensorParallel.of(tp)
    registry = registry or Registry.default()
    where = _device(device, place)
    plan = place.together(lambda: _plan(spec, checkpoint, str(dtype), dummy_weights, place, split, registry))
    place.same_on_all_ranks({**plan.fingerprints(registry), "seed of dummy weights": str(seed)})
    source = DummyReader(seed) if dummy_weights else reader
    return place.together(lambda: _load(plan, place, where, registry, source, progress))


def _plan(
    spec: BoundSpec,
    checkpoint: str | os.PathLike[str] | None,
    dtype: str,
    dummy: bool,
    place: TensorParallel,
    split: Sequence[float] | None,
    registry: Registry,
) -> ModelPlan:
    if dummy:
        if checkpoint is not None:
            raise UsageError("dummy weights and a checkpoint exclude each other")
        plan = plan_model(spec, ranks=place.size, dtype=dtype, split=split, registry=registry)
        derived = derived_checkpoint(plan)
        return plan_model(spec, ranks=place.size, checkpoint=derived, dtype=plan.dtype, split=split, registry=registry)
    opened = open_checkpoint(locate(checkpoint, spec), registry)
    return plan_model(spec, ranks=place.size, checkpoint=opened, dtype=dtype, split=split, registry=registry)


def _load(
    plan: ModelPlan,
    place: TensorParallel,
    device: torch.device,
    registry: Registry,
    reader: Reader | None,
    progress: Callable[[int, int], None] | None,
) -> Model:
    with AnonymousMemory() as memory:
        model = Model(plan, place, device, registry).eval()
        total = plan.load.checkpoint_bytes(place.rank) if progress else 0
        model.loaded = load_model(
            plan.load,
            place.rank,
            model.sharded_modules,
            reader=reader,
            progress=(lambda done: progress(done, total)) if progress else None,
            memory=memory,
        )
    model.peak_anon_bytes = memory.peak
    return model


def _device(device: torch.device | str | None, place: TensorParallel) -> torch.device:
    if device is not None:
        found = torch.device(device)
        if found.type != "cuda" or found.index is not None:
            return found
    elif place.group is None or torch.distributed.get_backend(place.group) != "nccl":
        return torch.get_default_device()
    return torch.device("cuda", torch.cuda.current_device())
