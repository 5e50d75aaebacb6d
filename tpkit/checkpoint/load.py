"""Carrying out a load plan on one rank: every box is read where it lies and copied straight into its parameter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from tpkit.checkpoint.memory import AnonymousMemory
from tpkit.checkpoint.plan import LoadPlan, Transfer, choose_form, plan_load
from tpkit.checkpoint.reader import MappedReader, Reader
from tpkit.checkpoint.stored import Checkpoint, Stored
from tpkit.division import DividedLayer, with_form
from tpkit.dtypes import FLOATS, dtype_name
from tpkit.errors import CheckpointError, LoadError
from tpkit.layout import Run, Source
from tpkit.quant.base import plugin_errors

if TYPE_CHECKING:
    from tpkit.layers.sharded import ShardedModule

__all__ = ["Loaded", "load_layer", "load_model"]

#: elements copied at a time; bounds what a conversion or a copy to another device needs beside the parameter
CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What loading took on this rank.

    Attributes:
        bytes_read: bytes asked of the checkpoint.
        seconds: from the first byte to the last repacked weight.
    """

    bytes_read: int
    seconds: float


def load_model(
    plan: LoadPlan,
    rank: int,
    modules: Mapping[str, ShardedModule],
    *,
    reader: Reader | None = None,
    progress: Callable[[int], None] | None = None,
    memory: AnonymousMemory | None = None,
) -> Loaded:
    """Fills a rank's modules.

    Args:
        plan: the proved plan.
        rank: whose part of it.
        modules: the modules with parameters, by path.
        reader: where bytes come from; None: the files, mapped.
        progress: called with the bytes read so far.
        memory: is told where memory may be at its highest.

    Raises:
        CheckpointError: a bias unknown to the description that is not zero, a tied head that differs.
    """
    began = time.perf_counter()
    reader = reader or MappedReader()
    if plan.checkpoint is not None:
        plan.checkpoint.check_unchanged()
    try:
        transfers = sorted(plan.transfers(rank), key=lambda t: (t.stored.file, t.stored.begin))
        for transfer in transfers:
            _copy(transfer, _parameter(modules, transfer.layer, transfer.param), reader, memory)
            if progress is not None:
                progress(reader.bytes_read)
        for path, name, value in plan.defaults:
            _parameter(modules, path, name).data.fill_(value)
        for path, name, segment, tensor in plan.blobs:
            stored = _stored(plan, tensor)
            whole = tuple(Run(0, n) for n in stored.shape)
            modules[path].blobs.setdefault(name, {})[segment] = reader.read(tensor, stored, stored.shape, whole).clone()
        _check_zero(plan, reader)
        _check_equal(plan, rank, modules, reader)
    finally:
        reader.close()
    for path, module in modules.items():
        if module.quant_method is not None:
            with plugin_errors(module.quant_method, "process_weights_after_loading", path):
                module.quant_method.process_weights_after_loading(module)
    return Loaded(bytes_read=reader.bytes_read, seconds=time.perf_counter() - began)


def _stored(plan: LoadPlan, tensor: str) -> Stored:
    if plan.checkpoint is None:
        raise CheckpointError(f"{tensor}: the plan was made without a checkpoint")
    return plan.checkpoint.tensors[tensor]


def _parameter(modules: Mapping[str, ShardedModule], path: str, name: str) -> torch.Tensor:
    found = getattr(modules[path], name)
    if not isinstance(found, nn.Parameter):
        raise CheckpointError(f"{path} has no parameter {name!r} to fill")
    return found.data


def _copy(transfer: Transfer, parameter: torch.Tensor, reader: Reader, memory: AnonymousMemory | None) -> None:
    target = parameter[tuple(slice(run.start, run.stop) for run in transfer.target)]
    for box, rows in _chunks(transfer):
        piece = _read(transfer, box, reader)
        goal = target if rows is None else target[rows[0] : rows[1]]
        if piece.numel() != goal.numel():  # a plain assignment would broadcast
            raise CheckpointError(
                f"{transfer.tensor}: {list(piece.shape)} read for {list(goal.shape)} of {transfer.layer}"
            )
        goal.copy_(piece.reshape(goal.shape))
        _check_range(f"{transfer.tensor} in {transfer.stored.file.name}", piece, goal)
        if memory is not None:
            memory.sample()


def _check_range(name: str, piece: torch.Tensor, goal: torch.Tensor) -> None:
    """A value beyond the narrower type's end would become infinite without a word."""
    if not (piece.is_floating_point() and goal.is_floating_point()):
        return
    end = torch.finfo(goal.dtype).max
    if torch.finfo(piece.dtype).max <= end or bool(goal.isfinite().all()):
        return
    lost = piece.isfinite().reshape(goal.shape).to(goal.device) & ~goal.isfinite()
    if bool(lost.any()):
        raise CheckpointError(
            f"{name} has {int(lost.sum())} values beyond {end:g}, where {dtype_name(goal.dtype)} ends",
            hint="build it in a dtype that holds them: bfloat16 or float32",
        )


