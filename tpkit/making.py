"""Modules of nodes: the tree of a description, each node made with this rank's shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tpkit.distributed.group import TensorParallel
from tpkit.errors import PluginError, SpecError
from tpkit.layers.building import BuildContext
from tpkit.layers.container import Container
from tpkit.layers.experts import ExpertLinear
from tpkit.layers.norm import LayerNorm, Norm, RMSNorm
from tpkit.layers.parted import PartedLinear
from tpkit.layers.sharded import Sharded, ShardedModule
from tpkit.planning import ModelPlan
from tpkit.registry import Registry
from tpkit.spec.bound import Node

__all__ = ["Maker", "add_child"]


#: by the word after ``norm:``
NORMS: dict[str, type[Norm]] = {"rms": RMSNorm, "layer": LayerNorm}


def add_child(parent: nn.Module, node: Node, module: nn.Module) -> None:
    """Registers a child under its name in the description.

    Raises:
        SpecError: if the parent's class uses that name itself.
    """
    if hasattr(parent, node.name):
        raise SpecError(f"{node.where}: {node.path}: a {type(parent).__name__} uses the name {node.name!r} itself")
    parent.add_module(node.name, module)


class Maker:
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
                add_child(container, child, self.make(child))
            return container
        if node.kind == "projection":
            return self._keep(node, self._projection(node))
        if node.kind == "norm":
            return self._keep(node, NORMS[node.word].of(self._sharded(node), self.tp, node.options))
        if node.kind == "parameter":
            return self._keep(node, ShardedModule(self._sharded(node), self.tp))
        return self._module(node)

    def _module(self, node: Node) -> nn.Module:
        children = {m.node.role: (m.name, self.make(m.node)) for m in node.members()}
        self.context.own = self._sharded(node) if node.path in self.plan.layers else None
        kind = self.registry.load("module", node.word)
        try:
            built: nn.Module = kind.build(node.options, children, self.context)
        except (SpecError, PluginError) as error:
            raise type(error)(f"{node.where}: {node.path}: {error.message}", hint=error.hint) from error
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
        if self.plan.layers[node.path].spec.experts is not None:
            return self._experts(node)
        if options.compute is not None:
            flags["compute"] = getattr(torch, options.compute)
        parts = self.plan.planned[node.path].parts
        if parts and not options.tied:
            return self._parted(node, parts, flags)
        built: nn.Module = self.registry.load("style", node.word).build(self._sharded(node), self.tp, **flags)
        return built

    def _experts(self, node: Node) -> nn.Module:
        """Returns a projection of this rank's experts: each is made as if it were alone."""
        options = node.options
        words = ("scale", "softcap", "compute", "tied")
        if any(getattr(options, word) is not None for word in words):
            raise SpecError(f"{node.where}: {node.path}: experts take none of {', '.join(words)}")
        layer, parts = self.plan.layers[node.path], self.plan.planned[node.path].parts
        style, made = self.registry.load("style", node.word), []
        for path, number in layer.units(self.tp.rank):
            own = replace(self._sharded(node), layer=layer.expert(number or 0), lazy=True)
            if parts:
                shards = {p.removeprefix(f"{node.path}."): self._shard(p) for p in parts}
                shards = {n: replace(s, layer=s.layer.expert(number or 0), lazy=True) for n, s in shards.items()}
                each = PartedLinear(own, self.tp, shards)
                self.made.update({shard.layer.spec.path: each.parts[name] for name, shard in shards.items()})
            else:
                each = style.build(own, self.tp)
            self.made[path] = each
            made.append(each)
        built = ExpertLinear(layer, self.tp.rank, made)
        if not parts and not self._sharded(node).lazy:
            built.stack()
        return built

    def _parted(self, node: Node, parts: Sequence[str], flags: Mapping[str, Any]) -> nn.Module:
        shards = {path.removeprefix(f"{node.path}."): self._shard(path) for path in parts}
        built = PartedLinear(self._sharded(node), self.tp, shards, **flags)
        self.made.update({f"{node.path}.{name}": part for name, part in built.parts.items()})
        return built

    def _sharded(self, node: Node) -> Sharded:
        return self._shard(node.path)

    def _shard(self, path: str) -> Sharded:
        planned = self.plan.planned[path]
        return Sharded(
            layer=self.plan.layers[path],
            rank=self.tp.rank,
            method=planned.choice.method if planned.choice else None,
            device=self.context.device,
            dtype=self.plan.dtype,
            linear=planned.linear,
            lazy=planned.choice is not None and planned.choice.name != "none",
        )

    def _keep(self, node: Node, module: nn.Module) -> nn.Module:
        if isinstance(module, ShardedModule):
            self.made[node.path] = module
        return module
