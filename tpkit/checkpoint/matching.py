"""Matching what layers are made of with what a checkpoint holds, in both directions. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from tpkit.checkpoint.findings import Findings, check_header, missing_line
from tpkit.checkpoint.stored import Checkpoint, listed, matcher
from tpkit.division import DividedLayer
from tpkit.errors import SpecError, did_you_mean
from tpkit.geometry import stored_shape
from tpkit.layout import LayerSpec, Source
from tpkit.params import ParamSpec
from tpkit.partition import side_size

if TYPE_CHECKING:
    from tpkit.checkpoint.plan import LoadPlan

__all__ = ["Rule", "match_layer", "match_rest", "match_ties", "rules_of", "untied_hint"]


def match_layer(plan: LoadPlan, layer: DividedLayer, checkpoint: Checkpoint, findings: Findings) -> set[str]:
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
                    _hand_over(plan, layer, name, source, tensor, expert, findings)
                    continue
                check_header(tensor, stored, param, shape, findings, spec)
                if stored.dtype != param.dtype:
                    key = (stored.dtype, param.dtype)
                    plan.conversions[key] = plan.conversions.get(key, 0) + 1
    return used


def _hand_over(
    plan: LoadPlan,
    layer: DividedLayer,
    name: str,
    source: Source,
    tensor: str,
    expert: int | None,
    findings: Findings,
) -> None:
    """Notes a whole tensor for a layer; a stacked one is cut into those of its experts."""
    spec, shape = layer.spec, plan.checkpoint.tensors[tensor].shape if plan.checkpoint else ()
    if not source.stacked or spec.experts is None:
        plan.blobs.setdefault(spec.unit(expert), []).extend(
            (name, segment, tensor, None) for segment, _ in source.views
        )
        return
    if shape[:1] != (spec.experts.units,):
        findings.add(
            "wrong shape", f"{tensor} is {list(shape)}, {spec.path} needs one for each of {spec.experts.units}"
        )
        return
    for number in range(spec.experts.units):
        rows = ((name, segment, tensor, number) for segment, _ in source.views)
        plan.blobs.setdefault(spec.unit(number), []).extend(rows)


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
        plan.defaults.setdefault(spec.unit(number), {})[name] = param.default


def _both_forms(layer: DividedLayer, checkpoint: Checkpoint, findings: Findings) -> None:
    found = [{source.stem(0) for source in form if checkpoint.has(source)} for form in layer.spec.forms]
    found = [names for names in found if names]
    if any(names != found[0] for names in found[1:]):
        names = " and ".join(listed(names) for names in found)
        findings.add("stored both fused and apart", f"{layer.spec.path}: {names}; one of them must go")


def match_ties(plan: LoadPlan, ties: Sequence[LayerSpec], checkpoint: Checkpoint, findings: Findings) -> set[str]:
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


def untied_hint(layers: Sequence[DividedLayer], checkpoint: Checkpoint) -> str | None:
    """Returns a hint where a head is not stored, but an embedding of its size is."""
    vocab = [layer for layer in layers if layer.spec.style == "vocab"]
    stored = {(layer.spec.out, layer.spec.in_): layer for layer in vocab if checkpoint.has(layer.form[0])}
    for layer in vocab:
        twin = stored.get((layer.spec.out, layer.spec.in_))
        if twin is not None and not checkpoint.has(layer.form[0]):
            return f"if {layer.spec.path} shares the weight of {twin.spec.path}, set tie_word_embeddings to true"
    return None


@dataclass(frozen=True, slots=True)
class Rule:
    """Which tensors may be there without being used, and who says so."""

    text: str
    pattern: re.Pattern[str]
    of_method: bool


def rules_of(
    layers: Sequence[DividedLayer], ignore: Sequence[str], accepted: Mapping[str, str], description: str
) -> list[Rule]:
    """Returns the rules of a description and of quant methods.

    Raises:
        SpecError: for a rule of the description that covers what it declares.
    """
    parameters = [name for layer in layers for name in layer.spec.names(layer.form)]
    rules = [Rule(text, matcher(text), False) for text in ignore]
    for rule in rules:
        covered = [name for name in parameters if rule.pattern.fullmatch(name)]
        if covered:
            raise SpecError(
                f"{description}: the ignore rule {rule.text!r} covers declared parameters: {listed(covered)}"
            )
    return rules + [Rule(f"{text} of {name}", matcher(text), True) for text, name in accepted.items()]


def match_rest(
    plan: LoadPlan,
    layers: Sequence[DividedLayer],
    checkpoint: Checkpoint,
    used: set[str],
    rules: Sequence[Rule],
    findings: Findings,
) -> None:
    """Accounts for the tensors that no layer uses: left out by a rule, a bias to prove zero, or not known."""
    built = {
        source.stem(expert)
        for layer in layers
        if layer.spec.in_
        for source in layer.form
        for expert in layer.spec.numbers(source)
    }
    absent = [name for layer in layers for name in layer.spec.names(layer.form) if name not in checkpoint.tensors]
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
