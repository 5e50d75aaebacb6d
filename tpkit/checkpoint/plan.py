"""The load plan: which box of which stored tensor goes where, on each rank. Pure data, proved before a byte is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod

from tpkit.checkpoint.findings import Findings, check_header, missing_line
from tpkit.checkpoint.stored import Checkpoint, Stored, listed, matcher
from tpkit.division import DividedLayer
from tpkit.dtypes import itemsize
from tpkit.errors import SpecError, did_you_mean
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
        layer, param: where it goes.
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
        defaults: parameters absent from the checkpoint that take their stated default: (layer, param, value).
        blobs: whole tensors handed over to a layer: (layer, param, segment, tensor).
        conversions: (stored dtype, parameter dtype) -> number of tensors.
    """

    layers: Sequence[DividedLayer]
    ties: Sequence[LayerSpec]
    ranks: int
    checkpoint: Checkpoint | None = None
    ignored: dict[str, tuple[str, int]] = field(default_factory=dict)
    zero: list[str] = field(default_factory=list)
    equal: list[tuple[str, LayerSpec, DividedLayer]] = field(default_factory=list)
    defaults: list[tuple[str, str, float]] = field(default_factory=list)
    blobs: list[tuple[str, str, str, str]] = field(default_factory=list)
    conversions: dict[tuple[str, str], int] = field(default_factory=dict)

    def transfers(self, rank: int) -> Iterator[Transfer]:
        """Yields a rank's copies, layer by layer."""
        for layer in self.layers:
            yield from self.layer_transfers(layer, rank)

    def layer_transfers(self, layer: DividedLayer, rank: int, rename: str | None = None) -> Iterator[Transfer]:
        """Yields the copies of one layer; `rename` reads them from another stem (the copy of a tied parameter)."""
        if self.checkpoint is None:
            return
        for name, on_disk, spec in layer.spec.stored:
            for copy in layer.geometry.local[rank][name].copies:
                source = layer.form[copy.source]
                tensor = source.tensor(on_disk, rename)
                if tensor in self.checkpoint.tensors and all(run.count for run in copy.box):
                    yield Transfer(
                        tensor=tensor,
                        stored=self.checkpoint.tensors[tensor],
                        shape=stored_shape(spec, source, side_size(layer.spec.in_)),
                        transposed=spec.transposed,
                        box=copy.box,
                        layer=layer.spec.path,
                        param=name,
                        target=copy.target,
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
            if any(checkpoint.holds(source.name) for source in form):
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
            used |= _match_layer(plan, layer, checkpoint, findings)
        used |= _match_ties(plan, ties, checkpoint, findings)
        findings.hint = _untied(layers, checkpoint)
        rules = _rules(layers, ignore, accepted or {}, description)
        _match_rest(plan, layers, checkpoint, used, rules, findings)
    findings.raise_if_any(checkpoint.path if checkpoint else None, description)
    return plan


def _match_layer(plan: LoadPlan, layer: DividedLayer, checkpoint: Checkpoint, findings: Findings) -> set[str]:
    """Matches one layer's parameters with stored tensors; returns the tensors it uses."""
    used: set[str] = set()
    spec = layer.spec
    _both_forms(layer, checkpoint, findings)
    in_size = side_size(spec.in_)
    for name, on_disk, param in spec.stored:
        for source in layer.form:
            tensor = source.tensor(on_disk)
            stored = checkpoint.tensors.get(tensor)
            if stored is None:
                if param.default is None:
                    findings.add("missing", missing_line(tensor, spec, checkpoint, near=findings.shown("missing")))
                elif (spec.path, name, param.default) not in plan.defaults:
                    plan.defaults.append((spec.path, name, param.default))
                continue
            used.add(tensor)
            if param.is_blob:
                plan.blobs.extend((spec.path, name, segment, tensor) for segment, _ in source.views)
                continue
            check_header(tensor, stored, param, stored_shape(param, source, in_size), findings, spec)
            if stored.dtype != param.dtype:
                key = (stored.dtype, param.dtype)
                plan.conversions[key] = plan.conversions.get(key, 0) + 1
    return used


def _both_forms(layer: DividedLayer, checkpoint: Checkpoint, findings: Findings) -> None:
    found = [[source.name for source in form if checkpoint.holds(source.name)] for form in layer.spec.forms]
    found = [names for names in found if names]
    if len(found) > 1:
        names = " and ".join(listed(names) for names in found)
        findings.add("stored both fused and apart", f"{layer.spec.path}: {names}; one of them must go")


def _match_ties(plan: LoadPlan, ties: Sequence[LayerSpec], checkpoint: Checkpoint, findings: Findings) -> set[str]:
    """A tied layer's own tensor may be stored all the same: then it must prove equal to what it shares."""
    by_path = {layer.spec.path: layer for layer in plan.layers}
    used: set[str] = set()
    for tie in ties:
        owner = by_path[tie.tied_to or ""]
        stem = tie.forms[0][0].name
        for _, on_disk, param in owner.spec.stored:
            twin, tensor = owner.form[0].tensor(on_disk), owner.form[0].tensor(on_disk, stem)
            if tensor in checkpoint.tensors and twin in checkpoint.tensors:
                shape = stored_shape(param, owner.form[0], side_size(owner.spec.in_))
                check_header(tensor, checkpoint.tensors[tensor], param, shape, findings, tie)
                plan.equal.append((tensor, tie, owner))
                used.add(tensor)
    return used


def _untied(layers: Sequence[DividedLayer], checkpoint: Checkpoint) -> str | None:
    """Returns a hint where a head is not stored, but an embedding of its size is."""
    vocab = [layer for layer in layers if layer.spec.style == "vocab"]
    stored = {(layer.spec.out, layer.spec.in_): layer for layer in vocab if checkpoint.holds(layer.form[0].name)}
    for layer in vocab:
        twin = stored.get((layer.spec.out, layer.spec.in_))
        if twin is not None and not checkpoint.holds(layer.form[0].name):
            return f"if {layer.spec.path} shares the weight of {twin.spec.path}, set tie_word_embeddings to true"
    return None


@dataclass(frozen=True, slots=True)
class _Rule:
    """Which tensors may be there without being used, and who says so."""

    text: str
    pattern: re.Pattern[str]
    of_method: bool


def _rules(
    layers: Sequence[DividedLayer], ignore: Sequence[str], accepted: Mapping[str, str], description: str
) -> list[_Rule]:
    parameters = [
        source.tensor(on_disk) for layer in layers for source in layer.form for _, on_disk, _ in layer.spec.stored
    ]
    rules = [_Rule(text, matcher(text), False) for text in ignore]
    for rule in rules:
        covered = [name for name in parameters if rule.pattern.fullmatch(name)]
        if covered:
            raise SpecError(
                f"{description}: the ignore rule {rule.text!r} covers declared parameters: {listed(covered)}"
            )
    return rules + [_Rule(f"{text} of {name}", matcher(text), True) for text, name in accepted.items()]


def _match_rest(
    plan: LoadPlan,
    layers: Sequence[DividedLayer],
    checkpoint: Checkpoint,
    used: set[str],
    rules: Sequence[_Rule],
    findings: Findings,
) -> None:
    built = {source.name for layer in layers if layer.spec.in_ for source in layer.form}
    absent = [
        tensor
        for layer in layers
        for source in layer.form
        for _, on_disk, _ in layer.spec.stored
        if (tensor := source.tensor(on_disk)) not in checkpoint.tensors
    ]
    for name, stored in checkpoint.tensors.items():
        if name in used:
            continue
        stem, _, last = name.rpartition(".")
        # what lies below a projection that is built belongs to its weight: a scale is never to be ignored
        below = any(above in built for above in accumulate(name.split(".")[:-1], "{}.{}".format))
        rule = next((r for r in rules if r.pattern.fullmatch(name)), None)
        if rule is not None and (rule.of_method or not below):
            plan.ignored[name] = (rule.text, stored.nbytes)
        elif last == "bias" and stem in built:
            plan.zero.append(name)
        else:
            near = did_you_mean(name, absent) if findings.shown("not in the description") else ""
            if rule is not None:
                near = f" (the ignore rule {rule.text} cannot leave out what belongs to a projection)"
            findings.add("not in the description", f"{name} {stored.dtype} {list(stored.shape)}{near}")
