"""Axes divided over ranks, and from that every layer's local parameters. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tpkit.dtypes import itemsize
from tpkit.geometry import Box, LocalParam, Shares, localize, stored_shape
from tpkit.layout import LayerSpec, Source
from tpkit.ledger import coverage
from tpkit.partition import Axis, Features, Share, Side, divide, granules_of, side_size

__all__ = ["DividedLayer", "divide_axes", "divide_layers", "with_form"]

Division = Mapping[Axis, tuple[Share, ...]]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A layer's parameters on every rank; the same object for all layers of the same structure.

    Attributes:
        full: shape of each parameter on a single rank.
        local: for each rank, each parameter.
        gaps: ``(rank, parameter, missing, doubled)`` where a local parameter is not written exactly once.
        unread: ``(source, parameter) -> elements`` of stored tensors that no rank reads.
        nbytes: bytes of all its parameters on each rank.
        full_nbytes: bytes on a single rank.
    """

    full: Mapping[str, tuple[int, ...]]
    local: tuple[Mapping[str, LocalParam], ...]
    gaps: tuple[tuple[int, str, int, int], ...]
    unread: Mapping[tuple[int, str], int]
    nbytes: tuple[int, ...]
    full_nbytes: int


@dataclass(frozen=True, kw_only=True)
class DividedLayer:
    """A layer, how it is stored, and what each rank holds of it."""

    spec: LayerSpec
    form: tuple[Source, ...]
    division: Division
    geometry: Geometry

    def shares(self, side: Side, rank: int) -> Shares:
        """Returns the share of each segment's axis on a rank."""
        return shares_of(side, self.division, rank)

    def sizes(self, side: Side, rank: int) -> list[int]:
        """Returns the local size of each segment of a side on a rank."""
        return [b - a for a, b in self.bounds(side, rank)]

    def bounds(self, side: Side, rank: int) -> list[tuple[int, int]]:
        """Returns the logical elements ``(start, stop)`` of each segment that a rank holds."""
        return [part.bounds(share) for part, share in zip(side, self.shares(side, rank), strict=True)]

    def owns(self, side: Side, rank: int) -> bool:
        """Says whether a rank is the one that counts for what it holds of a side; others may hold it too."""
        return all(
            share is None or not part.grouped or share.owner
            for part, share in zip(side, self.shares(side, rank), strict=True)
        )


def shares_of(side: Side, division: Division, rank: int) -> Shares:
    """Returns the share of each segment's axis on a rank; None where it has no axis."""
    return tuple(None if part.axis is None else division[part.axis][rank] for part in side)


def divide_axes(layers: Sequence[LayerSpec], ranks: int, weights: tuple[float, ...] | None = None) -> Division:
    """Divides every axis that the layers lie on, preferring the cuts that their stored blocks ask for."""
    asked: dict[Axis, set[tuple[Features, int, bool]]] = {}
    for layer in layers:
        for axis in layer.axes():
            asked.setdefault(axis, set())
        for _, spec in layer.params:
            for dim in spec.dims:
                side = {"out": layer.out, "in": layer.in_}.get(dim.along, ())
                for part in side:
                    if part.axis is not None and dim.per > 1:
                        asked[part.axis].add((part, dim.per, dim.word))
    return {
        axis: divide(axis, ranks, granules=granules_of(axis, tuple(blocks)), weights=weights)
        for axis, blocks in asked.items()
    }


def divide_layers(
    layers: Sequence[tuple[LayerSpec, tuple[Source, ...]]], ranks: int, weights: tuple[float, ...] | None = None
) -> list[DividedLayer]:
    """Divides layers over ranks.

    Args:
        layers: each layer with the form in which it is stored.
        ranks: number of ranks.
        weights: a weight per rank; None: all alike.

    Returns:
        the layers in the same order.
    """
    division = divide_axes([spec for spec, _ in layers], ranks, weights)
    known: dict[object, Geometry] = {}
    divided = []
    for spec, form in layers:
        nameless = tuple(replace(source, name="") for source in form)
        key = (spec.out, spec.in_, nameless, spec.params)
        if key not in known:
            known[key] = _geometry(spec, nameless, division, ranks)
        divided.append(DividedLayer(spec=spec, form=form, division=division, geometry=known[key]))
    return divided


def with_form(layer: DividedLayer, spec: LayerSpec, form: tuple[Source, ...]) -> DividedLayer:
    """Returns a divided layer as it is if stored in another form; who holds what stays as it was."""
    nameless = tuple(replace(source, name="") for source in form)
    ranks = len(layer.geometry.local)
    geometry = _geometry(spec, nameless, layer.division, ranks)
    return replace(layer, spec=spec, form=form, geometry=geometry)


def _geometry(spec: LayerSpec, form: tuple[Source, ...], division: Division, ranks: int) -> Geometry:
    whole = tuple(None for _ in spec.out), tuple(None for _ in spec.in_)
    full = {name: localize(p, spec.out, spec.in_, form, *whole).shape for name, p in spec.params}
    local: list[dict[str, LocalParam]] = []
    gaps: list[tuple[int, str, int, int]] = []
    read: dict[tuple[int, str], set[Box]] = {}
    for rank in range(ranks):
        shares = shares_of(spec.out, division, rank), shares_of(spec.in_, division, rank)
        local.append({name: localize(p, spec.out, spec.in_, form, *shares) for name, p in spec.params})
        for name, param in local[-1].items():
            missing, doubled = coverage(param.shape, [copy.target for copy in param.copies])
            if missing or doubled:
                gaps.append((rank, name, missing, doubled))
            for copy in param.copies:
                read.setdefault((copy.source, name), set()).add(copy.box)
    in_size = side_size(spec.in_)
    unread = {}
    for name, p in spec.params:
        if p.is_blob:
            continue
        for index, source in enumerate(form):
            missing, _ = coverage(stored_shape(p, source, in_size), sorted(read.get((index, name), ()), key=str))
            if missing:
                unread[index, name] = missing
    size = {name: itemsize(p.dtype) for name, p in spec.params}
    return Geometry(
        full=full,
        local=tuple(local),
        gaps=tuple(gaps),
        unread=unread,
        nbytes=tuple(sum(param.numel * size[name] for name, param in params.items()) for params in local),
        full_nbytes=sum(prod(shape) * size[name] for name, shape in full.items()),
    )
