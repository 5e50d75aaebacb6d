"""Carrying out a load plan on one rank: every box is read where it lies and copied straight into its parameter."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from tpkit.checkpoint.memory import AnonymousMemory, give_back
from tpkit.checkpoint.plan import LoadPlan, Transfer
from tpkit.checkpoint.reader import MappedReader, Reader
from tpkit.checkpoint.stored import Stored
from tpkit.dtypes import dtype_name
from tpkit.errors import CheckpointError
from tpkit.layout import Run
from tpkit.quant.base import plugin_errors
from tpkit.quant.unquantized import Unquantized

if TYPE_CHECKING:
    from tpkit.layers.sharded import ShardedModule

__all__ = ["Loaded", "check_range", "load_model", "parameter_of", "process"]

#: elements copied at a time; bounds what a conversion or a copy to another device needs beside the parameter
CHUNK = 1 << 22
#: bytes that may move before memory is looked at, and before freed memory is given back: experts are many and small
UNSEEN = 1 << 20


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
    work = _Work(plan, rank, modules, reader)
    try:
        transfers = sorted(plan.transfers(rank), key=lambda t: (t.stored.file, t.stored.begin))
        left = Counter(transfer.layer for transfer in transfers)
        for path in [path for path in plan.units(rank) if not left[path]]:
            work.begin(path)
            work.finish(path)
        for transfer in transfers:
            work.begin(transfer.layer)
            _copy(transfer, parameter_of(modules, transfer.layer, transfer.param), reader, memory)
            left[transfer.layer] -= 1
            if not left[transfer.layer] and work.finish(transfer.layer) and memory is not None:
                memory.sample()
            if progress is not None:
                progress(reader.bytes_read)
        _check_zero(plan, reader)
    finally:
        reader.close()
    return Loaded(bytes_read=reader.bytes_read, seconds=time.perf_counter() - began)


class _Work:
    """Layers are finished one by one, so that what a quant method makes of one replaces it before the next is read."""

    def __init__(self, plan: LoadPlan, rank: int, modules: Mapping[str, ShardedModule], reader: Reader) -> None:
        self.plan, self.rank, self.modules, self.reader = plan, rank, modules, reader
        self.begun: set[str] = set()
        self.unseen = 0

    def begin(self, path: str) -> None:
        """Gives a layer its memory, and absent parameters their default."""
        if path in self.begun:
            return
        self.begun.add(path)
        self.modules[path].allocate()
        for name, value in self.plan.defaults.get(path, {}).items():
            parameter_of(self.modules, path, name).fill_(value)

    def finish(self, path: str) -> bool:
        """Hands over what is not sliced, compares a tied copy, and lets the quant method repack.

        Returns:
            whether so much is done since the last time that memory is worth a look.
        """
        module = self.modules[path]
        self.unseen += sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))
        for name, segment, tensor, expert in self.plan.blobs.get(path, ()):
            stored = _stored(self.plan, tensor)
            whole = [Run(0, n) for n in stored.shape]
            if expert is not None:
                whole[0] = Run(expert, 1)
            piece = self.reader.read(tensor, stored, stored.shape, tuple(whole)).clone()
            piece = piece if expert is None else piece[0]
            module.blobs.setdefault(name, {})[segment] = piece
        order = [part.name for part in module.sharded.layer.spec.out]
        for name, held in module.blobs.items():
            module.blobs[name] = {segment: held[segment] for segment in order if segment in held}
        _check_equal(self.plan, self.rank, path, self.modules, self.reader)
        process(module)
        if self.unseen < UNSEEN:
            return False
        self.unseen = 0
        give_back()  # what repacking took in passing would add up, layer by layer
        return True


def process(module: ShardedModule) -> None:
    """Lets the quant method of a filled layer repack it; a rank that holds nothing of it has nothing to repack."""
    method = module.quant_method
    if method is None and not module.is_tied:
        _check_numbers(module)
    if method is None or type(method) is Unquantized or module.is_tied:
        return
    if module.out_features and module.in_features:
        _check_finite(module)
        with plugin_errors(method, "process_weights_after_loading", module.path):
            method.process_weights_after_loading(module)


def _check_finite(module: ShardedModule) -> None:
    """A scale that is no number makes a row of the weight none; a model would run on, and say nothing."""
    for name, on_disk, spec in module.sharded.layer.spec.stored:
        if any(dim.word for dim in spec.dims) or spec.is_blob:
            continue  # codes, whatever type they are stored as
        parameter: torch.Tensor = getattr(module, name)
        lost = _not_numbers(parameter.detach(), spec.powers)
        if lost:
            stored = " or ".join(source.tensor(on_disk) for source in module.sharded.layer.form)
            raise CheckpointError(
                f"{module._name()}.{name}: {lost} of {parameter.numel()} values on rank "
                f"{module.sharded.rank} are NaN or infinite (stored as {stored})",
                hint="the checkpoint is damaged, or was quantised in a type too small for its scales",
            )


def _check_numbers(module: ShardedModule) -> None:
    """Norms and parameters of their own are few and small: a NaN in one of them is found at once."""
    for name, parameter in module.named_parameters(recurse=False):
        lost = int(parameter.isnan().sum()) if parameter.is_floating_point() and parameter.element_size() > 1 else 0
        if lost:
            raise CheckpointError(
                f"{module._name()}.{name}: {lost} of {parameter.numel()} values on rank {module.sharded.rank} are NaN",
                hint="the checkpoint is damaged",
            )


def _not_numbers(values: torch.Tensor, powers: bool) -> int:
    if powers and values.dtype == torch.uint8:
        return int((values == 255).sum())
    if not values.is_floating_point():
        return 0
    if values.element_size() > 1:
        return values.numel() - int(values.isfinite().sum())
    codes = values.view(torch.uint8)
    if values.dtype == torch.float8_e8m0fnu:
        return int((codes == 255).sum())
    return int(((codes & 127) >= (127 if values.dtype == torch.float8_e4m3fn else 124)).sum())


def _stored(plan: LoadPlan, tensor: str) -> Stored:
    if plan.checkpoint is None:
        raise CheckpointError(f"{tensor}: the plan was made without a checkpoint")
    return plan.checkpoint.tensors[tensor]


def parameter_of(modules: Mapping[str, ShardedModule], path: str, name: str) -> torch.Tensor:
    """Returns the parameter of a module that is to be filled."""
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
        check_range(f"{transfer.tensor} in {transfer.stored.file.name}", piece, goal)
        if memory is not None and piece.numel() * piece.element_size() >= UNSEEN:
            memory.sample()


def check_range(name: str, piece: torch.Tensor, goal: torch.Tensor) -> None:
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
    shape, box = transfer.shape, tuple(box)
    if transfer.transposed:
        shape, box = tuple(reversed(shape)), tuple(reversed(box))
    if transfer.stack is not None:
        number, of = transfer.stack
        piece = reader.read(transfer.tensor, transfer.stored, (of, *shape), (Run(number, 1), *box))[0]
    else:
        piece = reader.read(transfer.tensor, transfer.stored, shape, box)
    return piece.permute(*reversed(range(piece.ndim))) if transfer.transposed else piece


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


def _check_equal(plan: LoadPlan, rank: int, path: str, modules: Mapping[str, ShardedModule], reader: Reader) -> None:
    """A tied head that is stored all the same must be the embedding; each rank compares the shard it holds."""
    for tensor, tie, owner in plan.equal:
        if owner.spec.path != path:
            continue
        for transfer in plan.layer_transfers(owner, rank, rename=tie.forms[0][0].name):
            if transfer.tensor != tensor:
                continue
            name = transfer.param
            held = parameter_of(modules, owner.spec.path, name)
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
