"""How a projection is stored, against what its style and its module say it is made of."""

from __future__ import annotations

from collections.abc import Mapping

from tpkit.errors import did_you_mean
from tpkit.modules import Declared
from tpkit.partition import Side
from tpkit.spec.draft import Draft
from tpkit.spec.problems import Problems
from tpkit.spec.scope import Values
from tpkit.spec.slots import Failed
from tpkit.spec.words import Layout, Pack

__all__ = ["check_parts", "check_style", "norm_width"]


def check_style(draft: Draft, problems: Problems) -> None:
    """Notes a projection whose `packs` and `fused` do not go with its style."""
    packs: tuple[Pack, ...] = draft.literal("packs") or ()
    fused: Layout | None = draft.literal("fused")
    least = draft.plugin.segments if draft.plugin is not None else 0
    word = "packs" if "packs" in draft.table else "fused" if "fused" in draft.table else "style"
    mark = draft.table.entries[word].mark
    if packs and fused:
        problems.add(mark, draft.where, "is stored apart (packs) or as one tensor (fused), not both")
        return
    if not least or (draft.table.get(word) is not None and not packs and not fused and word != "style"):
        return
    if least == 1 and (packs or fused):
        problems.add(mark, f"{draft.where}.{word}", f"style {draft.word!r} is not made of parts")
    elif least > 1 and not packs and not fused:
        message = f"style {draft.word!r} is made of {least} parts: say how they are stored, with packs or fused"
        problems.add(mark, draft.where, message)
    elif least > 1 and _count(packs, fused) < least:
        message = f"{_count(packs, fused)} parts, but style {draft.word!r} has at least {least}"
        problems.add(mark, f"{draft.where}.{word}", message)


def _count(packs: tuple[Pack, ...], fused: Layout | None) -> int:
    if fused is not None:
        return len(fused.order)
    return sum(len(pack.layout.order) if pack.layout else 1 for pack in packs)


def check_parts(draft: Draft, out: Side, counts: Mapping[str, int], problems: Problems) -> None:
    """Notes parts that are not the segments of a projection's output.

    Args:
        draft: the projection.
        out: its output as the module declares it.
        counts: what ``per:`` may name beside channel.
        problems: takes the findings.
    """
    packs: tuple[Pack, ...] = draft.literal("packs") or ()
    fused: Layout | None = draft.literal("fused")
    if not (packs or fused):
        return
    word = "fused" if fused else "packs"
    mark, where = draft.table.entries[word].mark, f"{draft.where}.{word}"
    segments = [segment.name for segment in out]
    for layout in (fused, *(pack.layout for pack in packs)):
        known = [*counts, "channel"]
        if layout is not None and layout.per is not None and layout.per not in known:
            problems.add(mark, where, f"per is one of: {', '.join(known)}{did_you_mean(layout.per, known)}")
    count = _count(packs, fused)
    if count != len(segments):
        names = ", ".join(name or "the whole" for name in segments)
        message = f"{count} parts, but the module makes {len(segments)}: {names} (style {draft.word!r})"
        problems.add(mark, where, message)
        return
    named = list(fused.order) if fused else []
    for position, pack in enumerate(packs):
        named.extend(pack.layout.order if pack.layout else segments[position : position + 1])
    for name in sorted({name for name in named if name not in segments or named.count(name) > 1}):
        told = "occurs more than once" if name in segments else f"is no part of it{did_you_mean(name, segments)}"
        problems.add(mark, where, f"{name!r} {told}; its parts are: {', '.join(segments)}")


def norm_width(draft: Draft, role: str, over: object, values: Values, declared: Declared | None) -> int | None:
    """Returns how many features a norm normalises together; None where it cannot be known, which is noted."""
    if over is None:
        try:
            size = values.value("hidden_size")
        except (Failed, KeyError):
            return None
        return size if isinstance(size, int) else None
    if declared is None:  # the module around it has problems of its own, which have been noted
        return None
    width = declared.width(role, str(over))
    if width is None:
        known = declared.over
        mark = draft.table.entries["over"].mark
        offered = ", ".join(known) or "no width that a norm can go over"
        message = f"{over!r} is not known{did_you_mean(str(over), known)}; the module around it offers: {offered}"
        values.problems.add(mark, f"{draft.where}.over", message)
    return width
