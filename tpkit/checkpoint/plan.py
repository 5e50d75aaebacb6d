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
from tpkit.params import ParamSpec
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
        blobs: whole tensors handed over to a layer: layer -> [(param, segment, tensor)].
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
    blobs: dict[str, list[tuple[str, str, str]]] = field(default_factory=dict)
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
            shape = () if param.is_blob else spec.on_disk(param, source, stored_shape(param, source, in_size))
            for expert in spec.numbers(source):
                tensor = source.tensor(on_disk, expert=expert)
                stored = checkpoint.tensors.get(tensor)
                if stored is None:
                    _absent(plan, layer, name, param, tensor, expert, findings)
                    continue
                used.add(tensor)
                if param.is_blob:
                    path = spec.path if expert is None else f"{spec.path}.{expert}"
                    plan.blobs.setdefault(path, []).extend((name, segment, tensor) for segment, _ in source.views)
                    continue
                check_header(tensor, stored, param, shape, findings, spec)
                if stored.dtype != param.dtype:
                    key = (stored.dtype, param.dtype)
                    plan.conversions[key] = plan.conversions.get(key, 0) + 1
    return used


def _absent(
    plan: LoadPlan,
    layer: DividedLayer,
    name: str,
    param: ParamSpec,
    tensor: str,
    expert: int | None,
    findings: Findings,
) -> None:
    """Notes a tensor that is not stored: a default stands for it, or it is missing."""
    spec = layer.spec
    if param.default is None:
        checkpoint = plan.checkpoint
        assert checkpoint is not None  # noqa: S101 - only then tensors are matched
        findings.add("missing", missing_line(tensor, spec, checkpoint, near=findings.shown("missing")))
        return
    numbers = range(spec.experts.units) if spec.experts is not None and expert is None else (expert,)
    for number in numbers:
        path = spec.path if number is None else f"{spec.path}.{number}"
        plan.defaults.setdefault(path, {})[name] = param.default


def _both_forms(layer: DividedLayer, checkpoint: Checkpoint, findings: Findings) -> None:
    found = [{source.stem(0) for source in form if checkpoint.has(source)} for form in layer.spec.forms]
    found = [names for names in found if names]
    if any(names != found[0] for names in found[1:]):
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
                shape = param.on_disk(stored_shape(param, owner.form[0], side_size(owner.spec.in_)))
                check_header(tensor, checkpoint.tensors[tensor], param, shape, findings, tie)
                plan.equal.append((tensor, tie, owner))
                used.add(tensor)
    return used


def _untied(layers: Sequence[DividedLayer], checkpoint: Checkpoint) -> str | None:
    """Returns a hint where a head is not stored, but an embedding of its size is."""
    vocab = [layer for layer in layers if layer.spec.style == "vocab"]
    stored = {(layer.spec.out, layer.spec.in_): layer for layer in vocab if checkpoint.has(layer.form[0])}
    for layer in vocab:
        twin = stored.get((layer.spec.out, layer.spec.in_))
        if twin is not None and not checkpoint.has(layer.form[0]):
            return f"if {layer.spec.path} shares the weight of {twin.spec.path}, set tie_word_embeddings to true"
    return None


def _names(layer: DividedLayer) -> Iterator[str]:
    """Yields the names of all tensors on disk that a layer is made of."""
    for source in layer.form:
        for expert in layer.spec.numbers(source):
            yield from (source.tensor(on_disk, expert=expert) for _, on_disk, _ in layer.spec.stored)


@dataclass(frozen=True, slots=True)
class _Rule:
    """Which tensors may be there without being used, and who says so."""

    text: str
    pattern: re.Pattern[str]
    of_method: bool


def _rules(
    layers: Sequence[DividedLayer], ignore: Sequence[str], accepted: Mapping[str, str], description: str
) -> list[_Rule]:
    parameters = [name for layer in layers for name in _names(layer)]
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
    built = {
        source.stem(expert)
        for layer in layers
        if layer.spec.in_
        for source in layer.form
        for expert in layer.spec.numbers(source)
    }
    absent = [name for layer in layers for name in _names(layer) if name not in checkpoint.tensors]
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
