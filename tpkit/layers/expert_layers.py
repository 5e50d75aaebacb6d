"""Projections of several experts, divided over ranks. Usable alone: no description and no process group are needed.

up = MergedColumnParallelExperts(64, [96, 96], 8, bias=False, tp_rank=0, tp_size=4, ep=2)
up.load({"0.gate_proj.weight": gate, "0.up_proj.weight": up, "1.gate_proj.weight": ...})
y = up(x, Sorted(torch.tensor([3, 0, 2, 1])))       # [6, 96]: of experts 0 to 3, half the width
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tpkit.errors import UsageError
from tpkit.forms import of_experts
from tpkit.layers.alone import Setting, sharded_alone
from tpkit.layers.experts import ExpertLinear
from tpkit.layers.parallel import ParallelLinear
from tpkit.layout import Source, apart, fused
from tpkit.partition import Axis, Features, Side, check_groups
from tpkit.quant import Unquantized

__all__ = ["ColumnParallelExperts", "MergedColumnParallelExperts", "ParallelExperts", "RowParallelExperts"]

#: what the names of its tensors begin with in a model, where it has no other prefix; `load` takes them without
PREFIX = "experts"


class ParallelExperts(ExpertLinear):
    """A projection of experts that is made without a description.

    Args:
        how: its setting.
        out, in_: sides of one expert.
        forms: how one expert is stored, under names that begin with the setting's prefix.
        num_experts: how many there are.
        ep: the ranks share them in so many groups; the ranks of a group divide each expert's width.
    """

    def __init__(
        self, how: Setting, out: Side, in_: Side, forms: tuple[tuple[Source, ...], ...], num_experts: int, ep: int
    ) -> None:
        place = how.place
        check_groups(ep, place.size)
        axis = Axis(name="experts", units=num_experts, over="groups")
        forms = of_experts(forms, how.prefix, stacked=False)
        sharded = sharded_alone(how, out, in_, forms, experts=axis, ep=ep)
        numbers = sharded.layer.experts(place.rank) or range(0)
        shards = [replace(sharded, layer=sharded.layer.expert(number)) for number in numbers]
        flags = {"reduce_results": False, "skip_bias_add": how.bias}  # what each gives is added up with the others'
        super().__init__(sharded.layer, place.rank, [ParallelLinear.of(shard, place, **flags) for shard in shards])
        self.sharded, self.tp = sharded, place
        if type(sharded.method) is Unquantized:
            self.stack()

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fills this rank's experts through the loader's own plan.

        Args:
            tensors: full tensors of all experts, by the names that they have below the experts' container: those of
                each under its number (``0.down_proj.weight``), or all of them along a first dimension more
                (``down_proj.weight``, or ``down_proj`` and ``down_proj_scale``).

        Raises:
            LoadError: unknown, missing, wrongly shaped or typed tensors (a ValueError).
        """
        from tpkit.checkpoint.one_layer import load_experts

        load_experts(self, tensors)


def _setting(setting: dict[str, Any]) -> Setting:
    return Setting(**{**setting, "prefix": setting.get("prefix") or PREFIX})


def _width(name: str, size: int, how: Setting) -> Features:
    return Features(name=name, axis=Axis(name="expert ffn", units=size, over="group", divided=not how.disable_tp))


class ColumnParallelExperts(ParallelExperts):
    """Column projections, one for each expert: the ranks of a group divide their output features.

    Args:
        input_size, output_size: features of one expert.
        num_experts: how many there are.
        ep: in how many groups the ranks share them.
        name: what each one is called on disk.
        setting: see `Setting`.
    """

    def __init__(
        self, input_size: int, output_size: int, num_experts: int, *, ep: int = 1, name: str = "up_proj", **setting: Any
    ) -> None:
        how = _setting(setting)
        out, in_ = (_width("", output_size, how),), (Features(name="", unit=input_size),)
        super().__init__(how, out, in_, (fused(f"{how.prefix}.{name}", out),), num_experts, ep)


class MergedColumnParallelExperts(ParallelExperts):
    """Several column projections of one input as one, for each expert. The output is ``[part, part, ...]``.

    Args:
        input_size: features of the input.
        output_sizes: features of each part of one expert.
        num_experts: how many there are.
        ep: in how many groups the ranks share them.
        names: what the parts are called on disk.
        name: what the parts are called on disk where they are one tensor.
        setting: see `Setting`.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        num_experts: int,
        *,
        ep: int = 1,
        names: Sequence[str] = ("gate_proj", "up_proj"),
        name: str = "gate_up_proj",
        **setting: Any,
    ) -> None:
        how = _setting(setting)
        if len(names) != len(output_sizes) or len({*names, name}) != len(names) + 1:
            raise UsageError(
                f"{len(output_sizes)} parts {list(output_sizes)} need as many different names, not {list(names)}, and "
                f"another one for all of them, not {name!r}"
            )
        out = tuple(_width(part, size, how) for part, size in zip(names, output_sizes, strict=True))
        in_ = (Features(name="", unit=input_size),)
        forms = (apart([f"{how.prefix}.{part}" for part in names], out), fused(f"{how.prefix}.{name}", out))
        super().__init__(how, out, in_, forms, num_experts, ep)


class RowParallelExperts(ParallelExperts):
    """Row projections, one for each expert: the ranks of a group divide their input features.

    What it gives is this rank's summand: experts are added up before the ranks are. With a bias, the ranks that do not
    lead their group leave it out: ``down(x, rows, bias=down.leads)``.

    Args:
        input_size, output_size: features of one expert.
        num_experts: how many there are.
        ep: in how many groups the ranks share them.
        name: what each one is called on disk.
        setting: see `Setting`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        num_experts: int,
        *,
        ep: int = 1,
        name: str = "down_proj",
        **setting: Any,
    ) -> None:
        how = _setting(setting)
        out, in_ = (Features(name="", unit=output_size),), (_width("", input_size, how),)
        super().__init__(how, out, in_, (fused(f"{how.prefix}.{name}", out),), num_experts, ep)
