"""Checks a description in stages, each of which tells all it finds: alone, with a config.json, with a checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpkit.errors import CheckpointError, LoadError, SpecError, TpkitError
from tpkit.spec import BoundSpec, Description, describe
from tpkit.spec.overrides import split_overrides

if TYPE_CHECKING:
    from tpkit.checkpoint.stored import Checkpoint
    from tpkit.planning import ModelPlan, Prepared

__all__ = ["Stage", "check"]


@dataclass
class Stage:
    """What one stage looked at and found.

    Attributes:
        name: what was checked.
        facts: numbers of it, for people.
        problems: one line each, with file, line and column where a line of the description is to blame.
        hint: what to do about them.
        exit_code: of the command line; 0 if nothing is wrong.
    """

    name: str
    facts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    hint: str | None = None
    exit_code: int = 0


def check(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    config: Path | None = None,
    checkpoint: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    quant: str | Mapping[str, Any] | None = None,
) -> list[Stage]:
    """Checks a description as far as what is given allows. What is wrong ends the stages, never raises.

    Args:
        source: as `tpkit.load_spec` takes it.
        config: config.json or its folder; None: the description is checked alone, in all branches.
        checkpoint: folder or file with the weights, or with an index without weights.
        overrides: as `tpkit.load_spec` takes them.
        quant: as `tpkit.load_spec` takes it.

    Returns:
        The stages that were reached; the last one may have problems.
    """
    stages: list[Stage] = []
    fields, _ = split_overrides(overrides)
    made = _stage(stages, "description", lambda stage: _described(stage, source, overrides))
    if made is None or config is None:
        return stages
    spec = _stage(stages, "config.json", lambda stage: _bound(stage, made, config, fields, quant))
    if spec is not None:
        _stage(stages, "checkpoint" if checkpoint else "plan", lambda stage: _planned(stage, spec, checkpoint))
    return stages


def _stage(stages: list[Stage], name: str, work: Callable[[Stage], Any]) -> Any:
    """Runs one stage; returns its result, None where it found problems."""
    stage = Stage(name)
    stages.append(stage)
    try:
        return work(stage)
    except TpkitError as error:
        stage.exit_code, stage.hint = error.exit_code, error.hint
        stage.problems += _lines(error)
        return None


def _lines(error: TpkitError) -> Iterable[str]:
    if isinstance(error, LoadError):
        return [f"{heading}: {line}" if heading else line for heading, lines in error.groups.items() for line in lines]
    if isinstance(error, SpecError) and error.problems:
        return error.problems
    return [error.message]


def _described(stage: Stage, source: Any, overrides: Mapping[str, Any] | None) -> Description:
    made = describe(source, overrides=overrides)
    nodes = list(made.tree.walk())[1:]
    names = len(made.declarations.fields)
    stage.facts += [made.source, f"{names} declared names, {len(nodes)} nodes in all branches"]
    return made


def _bound(
    stage: Stage, made: Description, config: Path, fields: Mapping[str, Any], quant: str | Mapping[str, Any] | None
) -> BoundSpec:
    spec = made.bind(config, fields, quant)
    sizes = ("num_hidden_layers", "hidden_size", "vocab_size")
    told = [f"{name} {spec.values[name]}" for name in sizes if name in spec.values]
    stage.facts += [str(config), ", ".join([spec.family, *told])]
    return spec


def _planned(stage: Stage, spec: BoundSpec, path: Path | None) -> ModelPlan:
    """Plans the model on one rank, which proves that every tensor is bound or ignored."""
    from tpkit.checkpoint.names import index_alone
    from tpkit.checkpoint.open import open_checkpoint
    from tpkit.planning import prepare

    stored = None
    if path is not None:
        if not path.exists():
            raise CheckpointError(f"no checkpoint at {path}: there is no such file or folder")
        names = index_alone(path if path.is_dir() or path.suffix == ".json" else path.parent)
        if names is not None:
            return _by_index(stage, spec, names)
        stored = open_checkpoint(path)
    prepared = prepare(spec, checkpoint=stored)
    plan = _divided(prepared, spec, stored)
    stage.facts += (
        _told(plan)
        if stored
        else [f"{len(plan.load.layers)} layers with parameters, {_human(plan.load.param_bytes(0))}"]
    )
    return plan


def _by_index(stage: Stage, spec: BoundSpec, index: Checkpoint) -> ModelPlan:
    """Compares names alone: each named tensor is given the type and shape that the description wants of it."""
    from dataclasses import replace

    from tpkit.planning import prepare

    dtype = prepare(spec).dtype  # an index tells no type: config.json does
    wanted = _wanted(prepare(spec, checkpoint=index, dtype=dtype))
    tensors = {name: replace(wanted.get(name, stored), file=stored.file) for name, stored in index.tensors.items()}
    stored = replace(index, tensors=tensors)
    plan = _divided(prepare(spec, checkpoint=stored, dtype=dtype), spec, stored, shapes=False)
    stage.facts += _told(plan)
    stage.facts.append("names alone: not all files of the index are there, so shapes and types were not compared")
    needed = sum(each.nbytes for name, each in tensors.items() if name in wanted)
    if index.total_size is not None:
        stage.facts.append(f"the index states {index.total_size} bytes; what is read is {needed} in {plan.dtype}")
        if needed != index.total_size:
            stage.facts.append(
                "these differ: a size, the type, or what is stored twice or packed may not be as described"
            )
    return plan


def _wanted(prepared: Prepared) -> dict[str, Any]:
    """Returns the header that every tensor should have, by name, in every form in which a layer may be stored."""
    from tpkit.checkpoint.stored import Stored
    from tpkit.geometry import stored_shape
    from tpkit.partition import side_size

    owners = {each.spec.path: each.spec for each in prepared.planned}
    found: dict[str, Any] = {}
    layers = [*owners.values(), *prepared.ties]
    for layer in layers:
        owner = owners.get(layer.tied_to or "", layer)
        for _, on_disk, param in owner.stored:
            for source in (source for form in layer.forms for source in form):
                shape = owner.on_disk(param, source, stored_shape(param, source, side_size(owner.in_)))
                header = Stored(dtype=param.dtype, shape=shape, file=Path("(index)"), begin=0)
                found.update((source.tensor(on_disk, expert=n), header) for n in layer.numbers(source))
    return found


def _divided(prepared: Prepared, spec: BoundSpec, stored: Checkpoint | None, shapes: bool = True) -> ModelPlan:
    """Proves the plan; findings about a tensor are given the line of the description that declares it."""
    try:
        return prepared.divide(1)
    except LoadError as error:
        places = _places(prepared, spec)
        found = [
            _placed(heading, line if shapes else _nameless(line), places)
            for heading, lines in error.groups.items()
            for line in lines
        ]
        where = str(stored.path) if stored else spec.source
        raise LoadError(f"{where} does not fit", {"": found}, hint=error.hint) from None


def _nameless(line: str) -> str:
    """Returns a finding about a name without the type and shape, which nobody knows."""
    return re.sub(r"^(\S+) \w+ \[[\d, ]*\]", r"\1", line)


def _places(prepared: Prepared, spec: BoundSpec) -> dict[str, str]:
    lines = {node.path: node.where for node in spec.root.walk()}
    layers = [*(each.spec for each in prepared.planned), *prepared.ties]
    found = {}
    for layer in layers:
        stem, path = layer.path, layer.path
        while path and not lines.get(path):
            path = path.rpartition(".")[0]
        sources = (source for form in layer.forms for source in form)
        for name in [stem, *(source.stem(n) for source in sources for n in layer.numbers(source))]:
            found[name] = lines.get(path, "")
    return found


def _placed(heading: str, line: str, places: Mapping[str, str]) -> str:
    stem = line.split(maxsplit=1)[0].rstrip(":,;")
    while stem:
        if places.get(stem):
            return f"{places[stem]}: {heading}: {line}"
        stem = stem.rpartition(".")[0]
    return f"{heading}: {line}"


def _told(plan: ModelPlan) -> list[str]:
    stored = plan.load.checkpoint
    if stored is None:
        return []
    ignored, size = len(plan.load.ignored), sum(each.nbytes for each in stored.tensors.values())
    files = len({each.file for each in stored.tensors.values()})
    facts = [str(stored.path), f"{len(stored.tensors)} tensors in {files} file{'s' * (files != 1)}, {_human(size)}"]
    used = f"{len(stored.tensors) - ignored} bound, {ignored} ignored by rule"
    if plan.load.zero:
        used += f", {len(plan.load.zero)} biases that must prove to be zero while loading"
    if plan.load.equal:
        used += f", {len(plan.load.equal)} copies of tied weights that must prove equal while loading"
    return [*facts, used]


def _human(size: int) -> str:
    from tpkit.report import human

    return human(size)
