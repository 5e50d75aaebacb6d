"""Layers of several experts under test: stored in each way, on any number of ranks, against the author's reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from tpkit.layers import MergedColumnParallelExperts, RowParallelExperts, Sorted
from tpkit.layers.experts import ExpertLinear
from tpkit.layers.sharded import ShardedModule
from tpkit.quant import QuantMethod
from tpkit.testing.finding import Finding, told
from tpkit.testing.shards import (
    Outcome,
    difference,
    examined,
    inputs,
    own_reference,
    require_right,
)
from tpkit.testing.subject import Style, Subject, Tensors, linear_spec

__all__ = ["require_experts"]

#: how many experts a layer has: more than one group, fewer than the ranks
EXPERTS = 3
#: ranks, and the groups in which they share the experts
PLACES = ((1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2), (5, 1), (5, 4))

Stored = Literal["apart", "stacked", "bare"]


@dataclass(frozen=True)
class Several:
    """A layer of experts to try.

    Attributes:
        style: one of its experts, as a layer of its own; its parts are how that one is stored.
        stored: each expert under its number; stacked along a dimension more; the same, with names that have no dot.
    """

    style: Style
    stored: Stored

    @property
    def name(self) -> str:
        how = {"apart": "each under its number", "stacked": "stacked", "bare": "stacked, under bare names"}
        return f"{EXPERTS} experts, {self.style.name}, {how[self.stored]}"

    def build(self, method: QuantMethod, rank: int, size: int, ep: int) -> Any:
        """Returns a rank's experts, unfilled."""
        flags: dict[str, Any] = {
            "bias": False,
            "dtype": self.style.dtype,
            "quant": method,
            "tp_rank": rank,
            "tp_size": size,
            "ep": ep,
        }
        arguments = (*self.style.arguments, EXPERTS)
        if len(self.style.parts) == 2:
            return MergedColumnParallelExperts(*arguments, **flags)
        return RowParallelExperts(*arguments, **flags)

    def tensors(self, subject: Subject) -> Tensors:
        """Returns the tensors of all experts by name on disk; each expert has others."""
        stem = "down_proj" if len(self.style.parts) == 1 else "" if self.style.apart else "gate_up_proj"
        each = [subject.tensors(self.style, seed_of(number)) for number in range(EXPERTS)]
        named = [{f"{stem}.{name}".lstrip("."): tensor for name, tensor in held.items()} for held in each]
        if self.stored == "apart":
            return {f"{number}.{name}": tensor for number, held in enumerate(named) for name, tensor in held.items()}
        stacked = {name: _stack([held[name] for held in named]) for name in named[0]}
        if self.stored == "stacked":
            return stacked
        return {stem if name == f"{stem}.weight" else name.replace(".", "_"): t for name, t in stacked.items()}


def seed_of(number: int) -> int:
    """Returns the seed of an expert's example; its parts take the next ones."""
    return 2 * number


def _stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    octets = [tensor.reshape(1, *tensor.shape) for tensor in tensors]
    if tensors[0].dtype.itemsize > 1:
        return torch.cat(octets)
    return torch.cat([each.view(torch.uint8) for each in octets]).view(tensors[0].dtype)  # float8 cannot be joined


def layers_of(subject: Subject) -> Iterator[Several]:
    """Yields the layers to try."""
    sizes = subject.sizes
    merged = subject.merged([sizes.short, sizes.short], sizes.narrow, apart=True)
    row, even = subject.row(sizes.few, sizes.narrow), subject.row(sizes.few, sizes.wide)
    specs = subject.declared(linear_spec(sizes.few, sizes.narrow)).values()
    yield Several(merged, "apart")
    yield Several(row, "apart")
    yield Several(even, "apart")
    yield Several(merged, "stacked")
    yield Several(row, "stacked")
    if subject.fused and not any("." in (spec.stored or "") for spec in specs):
        yield Several(replace(merged, name=merged.name.replace("apart", "fused"), apart=False), "bare")


def require_experts(subject: Subject) -> None:
    """Requires that every expert on every rank computes its part of the reference.

    Raises:
        Finding: with the likeliest reason.
    """
    outcomes = []
    for method in subject.variants():
        for several in layers_of(subject):
            for size, ep in PLACES:
                for rank in range(size):
                    outcomes += _examine(subject, method, several, (rank, size, ep))
    require_right(subject, outcomes)


def _examine(subject: Subject, method: QuantMethod, several: Several, place: tuple[int, int, int]) -> list[Outcome]:
    """Loads a rank's experts and computes each of them, and all of them at once."""
    rank, size, ep = place
    style = replace(several.style, name=f"{several.name}, in {ep} group{'s' * (ep > 1)}")
    try:
        layer = several.build(method, rank, size, ep)
        layer.load(several.tensors(subject))
    except Finding:
        raise
    except Exception as error:
        return [Outcome(style=style, size=size, rank=rank, fault=told(error), raised=error)]
    found = [_one(subject, method, replace(several, style=style), each, place) for each in layer.named_children()]
    if found and not any(outcome.fault for outcome in found):
        _all_at_once(subject, several, layer, f"{style.name}, rank {rank} of {size}")
    return found


def _one(
    subject: Subject, method: QuantMethod, several: Several, named: tuple[str, torch.nn.Module], place: Any
) -> Outcome:
    number, layer = named
    assert isinstance(layer, ShardedModule)  # noqa: S101 - what experts are made of
    style = replace(several.style, name=f"{several.style.name}, expert {number}")
    wanted = own_reference(layer, subject.references(several.style, seed_of(int(number))))
    outcome = examined(subject, method, style, layer, wanted)
    if outcome.fault and place[1] == 1:
        alone = several.style.build(method)
        alone.load(subject.tensors(several.style, seed_of(int(number))))
        if not examined(subject, method, style, alone, wanted).fault:
            raise Finding(
                "shared-state",
                f"{style.name}: {outcome.fault}; loaded as a layer of its own it is right: all experts have one "
                "instance of the method",
            )
    return outcome


def _all_at_once(subject: Subject, several: Several, layer: ExpertLinear, where: str) -> None:
    """Rows of several experts give what each expert gives for its own; one expert has none."""
    counts = torch.tensor([(number + 2) % 3 for number in range(len(layer))])
    x = inputs(layer.in_features, int(counts.sum()), dtype=subject.dtype)
    y, wanted = layer(x.clone(), Sorted(counts)), []
    for (number, each), rows in zip(layer.named_children(), x.split(counts.tolist()), strict=True):
        assert isinstance(each, ShardedModule)  # noqa: S101 - what experts are made of
        weight = own_reference(each, subject.references(several.style, seed_of(int(number))))
        wanted.append(rows.to(torch.float64) @ weight.t())
    away = difference(y, torch.cat(wanted))
    if away > subject.allowed:
        raise Finding("input-shape", f"{where}: rows of several experts are {away:.2g} of the largest output away")
