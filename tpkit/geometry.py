"""From a ParamSpec and shares to local shapes and copies. Pure.

Each segment's share is sent through its view (runs of elements); each run is covered, along every dimension of the
ParamSpec, with whole cells (spans); copies are the products of spans. Where a cut falls inside a packed word, a
quantisation group or a block, a rank holds the cells that cover its share and its neighbour holds the shared one too:
that is exact for every method that dequantises. Source coordinates are used throughout, because the block grid of a
fused tensor runs on across its segments.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from tpkit.errors import PluginError
from tpkit.layout import Run, Source, join
from tpkit.params import Dim, ParamSpec
from tpkit.partition import Share, Side, side_size

__all__ = ["Box", "LocalCopy", "LocalParam", "Shares", "cuts_are_whole", "local_elements", "localize", "stored_shape"]

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
    return tuple(dim.stored(_extent(dim, source, in_size)) for dim in spec.dims if dim.along != "segment")


def _extent(dim: Dim, source: Source, in_size: int) -> int:
    """Returns the logical elements along a dimension of a source's tensor."""
    return {"out": source.size, "in": in_size, "flat": source.size * in_size}.get(dim.along, dim.size)


@lru_cache(maxsize=65536)
def localize(
    spec: ParamSpec, out: Side, in_: Side, form: tuple[Source, ...], out_shares: Shares, in_shares: Shares
) -> LocalParam:
    """Returns the shape and copies of a parameter on the rank that has the given shares.

    Raises:
        PluginError: if the ParamSpec cannot serve a layer of these segments and sources.
    """
    _check(spec, len(form))
    if spec.is_blob:
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
            spans.append(_spans(dim, runs, offset, _extent(dim, source, in_size)))
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


def _spans(dim: Dim, runs: Sequence[Run], offset: int, extent: int) -> list[_Span]:
    spans: list[_Span] = []
    end = dim.stored(extent)  # a last, short block may have fewer cells
    for run in _blocks(dim, runs):
        pieces = [run] if run.step == 1 or dim.cells == 1 else [Run(i, 1) for i in run.indices()]
        for piece in pieces:
            first = piece.start * dim.cells
            count = piece.count if dim.cells == 1 else min(piece.stop * dim.cells, end) - first
            spans.append(_Span(Run(first, count, piece.step if dim.cells == 1 else 1), offset, count))
            offset += count
    return spans


def local_elements(
    dim: Dim, out: Side, in_: Side, form: tuple[Source, ...], out_shares: Shares, in_shares: Shares
) -> list[Run]:
    """Returns where a rank's elements along a dimension, in logical order, lie among those of the blocks it holds.

    The positions count `per` for every block held (fewer for a last, short one of a covering dimension): position
    ``p`` is in block ``p // per``. Where every cut falls between blocks that is one run from 0; elsewhere the runs tell
    which elements of the covering blocks are the rank's own: what dequantising a misaligned shard needs.
    """
    in_runs, in_size = _in_runs(in_, in_shares), side_size(in_)
    found: list[Run] = []
    base = 0
    for source in form if dim.along != "in" else form[:1]:
        runs = _runs_along(dim, _out_runs(source, out, out_shares), in_runs, in_size)
        if dim.per == 1:
            count = sum(run.count for run in runs)
            found.append(Run(base, count))
            base += count
            continue
        end = _extent(dim, source, in_size) if dim.covering else None
        shifts: list[tuple[int, int]] = []  # first element of neighbouring blocks held, and how far they moved
        for blocks in _blocks(dim, runs):
            first, stop = blocks.start * dim.per, blocks.stop * dim.per
            shifts.append((first, base - first))
            base += (stop if end is None else min(stop, end)) - first
        for run in runs:
            pieces = [run] if run.step <= dim.per else [Run(i, 1) for i in run.indices()]
            for piece in pieces:
                _, shift = shifts[bisect_right(shifts, piece.start, key=lambda pair: pair[0]) - 1]
                found.append(Run(piece.start + shift, piece.count, piece.step))
    return join([run for run in found if run.count])


def cuts_are_whole(
    dim: Dim, out: Side, in_: Side, form: tuple[Source, ...], out_shares: Shares, in_shares: Shares
) -> bool:
    """Says whether a rank's elements along a dimension are all those of the blocks it holds, in their order.

    Then a kernel may read the blocks as they are. A last, short block at the end of a source counts as whole.
    """
    if dim.per == 1:
        return True
    in_runs, in_size = _in_runs(in_, in_shares), side_size(in_)
    for source in form if dim.along != "in" else form[:1]:
        end = _extent(dim, source, in_size)
        for run in _runs_along(dim, _out_runs(source, out, out_shares), in_runs, in_size):
            if run.step != 1 or run.start % dim.per or (run.stop % dim.per and run.stop != end):
                return False
    own = local_elements(dim, out, in_, form, out_shares, in_shares)
    return not own or (len(own) == 1 and own[0].start == 0 and own[0].step == 1)
