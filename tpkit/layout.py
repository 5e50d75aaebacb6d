"""How the parts of a projection lie on disk. Pure.

Layouts are declared, never guessed: shapes cannot tell ``[q; k; v]`` from rows interleaved per head. Every layout is
one primitive, a strided view of one dimension of a stored tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from tpkit.errors import ShardingError
from tpkit.params import ParamSpec
from tpkit.partition import Axis, Side, side_size

__all__ = ["EXPERT", "LayerSpec", "Run", "Source", "View", "apart", "fused", "join", "of_expert"]

#: stands for the number of an expert in the name of a source
EXPERT = "*"


def of_expert(name: str, expert: int) -> str:
    """Returns the name of one expert, for a name that stands for all; any other name stays."""
    return name.replace(EXPERT, str(expert))


@dataclass(frozen=True, slots=True)
class Run:
    """Indices ``start, start + step, ...``, `count` of them."""

    start: int
    count: int
    step: int = 1

    @property
    def stop(self) -> int:
        """One past the last index."""
        return self.start + (self.count - 1) * self.step + 1

    def indices(self) -> range:
        """Returns the indices, in order."""
        return range(self.start, self.stop, self.step)


@dataclass(frozen=True)
class View:
    """Where the logical index of a segment lies along one dimension of a source (as in ``torch.as_strided``).

    Logical index x, written in the mixed base `shape`, lies at ``start + sum(digit * stride)``.
    """

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        # dimensions of one element say nothing; without them a run is as long as it can be
        kept = [(n, s) for n, s in zip(self.shape, self.strides, strict=True) if n != 1] or [(prod(self.shape), 1)]
        object.__setattr__(self, "shape", tuple(n for n, _ in kept))
        object.__setattr__(self, "strides", tuple(s for _, s in kept))

    @property
    def size(self) -> int:
        """Elements of the segment."""
        return prod(self.shape)

    def runs(self, start: int, stop: int) -> list[Run]:
        """Returns where the logical elements ``start:stop`` lie, in logical order, as few runs as there are."""
        inner, step = self.shape[-1], self.strides[-1]
        found: list[Run] = []
        at = start
        while at < stop:
            outer, digit = divmod(at, inner)
            count = min(inner - digit, stop - at)
            offset = self.start + digit * step
            for size, stride in zip(reversed(self.shape[:-1]), reversed(self.strides[:-1]), strict=True):
                outer, index = divmod(outer, size)
                offset += index * stride
            found.append(Run(offset, count, step))
            at += count
        return join(found)


def join(runs: Sequence[Run]) -> list[Run]:
    """Joins neighbours that continue each other. Runs of one element fit any step."""
    joined: list[Run] = []
    for run in runs:
        if joined:
            last = joined[-1]
            step = run.start - last.start if last.count == 1 else last.step
            continues = run.start == last.start + last.count * step and (run.count == 1 or run.step == step)
            if step > 0 and continues:
                joined[-1] = Run(last.start, last.count + run.count, step)
                continue
        joined.append(run)
    return joined


@dataclass(frozen=True, kw_only=True)
class Source:
    """One name on disk that some segments of a layer's output come from.

    Attributes:
        name: the stem of its tensors' names, e.g. ``model.layers.0.self_attn.q_proj``.
        views: for each of its segments, where its elements lie along the output dimension.
        size: elements of that dimension in this source.
        stacked: its tensors hold all experts, along one dimension more that comes first.
        bare: its weight is called as it is itself, and its other tensors ``name_parameter``.
    """

    name: str
    views: tuple[tuple[str, View], ...]
    size: int
    stacked: bool = False
    bare: bool = False

    @property
    def numbered(self) -> bool:
        """Says that each expert has tensors of its own, with its number in their names."""
        return EXPERT in self.name  # no name on disk has that letter

    def stem(self, expert: int | None = None) -> str:
        """Returns what the names of its tensors begin with, for one expert."""
        return self.name if expert is None else of_expert(self.name, expert)

    def tensor(self, parameter: str, stem: str | None = None, expert: int | None = None) -> str:
        """Returns the name on disk of one of its tensors; `stem` is used in place of its own."""
        stem = self.stem(expert) if stem is None else stem
        if self.bare:
            return stem if parameter == "weight" else f"{stem}_{parameter}"
        return f"{stem}.{parameter}" if stem else parameter


def apart(names: Sequence[str], side: Side) -> tuple[Source, ...]:
    """Returns one source for each segment: the parts are stored apart, under their own names."""
    if len(names) != len(side):
        raise ShardingError(f"{len(names)} names {list(names)} for {len(side)} segments {[s.name for s in side]}")
    return tuple(
        Source(name=name, views=((part.name, View(0, (part.size,), (1,))),), size=part.size)
        for name, part in zip(names, side, strict=True)
    )


def fused(name: str, side: Side, order: Sequence[str] | None = None, repeat: int = 1) -> tuple[Source]:
    """Returns the one source of a layer that is stored fused.

    Args:
        name: the stem of its tensors' names.
        side: the layer's output segments.
        order: names of the segments in the order in which they are stored; None: as in `side`.
        repeat: the order recurs this many times, each with an equal piece of every segment: 1 for blocks
            ``[q; k; v]``, the number of heads for rows interleaved per head, of kv heads for grouped ones, the width
            for alternating channels.

    Raises:
        ShardingError: if the order does not name every segment once, or a segment does not come in equal pieces.
    """
    sizes = {part.name: part.size for part in side}
    order = list(sizes) if order is None else list(order)
    if sorted(order) != sorted(sizes):
        raise ShardingError(f"{name}: stored order {order} must name each of {list(sizes)} once")
    for part, size in sizes.items():
        if size % repeat:
            raise ShardingError(f"{name}: {size} rows of {part!r} do not come in {repeat} equal pieces")
    record = side_size(side) // repeat
    views, offset = [], 0
    for part in order:
        piece = sizes[part] // repeat
        views.append((part, View(offset, (repeat, piece), (record, 1))))
        offset += piece
    return (Source(name=name, views=tuple(views), size=record * repeat),)


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Everything that decides what the ranks hold of one layer, and where it is read from. Pure data.

    Attributes:
        path: dotted path of the module.
        out: segments of the output.
        in_: segments of the input; empty for norms and other parameters without one.
        forms: ways it may be stored, each a tuple of sources; the first whose tensors are found is taken.
        params: the stored parameters by name.
        style: for the printed plan.
        method: name of the quant method, for the printed plan.
        tied_to: path of the layer whose parameters it shares; it then has none of its own.
        experts: it stands for as many layers as this axis has units, all alike; everything else is said of one.
    """

    path: str
    out: Side
    in_: Side = ()
    forms: tuple[tuple[Source, ...], ...]
    params: tuple[tuple[str, ParamSpec], ...]
    style: str = "replicated"
    method: str = ""
    tied_to: str | None = None
    experts: Axis | None = None

    @property
    def stored(self) -> tuple[tuple[str, str, ParamSpec], ...]:
        """Returns what is read from a checkpoint: each parameter's name, its name on disk, and its spec."""
        return tuple((name, spec.stored or name, spec) for name, spec in self.params if not spec.made)

    def axes(self) -> set[Axis]:
        """Returns the axes that its sides lie on, and that of its experts."""
        own = {self.experts} if self.experts is not None else set()
        return own | {part.axis for part in (*self.out, *self.in_) if part.axis is not None}

    def unit(self, expert: int | None) -> str:
        """Returns the path of the module that is filled for an expert; None: for the layer, which has none."""
        return self.path if expert is None else f"{self.path}.{expert}"

    def names(self, form: Sequence[Source]) -> Iterator[str]:
        """Yields the names of all tensors on disk that the layer is made of, in one of its forms."""
        for source in form:
            for expert in self.numbers(source):
                yield from (source.tensor(on_disk, expert=expert) for _, on_disk, _ in self.stored)

    def numbers(self, source: Source) -> Sequence[int | None]:
        """Returns the experts that have tensors of their own in a source; None stands for all, or for no expert."""
        return range(self.experts.units) if self.experts is not None and source.numbered else (None,)

    def on_disk(self, spec: ParamSpec, source: Source, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a tensor on disk, for that of its dimensions as they are declared."""
        stack = (self.experts.units,) if self.experts is not None and source.stacked else ()
        return (*stack, *spec.on_disk(shape))
