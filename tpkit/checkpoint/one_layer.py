"""Filling one layer from tensors in memory, by the plan that loads a model from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tpkit.checkpoint.load import check_range, load_model, parameter_of, process
from tpkit.checkpoint.plan import choose_form, plan_load
from tpkit.checkpoint.stored import Checkpoint, Stored
from tpkit.division import DividedLayer, with_form
from tpkit.dtypes import FLOATS, dtype_name
from tpkit.errors import LoadError
from tpkit.layout import Run, Source
from tpkit.params import ParamSpec, Segment

if TYPE_CHECKING:
    from tpkit.layers.expert_layers import ParallelExperts
    from tpkit.layers.sharded import Sharded, ShardedModule

__all__ = ["load_experts", "load_layer"]


class _TensorReader:
    """Reads boxes of tensors in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.bytes_read = 0
        self._tensors = tensors

    def read(self, name: str, stored: Stored, shape: Sequence[int], box: Sequence[Run]) -> torch.Tensor:
        whole = self._tensors[name].reshape(tuple(shape))
        return whole[tuple(slice(run.start, run.stop, run.step) for run in box)]

    def close(self) -> None:
        pass


def load_layer(module: ShardedModule, tensors: Mapping[str, torch.Tensor], *, pieces: bool = False) -> None:
    """Fills one layer from tensors in memory by the same plan; see `ShardedModule.load`."""
    path, rank = module.path, module.sharded.rank
    checkpoint = _in_memory(tensors)
    spec = module.sharded.layer.spec
    named = replace(spec, forms=tuple(map(_relative, spec.forms)))
    form = choose_form(named.forms, checkpoint)
    params = _asked_again(module.sharded, form, checkpoint)
    spec, named = replace(spec, params=params), replace(named, params=params)
    layer = with_form(module.sharded.layer, named, form)
    stored_as = replace(layer, spec=spec, form=spec.forms[named.forms.index(form)])
    if pieces:
        module.adopt(stored_as)
        _fill_pieces(module, layer, tensors)
        process(module)
        return
    plan = plan_load([layer], [], module.tp.size, checkpoint, description=module._name())
    module.adopt(stored_as)
    load_model(plan, rank, {path: module}, reader=_TensorReader(tensors))


def load_experts(module: ParallelExperts, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fills a rank's experts from tensors of all of them; see `load` of the layer."""
    sharded, checkpoint = module.sharded, _in_memory(tensors)
    spec, above = sharded.layer.spec, f"{sharded.layer.spec.path}."
    forms = tuple(tuple(replace(s, name=s.name.removeprefix(above)) for s in form) for form in spec.forms)
    form = choose_form(forms, checkpoint)
    named = replace(spec, forms=forms, params=_asked_again(sharded, form, checkpoint))
    layer = with_form(sharded.layer, named, form)
    modules = {}
    for each, (path, number) in zip(module, layer.units(sharded.rank), strict=True):
        each.adopt(layer.expert(number or 0))
        modules[path] = each
    plan = plan_load([layer], [], module.tp.size, checkpoint, description=spec.path)
    load_model(plan, sharded.rank, modules, reader=_TensorReader(tensors))


def _in_memory(tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
    """Returns what the headers of a file with these tensors would say."""
    headers = {
        name: Stored(dtype=dtype_name(t.dtype), shape=tuple(t.shape), file=Path("(memory)"), begin=0)
        for name, t in tensors.items()
    }
    return Checkpoint(Path("what is given"), headers)


def _asked_again(
    sharded: Sharded, form: tuple[Source, ...], checkpoint: Checkpoint
) -> tuple[tuple[str, ParamSpec], ...]:
    """Returns what the quant method declares, now that the stored headers are at hand."""
    linear, params = sharded.linear, sharded.layer.spec.params
    if sharded.method is None or linear is None:
        return params
    stored = {source.stem(0): checkpoint.headers(source) for source in form}
    return sharded.method.parameters(replace(linear, stored=stored), "bias" in dict(params))


def _relative(form: tuple[Source, ...]) -> tuple[Source, ...]:
    """Names the parts of a packed layer by their last component, and the only source of any other by nothing."""
    if len(form) == 1:
        return (replace(form[0], name=""),)
    return tuple(replace(source, name=source.name.rpartition(".")[2]) for source in form)


def _fill_pieces(module: ShardedModule, layer: DividedLayer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fills parameters from tensors that are this rank's already: each goes to the box its source has in them."""
    left = dict(tensors)
    groups: dict[str, list[str]] = {"missing": [], "wrong shape": [], "wrong type": [], "not in the layer": []}
    writes: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, on_disk, spec in layer.spec.stored:
        if spec.default is not None:
            parameter_of({layer.spec.path: module}, layer.spec.path, name).fill_(spec.default)
        for index, source in enumerate(layer.form):
            tensor = source.tensor(on_disk)
            piece = left.pop(tensor, None)
            if piece is None:
                if spec.default is None:
                    groups["missing"].append(tensor)
                continue
            if spec.is_blob:
                module.blobs.setdefault(name, {}).update(dict.fromkeys((part for part, _ in source.views), piece))
                continue
            goal = _piece_of(module, layer, name, index)
            if len(source.views) > 1 and spec.dims[:1] == (Segment(),) and piece.numel() * len(goal) == goal.numel():
                piece = piece.reshape(1, *goal.shape[1:]).expand_as(goal)  # one value for all parts, as on disk
            if [n for n in piece.shape if n != 1] != [n for n in goal.shape if n != 1] and (
                piece.numel() or goal.numel()
            ):
                held = f"rank {module.sharded.rank} holds {list(goal.shape)}"
                groups["wrong shape"].append(f"{tensor} is {list(piece.shape)}, {held}")
            stored = dtype_name(piece.dtype)
            if stored != spec.dtype and not {stored, spec.dtype} <= FLOATS:
                groups["wrong type"].append(f"{tensor} is {stored}, the layer holds {spec.dtype}")
            writes.append((goal, piece))
    groups["not in the layer"] = sorted(left)
    if any(groups.values()):
        raise LoadError(f"{module._name()} cannot take these pieces", groups)
    for goal, piece in writes:
        goal.copy_(piece.reshape(goal.shape))
        check_range("a piece", piece, goal)


def _piece_of(module: ShardedModule, layer: DividedLayer, name: str, index: int) -> torch.Tensor:
    """Returns the part of a parameter that one source fills on this rank."""
    held = parameter_of({layer.spec.path: module}, layer.spec.path, name)
    copies = layer.geometry.local[module.sharded.rank][name].copies
    boxes = [copy.target for copy in copies if copy.source == index]
    if not boxes:  # this rank got nothing of it
        return held.new_empty(0)
    return held[
        tuple(slice(min(r.start for r in runs), max(r.stop for r in runs)) for runs in zip(*boxes, strict=True))
    ]
