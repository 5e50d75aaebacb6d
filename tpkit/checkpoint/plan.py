"""The load plan: which box of which stored tensor goes where, on each rank. Pure data, proved before a byte is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from tpkit.checkpoint.findings import Findings
from tpkit.checkpoint.matching import match_layer, match_rest, match_ties, rules_of, untied_hint
from tpkit.checkpoint.stored import Checkpoint, Stored
from tpkit.division import DividedLayer
from tpkit.dtypes import itemsize
from tpkit.geometry import Box, stored_shape
from tpkit.layout import LayerSpec, Source
from tpkit.partition import side_size

__all__ = ["LoadPlan", "Transfer", "choose_form", "plan_load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One copy that one rank makes.

    Attributes:
        tensor: name on disk; `stored` says where.
        shape: the shape in which the box is meant (the stored one up to dimensions of one element).
        transposed: the box is in the reverse order of the stored dimensions.
        box: what is read.
        layer, param: where it goes; of experts, the one's module.
        stack: (number, of how many) where the tensor holds all experts and this is of one; the box is within that one.
        target: the box of the parameter that it fills.
    """

    tensor: str
    stored: Stored
    shape: tuple[int, ...]
    transposed: bool
    box: Box
    layer: str
    param: str
    target: Box
    stack: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes read."""
        return prod(run.count for run in self.box) * itemsize(self.stored.dtype)


@dataclass(kw_only=True)
class LoadPlan:
    """All transfers of a model, and what was found on the way.

    Attributes:
        layers: what every rank holds.
        ties: layers that share another's parameters.
        ranks: number of ranks.
        ignored: tensors left out by an ignore rule: name -> (rule, bytes).
        zero: biases that the description does not know; they must prove to be all zero.
        equal: stored copies of tied parameters that must prove equal: (tensor, tied layer, layer it shares).
        defaults: parameters absent from the checkpoint that take their stated default: layer -> param -> value.
        blobs: whole tensors handed over to a layer: layer -> [(param, segment, tensor, which expert's of a stack)].
        conversions: (stored dtype, parameter dtype) -> number of tensors.
    """

    layers: Sequence[DividedLayer]
    ties: Sequence[LayerSpec]
    ranks: int
    checkpoint: Checkpoint | None = None
    ignored: dict[str, tuple[str, int]] = field(default_factory=dict)
    zero: list[str] = field(default_factory=list)
    equal: list[tuple[str, LayerSpec, DividedLayer]] = field(default_factory=list)
    defaults: dict[str, dict[str, float]] = field(default_factory=dict)
    blobs: dict[str, list[tuple[str, str, str, int | None]]] = field(default_factory=dict)
    conversions: dict[tuple[str, str], int] = field(default_factory=dict)

    def units(self, rank: int) -> Iterator[str]:
        """Yields the paths of the modules that a rank fills, one for each of its experts."""
        for layer in self.layers:
            yield from (path for path, _ in layer.units(rank))

    def transfers(self, rank: int) -> Iterator[Transfer]:
        """Yields a rank's copies, layer by layer."""
        for layer in self.layers:
            yield from self.layer_transfers(layer, rank)

    def layer_transfers(self, layer: DividedLayer, rank: int, rename: str | None = None) -> Iterator[Transfer]:
        """Yields the copies of one layer; `rename` reads them from another stem (the copy of a tied parameter)."""
        for path, expert in layer.units(rank):
            yield from self._unit_transfers(layer, rank, path, expert, rename)

    def _unit_transfers(
        self, layer: DividedLayer, rank: int, path: str, expert: int | None, rename: str | None
    ) -> Iterator[Transfer]:
        if self.checkpoint is None:
            return
        for name, on_disk, spec in layer.spec.stored:
            for copy in layer.geometry.local[rank][name].copies:
                source = layer.form[copy.source]
                tensor = source.tensor(on_disk, rename, expert)
                if tensor in self.checkpoint.tensors and all(run.count for run in copy.box):
                    of = layer.spec.experts.units if layer.spec.experts is not None else 0
                    yield Transfer(
                        tensor=tensor,
                        stored=self.checkpoint.tensors[tensor],
                        shape=stored_shape(spec, source, side_size(layer.spec.in_)),
                        transposed=spec.transposed,
                        box=copy.box,
                        layer=path,
                        param=name,
                        target=copy.target,
                        stack=(expert, of) if source.stacked and expert is not None else None,
                    )

    def param_bytes(self, rank: int) -> int:
        """Bytes of parameters that a rank holds."""
        return sum(layer.geometry.nbytes[rank] for layer in self.layers)

    def checkpoint_bytes(self, rank: int) -> int:
        """Bytes of the checkpoint that a rank's copies read; from a plan without a checkpoint, its parameters' own."""
        if self.checkpoint is None:
            return self.param_bytes(rank)
        return sum(transfer.nbytes for transfer in self.transfers(rank))

    def replicated_bytes(self) -> int:
        """Bytes that ranks hold beyond one copy of everything."""
        held = sum(self.param_bytes(rank) for rank in range(self.ranks))
        return held - sum(layer.geometry.full_nbytes for layer in self.layers)

    def balance(self) -> float:
        """The largest rank's bytes over the mean."""
        held = [self.param_bytes(rank) for rank in range(self.ranks)]
        return max(held) * len(held) / sum(held) if sum(held) else 1.0


def choose_form(spec_forms: Sequence[tuple[Source, ...]], checkpoint: Checkpoint | None) -> tuple[Source, ...]:
    """Returns the form in which a layer is stored: the first of which any source is found, else the first."""
    if checkpoint is not None:
        for form in spec_forms:
            if any(checkpoint.has(source) for source in form):
                return form
    return spec_forms[0]


def plan_load(
    layers: Sequence[DividedLayer],
    ties: Sequence[LayerSpec],
    ranks: int,
    checkpoint: Checkpoint | None,
    ignore: Sequence[str] = (),
    description: str = "the description",
    *,
    accepted: Mapping[str, str] | None = None,
) -> LoadPlan:
    """Matches layers and stored tensors in both directions and proves the plan complete.

    Args:
        layers: divided layers that hold parameters.
        ties: layers that share another's parameters.
        ranks: number of ranks.
        checkpoint: stored tensors; None plans without one.
        ignore: patterns of tensors that may be there and are not used.
        description: name of the description, for messages.
        accepted: patterns of tensors that quant methods know and do not need, and their names.

    Raises:
        LoadError: missing, unexpected, doubly stored, wrongly shaped or typed tensors, and elements not written
            exactly once; all of them, grouped.
        SpecError: an ignore rule that covers a declared parameter.
    """
    plan = LoadPlan(layers=layers, ties=ties, ranks=ranks, checkpoint=checkpoint)
    findings = Findings()
    for layer in layers:
        findings.ledger(layer)
    if checkpoint is not None:
        used: set[str] = set()
        for layer in layers:
            used |= match_layer(plan, layer, checkpoint, findings)
        used |= match_ties(plan, ties, checkpoint, findings)
        findings.hint = untied_hint(layers, checkpoint)
        rules = rules_of(layers, ignore, accepted or {}, description)
        match_rest(plan, layers, checkpoint, used, rules, findings)
    findings.raise_if_any(checkpoint.path if checkpoint else None, description)
    return plan