def _chunks(transfer: Transfer) -> Iterable[tuple[Sequence[Run], tuple[int, int] | None]]:
    """Cuts a large box along its first dimension, where that is also the target's first."""
    box, target = transfer.box, transfer.target
    elements = 1
    for run in box:
        elements *= run.count
    if elements <= CHUNK or len(box) != len(target) or box[0].count != target[0].count:
        yield box, None
        return
    rows = max(1, CHUNK * box[0].count // elements)
    for first in range(0, box[0].count, rows):
        count = min(rows, box[0].count - first)
        run = Run(box[0].start + first * box[0].step, count, box[0].step)
        yield (run, *box[1:]), (first, first + count)


def _read(transfer: Transfer, box: Sequence[Run], reader: Reader) -> torch.Tensor:
    if not transfer.transposed:
        return reader.read(transfer.tensor, transfer.stored, transfer.shape, tuple(box))
    shape, box = tuple(reversed(transfer.shape)), tuple(reversed(box))
    piece = reader.read(transfer.tensor, transfer.stored, shape, box)
    return piece.permute(*reversed(range(piece.ndim)))


def _check_zero(plan: LoadPlan, reader: Reader) -> None:
    """Quantisers write zero biases for layers that have none. A bias that is not zero would be left out silently."""
    for name in plan.zero:
        stored = _stored(plan, name)
        values = reader.read(name, stored, stored.shape, tuple(Run(0, n) for n in stored.shape))
        values = values.float()  # float8 does not count
        if bool(values.count_nonzero()):
            raise CheckpointError(
                f"{name} in {stored.file.name} is not in the description, and {int(values.count_nonzero())} of its "
                f"{values.numel()} values are not zero",
                hint="this checkpoint needs a description with this bias",
            )


def _check_equal(plan: LoadPlan, rank: int, modules: Mapping[str, ShardedModule], reader: Reader) -> None:
    """A tied head that is stored all the same must be the embedding; each rank compares the shard it holds."""
    for tensor, tie, owner in plan.equal:
        stem, _, name = tensor.rpartition(".")
        for transfer in plan.layer_transfers(owner, rank, rename=stem):
            if transfer.param != name:
                continue
            held = _parameter(modules, owner.spec.path, name)
            target = held[tuple(slice(run.start, run.stop) for run in transfer.target)]
            for box, rows in _chunks(transfer):
                goal = target if rows is None else target[rows[0] : rows[1]]
                stored = _read(transfer, box, reader).reshape(goal.shape).to(device=goal.device, dtype=goal.dtype)
                if not bool(((stored == goal) | (stored.isnan() & goal.isnan())).all()):
                    raise CheckpointError(
                        f"{tensor} in {transfer.stored.file.name} is not equal to the weight of {owner.spec.path}, but "
                        f"the configuration ties {tie.path} to it",
                        hint="set tie_word_embeddings to false to use the stored head",
                    )


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
    path, rank = module.sharded.layer.spec.path, module.sharded.rank
    headers = {
        name: Stored(dtype=dtype_name(t.dtype), shape=tuple(t.shape), file=Path("(memory)"), begin=0)
        for name, t in tensors.items()
    }
    name = path or type(module).__name__
    checkpoint = Checkpoint(Path("what is given"), headers)
    spec = module.sharded.layer.spec
    named = replace(spec, forms=tuple(map(_relative, spec.forms)))
    form = choose_form(named.forms, checkpoint)
    layer = with_form(module.sharded.layer, named, form)
    stored_as = replace(layer, spec=spec, form=spec.forms[named.forms.index(form)])
    if pieces:
        module.adopt(stored_as)
        _fill_pieces(module, layer, tensors)
        return
    plan = plan_load([layer], [], module.tp.size, checkpoint, description=name)
    module.adopt(stored_as)
    load_model(plan, rank, {path: module}, reader=_TensorReader(tensors))


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
    for name, spec in layer.spec.params:
        for index, source in enumerate(layer.form):
            tensor, goal = source.tensor(name), _piece_of(module, layer, name, index)
            piece = left.pop(tensor, None)
            if piece is None:
                groups["missing"].append(tensor)
                continue
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
        raise LoadError(f"{layer.spec.path or type(module).__name__} cannot take these pieces", groups)
    for goal, piece in writes:
        goal.copy_(piece.reshape(goal.shape))
        _check_range("a piece", piece, goal)


def _piece_of(module: ShardedModule, layer: DividedLayer, name: str, index: int) -> torch.Tensor:
    """Returns the part of a parameter that one source fills on this rank."""
    held = _parameter({layer.spec.path: module}, layer.spec.path, name)
    copies = layer.geometry.local[module.sharded.rank][name].copies
    boxes = [copy.target for copy in copies if copy.source == index]
    if not boxes:  # this rank got nothing of it
        return held.new_empty(0)
    return held[
        tuple(slice(min(r.start for r in runs), max(r.stop for r in runs)) for runs in zip(*boxes, strict=True))
    ]
