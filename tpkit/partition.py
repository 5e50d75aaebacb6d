"""Logical axes and how ranks share them. Pure: no torch, no process group.

Tensor parallelism does not divide tensors, it divides a few logical axes: attention heads, the feed-forward width,
the vocabulary. An axis is divided once and every projection on it follows, so column and row partners cannot
disagree. Units are dealt contiguously and as evenly as they go; a rank may get none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import gcd, inf, lcm
from typing import Literal

from tpkit.errors import ShardingError, UsageError

__all__ = ["Axis", "Features", "Share", "Side", "check_groups", "deal", "divide", "side_size"]

#: a cut on a coarser granule is taken while the largest share is at most this many times the ideal one
FAIR = 1.25


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A logical dimension that ranks divide.

    Attributes:
        name: what it counts, in the field's words ("heads", "ffn", "vocab").
        units: how many units there are.
        groups: units come in this many groups of equal size that share something (query heads and their kv head).
            Every rank's share then has the same number of units in each of its groups. None: no groups.
        divided: False keeps the whole axis on every rank (``disable_tp``).
        over: who shares it. The ranks form expert-parallel groups (one, unless ``--ep`` asks for more): "groups" deals
            the units (experts) to them, and the ranks of a group hold the same ones; "group" deals the units (the width
            of each expert) to the ranks of every group.
    """

    name: str
    units: int
    groups: int | None = None
    divided: bool = True
    over: Literal["ranks", "groups", "group"] = "ranks"

    def __post_init__(self) -> None:
        if type(self.units) is not int or type(self.groups or 0) is not int:
            raise ShardingError(
                f"axis {self.name!r}: {self.units!r} units, {self.groups!r} groups: whole numbers are needed"
            )
        if self.units < 1 or (self.groups is not None and self.groups < 1):
            raise ShardingError(
                f"axis {self.name!r}: {self.units} units in {self.groups} groups; both must be positive"
            )
        if self.groups is not None and self.units % self.groups:
            raise ShardingError(
                f"axis {self.name!r}: {self.units} units do not come in {self.groups} groups of equal size",
                hint="num_attention_heads must be a multiple of num_key_value_heads" if self.name == "heads" else None,
            )


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank holds of an axis: units ``start:stop`` and the groups ``group_start:group_stop`` they need.

    ``owner`` is False where an earlier rank holds the same group: the rank's group is a replica.
    """

    start: int
    stop: int
    group_start: int
    group_stop: int
    owner: bool = True

    @property
    def units(self) -> int:
        return self.stop - self.start

    @property
    def groups(self) -> int:
        return self.group_stop - self.group_start


@dataclass(frozen=True, kw_only=True)
class Features:
    """A run of elements of one side of a projection: q of qkv, gate of gate_up, or simply all of it.

    Attributes:
        name: the segment's name within its side, e.g. ``"q"``.
        axis: the axis it lies on; None: not divided.
        unit: elements per unit of the axis (per group if ``grouped``); without an axis, all elements.
        grouped: it counts the axis' groups instead of its units (k and v count kv heads).
    """

    name: str
    axis: Axis | None = None
    unit: int = 1
    grouped: bool = False

    @property
    def count(self) -> int:
        """Units of the axis (groups if `grouped`); 1 without an axis."""
        if self.axis is None:
            return 1
        return self.axis.units if not self.grouped or self.axis.groups is None else self.axis.groups

    @property
    def size(self) -> int:
        """Elements of the whole segment."""
        return self.count * self.unit

    def bounds(self, share: Share | None) -> tuple[int, int]:
        """Returns the elements ``(start, stop)`` of this segment that belong to a share of its axis."""
        if self.axis is None or share is None:
            return 0, self.size
        if self.grouped and self.axis.groups is not None:
            return share.group_start * self.unit, share.group_stop * self.unit
        return share.start * self.unit, share.stop * self.unit


#: one side (input or output) of a projection: its segments in logical order
Side = tuple[Features, ...]


def side_size(side: Side) -> int:
    """Returns the number of elements of a whole side."""
    return sum(segment.size for segment in side)


def check_groups(ep: int, ranks: int) -> None:
    """Checks that ranks can form so many expert-parallel groups.

    Raises:
        UsageError: if they cannot.
    """
    if type(ep) is not int:
        raise UsageError(f"ep {ep!r}: a whole number of groups is needed")
    if not 1 <= ep <= ranks:
        raise UsageError(
            f"{ep} expert-parallel groups of {ranks} ranks: from 1 to {ranks} are possible",
            hint="--tp is the number of all ranks; --ep says in how many groups they share the experts",
        )


def deal(units: int, ranks: int, *, granule: int = 1, weights: Sequence[float] | None = None) -> list[tuple[int, int]]:
    """Deals ``units`` to ranks contiguously, in multiples of ``granule``, as evenly as they go.

    Args:
        units: how many there are.
        ranks: how many ranks share them.
        granule: cuts fall on multiples of this (the last share ends at ``units`` anyway).
        weights: a positive weight per rank; None: all alike.

    Returns:
        ``(start, stop)`` per rank, in order; empty shares are ``(n, n)``.

    Raises:
        ShardingError: for a number of ranks, a granule or weights that make no sense.
    """
    if ranks < 1 or granule < 1:
        raise ShardingError(f"cannot deal {units} units to {ranks} ranks in granules of {granule}")
    if weights is not None and (len(weights) != ranks or not all(0 < w < inf for w in weights)):
        raise ShardingError(f"{len(weights)} weights {list(weights)} for {ranks} ranks: one positive weight per rank")
    grains = -(-units // granule)
    counts = _apportion(grains, [1.0] * ranks if weights is None else list(weights))
    cuts = [0, *accumulate(counts)]
    return [(min(a * granule, units), min(b * granule, units)) for a, b in pairwise(cuts)]


def _apportion(count: int, weights: Sequence[float]) -> list[int]:
    """Splits ``count`` by largest remainders; earlier ranks win ties."""
    total = sum(weights)
    exact = [count * weight / total for weight in weights]
    shares = [int(value + 1e-9) for value in exact]
    by_remainder = sorted(range(len(weights)), key=lambda r: (-round(exact[r] - shares[r], 9), r))
    for rank in by_remainder[: count - sum(shares)]:
        shares[rank] += 1
    return shares


@lru_cache(maxsize=4096)
def divide(
    axis: Axis,
    ranks: int,
    *,
    granules: tuple[int, ...] = (1,),
    weights: tuple[float, ...] | None = None,
    ep: int = 1,
) -> tuple[Share, ...]:
    """Divides an axis over ranks: the one place where who holds what is decided.

    Args:
        axis: the axis.
        ranks: number of ranks.
        granules: cuts to prefer, coarsest first, in units (in groups where the groups are dealt); the first whose
            result is fair is taken, and 1 is always tried last.
        weights: a weight per rank for unequal devices.
        ep: expert-parallel groups that the ranks form; they need not be equal.

    Returns:
        one share per rank.
    """
    if axis.over == "ranks":
        return _divide(axis, ranks, granules, weights)
    groups = deal(ranks, ep)
    if axis.over == "group":
        inner = (_divide(axis, b - a, granules, weights[a:b] if weights else None) for a, b in groups)
        return tuple(share for shares in inner for share in shares)
    by_group = tuple(sum(weights[a:b]) if weights else float(b - a) for a, b in groups)
    shares = _divide(axis, ep, granules, by_group if len(set(by_group)) > 1 else None)
    return tuple(
        share if rank == first else replace(share, owner=False)
        for share, (first, last) in zip(shares, groups, strict=True)
        for rank in range(first, last)
    )


def _divide(axis: Axis, ranks: int, granules: tuple[int, ...], weights: tuple[float, ...] | None) -> tuple[Share, ...]:
    if not axis.divided or ranks == 1:
        whole = Share(start=0, stop=axis.units, group_start=0, group_stop=axis.groups or axis.units)
        return (whole, *[Share(**{**vars(whole), "owner": False})] * (ranks - 1)) if ranks > 1 else (whole,)
    if axis.groups is not None and ranks > axis.groups:
        return _divide_groups(axis, ranks, weights)
    dealt = axis.units if axis.groups is None else axis.groups
    per = axis.units // dealt
    for granule in (*granules, 1):
        cuts = deal(dealt, ranks, granule=granule, weights=weights)
        if granule == 1 or _is_fair(cuts, dealt, weights):
            break
    return tuple(Share(start=a * per, stop=b * per, group_start=a, group_stop=b) for a, b in cuts)


def _divide_groups(axis: Axis, ranks: int, weights: tuple[float, ...] | None) -> tuple[Share, ...]:
    """More ranks than groups: ranks are dealt to groups, and each group's units among its ranks."""
    groups = axis.groups or axis.units
    per = axis.units // groups
    shares: list[Share] = []
    for group, (first, last) in enumerate(deal(ranks, groups)):
        inner = deal(per, last - first, weights=weights[first:last] if weights else None)
        for position, (a, b) in enumerate(inner):
            held = b > a
            shares.append(
                Share(
                    start=group * per + a,
                    stop=group * per + b,
                    group_start=group,
                    group_stop=group + held,
                    owner=held and not any(d > c for c, d in inner[:position]),
                )
            )
    return tuple(shares)


