"""Axes and how ranks share them: every unit once, as even as it goes, query heads with the kv heads they need."""

from __future__ import annotations

from itertools import pairwise
from math import ceil, lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpkit.errors import ShardingError
from tpkit.partition import FAIR, Axis, Features, deal, divide, granules_of

ranks = st.integers(1, 9)


@given(st.integers(0, 300), ranks, st.integers(1, 40))
def test_deal_gives_every_unit_once_and_within_one_granule_of_even(units: int, n: int, granule: int) -> None:
    cuts = deal(units, n, granule=granule)
    assert [a for a, _ in cuts] == [0, *[b for _, b in cuts[:-1]]] and cuts[-1][1] == units
    sizes = [b - a for a, b in cuts]
    assert max(sizes) <= ceil(ceil(units / granule) / n) * granule
    assert all(b == units or b % granule == 0 for _, b in cuts)
    if granule == 1:
        assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 300), st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_deal_follows_weights_to_within_one_unit(units: int, weights: list[int]) -> None:
    cuts = deal(units, len(weights), weights=[float(w) for w in weights])
    for (a, b), weight in zip(cuts, weights, strict=True):
        assert abs((b - a) - units * weight / sum(weights)) < 1


def test_a_weight_per_rank_serves_unequal_cards() -> None:
    assert deal(8, 3, weights=[2.0, 1.0, 1.0]) == [(0, 4), (4, 6), (6, 8)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"units": 4, "ranks": 0}, "0 ranks"),
        ({"units": 4, "ranks": 2, "granule": 0}, "granules of 0"),
        ({"units": 4, "ranks": 2, "weights": [1.0]}, "1 weights"),
        ({"units": 4, "ranks": 2, "weights": [1.0, 0.0]}, "one positive weight per rank"),
        ({"units": 4, "ranks": 2, "weights": [1.0, float("nan")]}, "one positive weight per rank"),
        ({"units": 4, "ranks": 2, "weights": [1.0, float("inf")]}, "one positive weight per rank"),
    ],
)
def test_what_cannot_be_dealt_is_told(arguments: dict[str, int], said: str) -> None:
    with pytest.raises(ShardingError, match=said):
        deal(**arguments)  # type: ignore[arg-type]


def test_query_heads_that_do_not_come_in_kv_groups_are_refused() -> None:
    with pytest.raises(ShardingError, match="12 units do not come in 5 groups"):
        Axis(name="heads", units=12, groups=5)


@given(st.integers(1, 12), st.integers(1, 12), ranks)
def test_heads_keep_one_ratio_and_each_rank_the_kv_heads_it_needs(groups: int, ratio: int, n: int) -> None:
    axis = Axis(name="heads", units=groups * ratio, groups=groups)
    shares = divide(axis, n)
    held = [h for share in shares for h in range(share.start, share.stop)]
    assert held == list(range(axis.units))  # contiguous, each once
    for share in shares:
        needed = {head // ratio for head in range(share.start, share.stop)}
        assert needed == set(range(share.group_start, share.group_stop))  # none missing, none too many
        assert share.units == 0 or share.units % share.groups == 0  # a uniform local ratio
    owners = [g for share in shares if share.owner for g in range(share.group_start, share.group_stop)]
    assert owners == list(range(groups))  # every kv head has one owner, replicas none


@pytest.mark.parametrize(
    ("heads", "kv", "n", "q", "k"),
    [
        (9, 3, 2, [(0, 6), (6, 9)], [(0, 2), (2, 3)]),
        (4, 2, 2, [(0, 2), (2, 4)], [(0, 1), (1, 2)]),
        (8, 2, 4, [(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 1), (0, 1), (1, 2), (1, 2)]),  # by owner, not modulo
        (6, 2, 4, [(0, 2), (2, 3), (3, 5), (5, 6)], [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (12, 6, 4, [(0, 4), (4, 8), (8, 10), (10, 12)], [(0, 2), (2, 4), (4, 5), (5, 6)]),
        (1, 1, 3, [(0, 1), (1, 1), (1, 1)], [(0, 1), (0, 0), (0, 0)]),
    ],
)
def test_known_divisions_of_heads(heads: int, kv: int, n: int, q: list[object], k: list[object]) -> None:
    shares = divide(Axis(name="heads", units=heads, groups=kv), n)
    assert [(s.start, s.stop) for s in shares] == q
    assert [(s.group_start, s.group_stop) for s in shares] == k


@given(st.integers(1, 400), ranks, st.lists(st.sampled_from([2, 4, 8, 32, 48, 128]), min_size=1, max_size=3))
def test_granules_are_a_preference_and_never_a_limit(units: int, n: int, blocks: list[int]) -> None:
    axis = Axis(name="ffn", units=units)
    asked = tuple((Features(name="", axis=axis), per, False) for per in blocks)
    shares = divide(axis, n, granules=granules_of(axis, asked))
    sizes = [share.units for share in shares]
    assert sum(sizes) == units and all(a.stop == b.start for a, b in pairwise(shares))
    assert max(sizes) <= max(FAIR * units / n, ceil(units / n))  # fair, or as even as it goes
    assert units < n or min(sizes) > 0


def test_the_coarsest_fair_cut_is_taken() -> None:
    axis = Axis(name="ffn", units=2880)
    asked = ((Features(name="", axis=axis), 32, True), (Features(name="", axis=axis), 64, False))
    assert granules_of(axis, asked) == (64, 32)
    assert [s.units for s in divide(axis, 4, granules=(64, 32))] == [768, 704, 704, 704]
    # 768 = 6 blocks of 128 for 4 ranks: 2, 2, 1, 1 blocks is a third more than even, so the cut falls inside blocks
    assert [s.units for s in divide(Axis(name="ffn", units=768), 4, granules=(128, 8))] == [192] * 4


def test_granules_count_in_units_of_the_axis() -> None:
    heads = Axis(name="heads", units=8, groups=4)
    k = Features(name="k", axis=heads, unit=64, grouped=True)
    q = Features(name="q", axis=heads, unit=64)
    assert granules_of(heads, ((k, 128, False),)) == (2, 1)  # two kv heads of 64 fill a block of 128
    assert granules_of(heads, ((q, 128, False),)) == (1,)  # two query heads of one kv head do


def test_an_undivided_axis_is_whole_on_every_rank() -> None:
    shares = divide(Axis(name="ffn", units=10, divided=False), 3)
    assert [(s.start, s.stop) for s in shares] == [(0, 10)] * 3
    assert [s.owner for s in shares] == [True, False, False]


def test_lcm_of_all_blocks_comes_first() -> None:
    axis = Axis(name="ffn", units=960)
    asked = tuple((Features(name="", axis=axis), per, word) for per, word in ((8, True), (96, False), (64, False)))
    assert granules_of(axis, asked) == (lcm(8, 96, 64), 8)
