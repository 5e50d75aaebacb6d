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
        full: shape of each parameter on a single rank; of one expert, as `local`.
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

    def experts(self, rank: int) -> range | None:
        """Returns the numbers of the experts that a rank holds; None where there are none in this layer."""
        if self.spec.experts is None:
            return None
        share = self.division[self.spec.experts][rank]
        return range(share.start, share.stop)

    def expert(self, number: int) -> DividedLayer:
        """Returns one expert as a layer of its own."""
        if self.spec.experts is None:
            return self
        forms = tuple(tuple(replace(s, name=s.stem(number), stacked=False) for s in form) for form in self.spec.forms)
        spec = replace(self.spec, path=self.spec.unit(number), forms=forms, experts=None)
        form = tuple(replace(s, name=s.stem(number), stacked=False) for s in self.form)
        return replace(self, spec=spec, form=form)

    def units(self, rank: int) -> list[tuple[str, int | None]]:
        """Returns what a rank fills one by one: paths of modules, and the number of each one's expert."""
        own = self.experts(rank)
        return [(self.spec.unit(n), n) for n in ((None,) if own is None else own)]

    def leads(self, rank: int) -> bool:
        """Says whether a rank is the first of those that hold the same experts: what must count once counts there."""
        return self.spec.experts is None or self.division[self.spec.experts][rank].owner

    def owns(self, side: Side, rank: int) -> bool:
        """Says whether a rank is the one that counts for what it holds of a side; others may hold it too."""
        return all(
            share is None or not part.grouped or share.owner
            for part, share in zip(side, self.shares(side, rank), strict=True)
        )


def shares_of(side: Side, division: Division, rank: int) -> Shares:
    """Returns the share of each segment's axis on a rank; None where it has no axis."""
    return tuple(None if part.axis is None else division[part.axis][rank] for part in side)


def divide_axes(
    layers: Sequence[LayerSpec], ranks: int, weights: tuple[float, ...] | None = None, ep: int = 1
) -> Division:
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
        axis: divide(axis, ranks, granules=granules_of(axis, tuple(blocks)), weights=weights, ep=ep)
        for axis, blocks in asked.items()
    }


def divide_layers(
    layers: Sequence[tuple[LayerSpec, tuple[Source, ...]]],
    ranks: int,
    weights: tuple[float, ...] | None = None,
    ep: int = 1,
) -> list[DividedLayer]:
    """Divides layers over ranks.

    Args:
        layers: each layer with the form in which it is stored.
        ranks: number of ranks.
        weights: a weight per rank; None: all alike.
        ep: expert-parallel groups of ranks.

    Returns:
        the layers in the same order.
    """
    division = divide_axes([spec for spec, _ in layers], ranks, weights, ep)
    known: dict[object, Geometry] = {}
    divided = []
    for spec, form in layers:
        nameless = tuple(replace(source, name="") for source in form)
        key = (spec.out, spec.in_, nameless, spec.params, spec.experts)
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
    for rank in range(ranks):
        shares = shares_of(spec.out, division, rank), shares_of(spec.in_, division, rank)
        local.append({name: localize(p, spec.out, spec.in_, form, *shares) for name, p in spec.params})
        for name, param in local[-1].items():
            missing, doubled = coverage(param.shape, [copy.target for copy in param.copies])
            if missing or doubled:
                gaps.append((rank, name, missing, doubled))
    held = _held(spec, division, ranks)
    unread: dict[tuple[int, str], int] = {}
    for experts in set(held):
        if experts:
            group = [local[rank] for rank in range(ranks) if held[rank] == experts]
            for key, missing in _unread(spec, form, group).items():
                unread[key] = unread.get(key, 0) + missing * len(experts)
    unheld = set(_numbers(spec)) - set().union(*held)
    for name, p in spec.params:
        for index, source in enumerate(form if unheld else ()):
            lost = len(unheld) * prod(stored_shape(p, source, side_size(spec.in_)))
            unread[index, name] = unread.get((index, name), 0) + lost
    size = {name: itemsize(p.dtype) for name, p in spec.params}
    one = [sum(param.numel * size[name] for name, param in params.items()) for params in local]
    return Geometry(
        full=full,
        local=tuple(local),
        gaps=tuple(gaps),
        unread=unread,
        nbytes=tuple(nbytes * len(experts) for nbytes, experts in zip(one, held, strict=True)),
        full_nbytes=sum(prod(shape) * size[name] for name, shape in full.items()) * len(_numbers(spec)),
    )


def _numbers(spec: LayerSpec) -> range:
    return range(spec.experts.units if spec.experts is not None else 1)


def _held(spec: LayerSpec, division: Division, ranks: int) -> list[range]:
    """Returns the experts on each rank; a single one where the layer is not of experts."""
    if spec.experts is None:
        return [_numbers(spec)] * ranks
    return [range(share.start, share.stop) for share in division[spec.experts]]


def _unread(
    spec: LayerSpec, form: tuple[Source, ...], ranks: Sequence[Mapping[str, LocalParam]]
) -> dict[tuple[int, str], int]:
    """Returns the elements of stored tensors that none of these ranks reads."""
    read: dict[tuple[int, str], set[Box]] = {}
    for params in ranks:
        for name, param in params.items():
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
    return unread
