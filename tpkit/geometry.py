"""From a ParamSpec and shares to local shapes and copies. Pure.

Each segment's share is sent through its view (runs of elements); each run is covered, along every dimension of the
ParamSpec, with whole cells (spans); copies are the products of spans. Where a cut falls inside a packed word, a
quantisation group or a block, a rank holds the cells that cover its share and its neighbour holds the shared one too:
that is exact for every method that dequantises. Source coordinates are used throughout, because the block grid of a
fused tensor runs on across its segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from tpkit.errors import PluginError
from tpkit.layout import Run, Source, join
from tpkit.params import Dim, ParamSpec
from tpkit.partition import Share, Side, side_size

__all__ = ["Box", "LocalCopy", "LocalParam", "Shares", "block_of_element", "localize", "stored_shape"]

#: the share of each segment's axis, for one side on one rank
Shares = tuple[Share | None, ...]

#: a box: one run per dimension
Box = tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """One box of a stored tensor and where it goes in the local parameter.

    Attributes:
        source: index of the source within the layer's form.
        box: runs along the dimensions of the stored tensor (in the ParamSpec's order, without Segment).
        target: runs of step 1 along the dimensions of the parameter.
    """

    source: int
    box: Box
    target: Box


@dataclass(frozen=True, slots=True)
class LocalParam:
    """A parameter on one rank."""

    shape: tuple[int, ...]
    copies: tuple[LocalCopy, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class _Span:
    """Cells of one dimension: a run in the source and where it begins in the parameter."""

    source: Run | None
    at: int
    count: int


def stored_shape(spec: ParamSpec, source: Source, in_size: int) -> tuple[int, ...]:
    """Returns the shape of a source's tensor in the ParamSpec's order; Segment is absent on disk."""
    sizes = {"out": source.size, "in": in_size, "flat": source.size * in_size}
    return tuple(
        dim.size if dim.along == "fixed" else dim.stored(sizes[dim.along])
        for dim in spec.dims
        if dim.along != "segment"
    )


@lru_cache(maxsize=65536)
def localize(
    spec: ParamSpec, out: Side, in_: Side, form: tuple[Source, ...], out_shares: Shares, in_shares: Shares
) -> LocalParam:
    """Returns the shape and copies of a parameter on the rank that has the given shares.

    Raises:
        PluginError: if the ParamSpec cannot serve a layer of these segments and sources.
    """
    _check(spec, len(form))
    if any(dim.along == "blob" for dim in spec.dims):
        return LocalParam((0,), ())  # handed over as stored, see `LoadPlan.blobs`
    in_runs = _in_runs(in_, in_shares)
    in_size = side_size(in_)
    sizes = [0] * len(spec.dims)
    copies: list[LocalCopy] = []
    for index, source in enumerate(form):
        out_runs = _out_runs(source, out, out_shares)
        spans: list[list[_Span]] = []
        for position, dim in enumerate(spec.dims):
            if dim.along == "segment":
                rows = [i for i, part in enumerate(out) if part.name in dict(source.views)]
                spans.append([_Span(None, row, 1) for row in rows])
                sizes[position] = len(out)
                continue
            runs = _runs_along(dim, out_runs, in_runs, in_size)
            offset = sizes[position] if dim.along in ("out", "flat") else 0
            spans.append(_spans(dim, runs, offset))
            sizes[position] = offset + sum(span.count for span in spans[-1])
        for chosen in product(*spans):
            box = tuple(span.source for span in chosen if span.source is not None)
            target = tuple(Run(span.at, span.count) for span in chosen)
            copies.append(LocalCopy(index, box, target))
    return LocalParam(tuple(sizes), tuple(copies))


def _check(spec: ParamSpec, sources: int) -> None:
    along = {dim.along for dim in spec.dims}
    if sources > 1 and not along & {"out", "flat", "segment", "blob"}:
        raise PluginError(
            f"a parameter with dims {spec.dims} cannot tell the {sources} parts of a packed layer apart",
            hint="give it a dimension along Out, Flat or Segment",
        )


def _in_runs(in_: Side, shares: Shares) -> list[Run]:
    runs, offset = [], 0
    for part, share in zip(in_, shares, strict=True):
        start, stop = part.bounds(share)
        if stop > start:
            runs.append(Run(offset + start, stop - start))
        offset += part.size
    return join(runs)


def _out_runs(source: Source, out: Side, shares: Shares) -> list[Run]:
    views = dict(source.views)
    runs: list[Run] = []
    for part, share in zip(out, shares, strict=True):
        if part.name in views:
            runs.extend(views[part.name].runs(*part.bounds(share)))
    return join(runs)


def _runs_along(dim: Dim, out_runs: list[Run], in_runs: list[Run], in_size: int) -> list[Run]:
    if dim.along == "out":
        return out_runs
    if dim.along == "in":
        return in_runs
    if dim.along == "fixed":
        return [Run(0, dim.size)]
    whole_rows = in_runs == [Run(0, in_size)]
    flat: list[Run] = []
    for run in out_runs:
        if whole_rows and run.step == 1:
            flat.append(Run(run.start * in_size, run.count * in_size))
        else:
            flat.extend(Run(row * in_size + r.start, r.count, r.step) for row in run.indices() for r in in_runs)
    return join(flat)


def _blocks(dim: Dim, runs: Sequence[Run]) -> list[Run]:
    """Covers runs of elements with whole blocks. Shared blocks come once, in the source's order."""
    if dim.per == 1:
        return list(runs)  # every element has cells of its own: logical order
    touched: list[Run] = []
    for run in runs:
        if run.step <= dim.per:
            first, last = run.start // dim.per, (run.stop - 1) // dim.per
            touched.append(Run(first, last - first + 1))
        else:
            touched.extend(Run(index // dim.per, 1) for index in run.indices())
    union: list[Run] = []
    for block in sorted(touched, key=lambda r: r.start):
        if union and block.start <= union[-1].stop:
            begin = union[-1].start
            union[-1] = Run(begin, max(union[-1].stop, block.stop) - begin)
        else:
            union.append(block)
    return union


def _spans(dim: Dim, runs: Sequence[Run], offset: int) -> list[_Span]:
    spans: list[_Span] = []
    for run in _blocks(dim, runs):
        pieces = [run] if run.step == 1 or dim.cells == 1 else [Run(i, 1) for i in run.indices()]
        for piece in pieces:
            cells = Run(piece.start * dim.cells, piece.count * dim.cells, piece.step if dim.cells == 1 else 1)
            spans.append(_Span(cells, offset, cells.count))
            offset += cells.count
    return spans


def block_of_element(
    dim: Dim, out: Side, in_: Side, form: tuple[Source, ...], out_shares: Shares, in_shares: Shares
) -> list[tuple[int, int]]:
    """Returns, for every local element along a dimension in logical order, its local block and place in that block.

    For ``per=1`` that is ``(i, 0)``. Where every cut falls on a block it is ``(i // per, i % per)``; elsewhere the
    pair tells which of the covering blocks holds the element: what dequantising a misaligned shard needs.
    """
    in_runs, in_size = _in_runs(in_, in_shares), side_size(in_)
    found: list[tuple[int, int]] = []
    base = 0
    for source in form if dim.along != "in" else form[:1]:
        runs = _runs_along(dim, _out_runs(source, out, out_shares), in_runs, in_size)
        if dim.per == 1:
            count = sum(run.count for run in runs)
            found.extend((base + i, 0) for i in range(count))
            base += count
            continue
        local = {block: base + i for i, block in enumerate(b for run in _blocks(dim, runs) for b in run.indices())}
        found.extend((local[i // dim.per], i % dim.per) for run in runs for i in run.indices())
        base += len(local)
    return found