def _is_fair(cuts: list[tuple[int, int]], units: int, weights: Sequence[float] | None) -> bool:
    ranks = len(cuts)
    total = sum(weights) if weights else float(ranks)
    for rank, (a, b) in enumerate(cuts):
        ideal = units * (weights[rank] if weights else 1.0) / total
        if b - a > FAIR * ideal or (a == b and units >= ranks):
            return False
    return True


def granules_of(axis: Axis, blocks: Sequence[tuple[Features, int, bool]]) -> tuple[int, ...]:
    """Returns the cuts to prefer on an axis, coarsest first, in the unit in which it is dealt.

    Args:
        axis: the axis.
        blocks: ``(segment, per, is_word)`` for every stored dimension on the axis: ``per`` elements of the segment
            share stored cells; ``is_word`` if they are packed into a word (as opposed to sharing a scale).
    """

    def in_units(segment: Features, per: int) -> int:
        elements = segment.unit
        if axis.groups is not None and not segment.grouped:
            elements *= axis.units // axis.groups
        return per // gcd(per, elements)

    everything = lcm(*(in_units(segment, per) for segment, per, _ in blocks))
    words = lcm(*(in_units(segment, per) for segment, per, is_word in blocks if is_word))
    return tuple(dict.fromkeys((everything, words)))
