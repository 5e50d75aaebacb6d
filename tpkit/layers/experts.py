"""One projection of all experts that a rank holds, computed for tokens that are sorted by expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.nn import functional as F

from tpkit.division import DividedLayer
from tpkit.errors import UsageError
from tpkit.layers.parallel import ParallelLinear

__all__ = ["ExpertLinear", "Sorted"]

#: what a grouped multiplication wants rows to be multiples of
ALIGNMENT = 16


@dataclass(frozen=True)
class Sorted:
    """Which rows of a matrix belong to which of this rank's experts: those of the first one first.

    Attributes:
        counts: ``[experts]`` int64, rows of each expert.
    """

    counts: torch.Tensor

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """``(expert, start, stop)`` of the experts that have any row."""
        found, start = [], 0
        for expert, count in enumerate(self.counts.tolist()):
            if count:
                found.append((expert, start, start + count))
            start += count
        return found

    @cached_property
    def ends(self) -> torch.Tensor:
        """``[experts]`` int32: one past the last row of each expert."""
        return self.counts.cumsum(0).to(torch.int32)

    @cached_property
    def of_row(self) -> torch.Tensor:
        """``[rows]`` int64: the expert of each row."""
        return torch.repeat_interleave(torch.arange(len(self.counts), device=self.counts.device), self.counts)


class ExpertLinear(nn.Module):
    """A projection of several experts; each is a projection of its own, and a quant method sees one at a time.

    Unquantised weights lie one behind the other, so that one grouped multiplication serves them all where torch has it
    for their type and sizes. Otherwise each expert that has tokens multiplies its own.

    Args:
        layer: the projection of all experts.
        rank: whose shard this is.
        experts: this rank's, in order.

    Attributes:
        first: number of the rank's first expert among all.
        total: how many there are on all ranks.
        leads: this rank counts what its group holds several times: the biases after a divided input.
        in_divided: the ranks of a group share the input's features (not with ``disable_tp``).
        in_features, out_sizes: of each expert, on this rank.
    """

    def __init__(self, layer: DividedLayer, rank: int, experts: Sequence[ParallelLinear]) -> None:
        super().__init__()
        numbers = layer.experts(rank)
        if numbers is None or layer.spec.experts is None:
            raise UsageError(f"{layer.spec.path or 'the layer'} is not of experts")
        if len(numbers) != len(experts):
            raise UsageError(f"{len(experts)} experts, rank {rank} holds {len(numbers)}")
        self.first, self.total, self.leads = numbers.start, layer.spec.experts.units, layer.leads(rank)
        self.in_divided = any(part.axis is not None and part.axis.divided for part in layer.spec.in_)
        for number, each in zip(numbers, experts, strict=True):
            self.add_module(str(number), each)
        self.out_sizes = layer.sizes(layer.spec.out, rank)
        self.in_features = sum(layer.sizes(layer.spec.in_, rank))
        self._stacks: dict[str, torch.Tensor] = {}
        #: where each expert's view of a stack begins
        self._begins: dict[str, list[int]] = {}

    def __iter__(self) -> Iterator[ParallelLinear]:
        for number, each in self._modules.items():
            if not isinstance(each, ParallelLinear):
                raise UsageError(f"expert {number} is a {type(each).__name__}, not a projection that tpkit made")
            yield each

    def __len__(self) -> int:
        return len(self._modules)

    @property
    def out_features(self) -> int:
        """Of each expert, on this rank."""
        return sum(self.out_sizes)

    def stack(self) -> None:
        """Gives the experts' parameters one tensor each, of which theirs are views."""
        experts = list(self)
        for name in [name for name, _ in experts[0].named_parameters(recurse=False)] if experts else []:
            one = experts[0].get_parameter(name)
            device = experts[0].sharded.device
            self._stacks[name] = torch.empty(len(experts), *one.shape, dtype=one.dtype, device=device)
            self._begins[name] = [view.data_ptr() for view in self._stacks[name]]
            for each, view in zip(experts, self._stacks[name], strict=True):
                each.hold(name, view)

    def forward(self, x: torch.Tensor, rows: Sorted, *, bias: bool = True) -> torch.Tensor:
        """Multiplies each row by its expert's weight.

        Args:
            x: ``[S, in]``, sorted by expert.
            rows: which are whose.
            bias: add the experts' biases, if they have any.

        Returns:
            ``[S, out]``: this rank's features of a divided output, its summand of a divided input.
        """
        if x.shape[-1] != self.in_features and len(self):
            raise UsageError(f"experts take {self.in_features} input features here, the input has {x.shape[-1]}")
        if not self.out_features or not self.in_features:
            y = x.new_zeros(len(x), self.out_features)
            return self._with_bias(y, rows) if bias and self.out_features else y
        weight = self._grouped(x)
        if weight is not None:
            y = F.grouped_mm(x, weight.transpose(1, 2), offs=rows.ends)
            return self._with_bias(y, rows) if bias else y
        experts = list(self)
        y = x.new_empty(len(x), self.out_features)
        for expert, start, stop in rows.runs:
            each = experts[expert]
            y[start:stop] = each._multiply(x[start:stop], each.bias if bias else None)
        return y

    def _with_bias(self, y: torch.Tensor, rows: Sorted) -> torch.Tensor:
        biases = [each.bias for each in self if each.bias is not None]
        if not biases:
            return y
        stacked = self._own("bias")
        return y + (torch.stack(list(biases)) if stacked is None else stacked)[rows.of_row]

    def _grouped(self, x: torch.Tensor) -> torch.Tensor | None:
        """Returns all weights ``[experts, out, in]`` where one grouped multiplication can take them."""
        weight = self._own("weight")
        if weight is None or weight.dtype != x.dtype or not hasattr(F, "grouped_mm") or not len(x):
            return None
        if x.is_cuda and (x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device) < (8, 0)):
            return None
        aligned = not any(size * x.element_size() % ALIGNMENT for size in weight.shape[1:])
        return weight if aligned and x.device.type in ("cpu", "cuda") else None

    def _own(self, name: str) -> torch.Tensor | None:
        """Returns the stack of a parameter, unless something has replaced an expert's view of it since."""
        stacked = self._stacks.get(name)
        if stacked is None:
            return None
        for each, begin in zip(self, self._begins[name], strict=True):
            held = each._parameters.get(name)
            if held is None or held.data_ptr() != begin or held.device != stacked.device:
                return None
        return stacked
