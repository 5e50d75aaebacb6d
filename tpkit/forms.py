"""The ways in which a projection may be stored, as its node says. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tpkit.errors import ShardingError
from tpkit.layout import EXPERT, Source, fused
from tpkit.partition import Side
from tpkit.spec.bound import Node
from tpkit.spec.words import Layout

__all__ = ["forms_of", "of_experts"]

Forms = tuple[tuple[Source, ...], ...]


def forms_of(node: Node, path: str, out: Side, counts: Mapping[str, int]) -> Forms:
    """Returns the forms of a projection: apart where `packs` names the parts, and fused under its own name.

    Args:
        node: the projection.
        path: its path on disk.
        out: its output.
        counts: what ``per:`` of a layout may name beside channel -> how often the order recurs.

    Raises:
        ShardingError: for a layout that its output cannot have.
    """
    options = node.options
    (source,) = fused(path, out, *_layout(options.fused, out, counts))
    whole = ((replace(source, bare=options.bare),),)
    if not options.packs:
        return whole
    parent = path.rpartition(".")[0]
    sources: list[Source] = []
    rest = list(out)
    for pack in options.packs:
        names = pack.layout.order if pack.layout else [rest[0].name] if rest else []
        parts = tuple(part for part in rest if part.name in names)
        name = f"{parent}.{pack.name}" if parent else pack.name
        sources += (replace(s, bare=options.bare) for s in fused(name, parts, *_layout(pack.layout, parts, counts)))
        rest = [part for part in rest if part not in parts]
    if rest:
        raise ShardingError(f"nothing is packed into {', '.join(part.name for part in rest)}")
    return (tuple(sources), *whole)


def of_experts(forms: Forms, path: str, stacked: bool) -> Forms:
    """Returns the forms of all experts.

    Args:
        forms: of one.
        path: of the container that stands for all, on disk.
        stacked: they are described as stacked; else each has its number after the container's name, and may be found
            stacked all the same: newer checkpoints have them so, under the names of the parts or of the whole.
    """
    together = tuple(tuple(replace(source, stacked=True) for source in form) for form in forms)
    if stacked:
        return together

    def numbered(source: Source) -> Source:
        return replace(source, name=f"{path}.{EXPERT}{source.name.removeprefix(path)}")

    bare = tuple(replace(source, bare=True) for source in together[-1])
    return (*(tuple(map(numbered, form)) for form in forms), *together, bare)


def _layout(layout: Layout | None, side: Side, counts: Mapping[str, int]) -> tuple[Sequence[str] | None, int]:
    """Returns the order of segments in a stored tensor and how often it recurs."""
    if layout is None or layout.per is None:
        return (None if layout is None else layout.order), 1
    known = {"channel": min(part.size for part in side), **counts}
    if layout.per not in known:
        raise ShardingError(f"per: {layout.per}; here it can be one of {', '.join(sorted(known))}")
    often = known[layout.per]
    shared = [part for part in side if layout.per != "channel" and part.axis is not None and part.count % often]
    if shared:
        raise ShardingError(
            f"per: {layout.per}, which are {often}, but {' and '.join(part.name for part in shared)} come in "
            f"{shared[0].count}",
            hint="rows that recur for each kv head, with its query heads, are per: kv_head",
        )
    return layout.order, often
