"""The ledger counts exactly what boxes miss and what they double."""

from __future__ import annotations

from itertools import product

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tpkit.layout import Run
from tpkit.ledger import coverage


@st.composite
def _runs(draw: st.DrawFn, size: int) -> Run:
    start = draw(st.integers(0, size - 1))
    step = draw(st.integers(1, 3))
    return Run(start, draw(st.integers(1, (size - 1 - start) // step + 1)), step)


@st.composite
def _cases(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[Run, ...]]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    boxes = draw(st.lists(st.tuples(*(_runs(size) for size in shape)), max_size=6))
    return shape, boxes


@settings(max_examples=300)
@given(_cases())
def test_coverage_equals_counting_elements(case: tuple[tuple[int, ...], list[tuple[Run, ...]]]) -> None:
    shape, boxes = case
    times = dict.fromkeys(product(*map(range, shape)), 0)
    for box in boxes:
        for element in product(*(run.indices() for run in box)):
            times[element] += 1
    missing = sum(count == 0 for count in times.values())
    doubled = sum(count > 1 for count in times.values())
    assert coverage(shape, boxes) == (missing, doubled)


def test_an_empty_tensor_is_complete() -> None:
    assert coverage((0, 4), []) == (0, 0)


def test_a_scalar_is_one_element() -> None:
    assert coverage((), [()]) == (0, 0)
    assert coverage((), []) == (1, 0)
    assert coverage((), [(), ()]) == (0, 1)


def test_a_large_vocabulary_costs_no_time_per_row() -> None:
    rows = 10**9
    assert coverage((rows, 8), [(Run(0, rows // 2), Run(0, 8)), (Run(rows // 2 - 1, rows // 2), Run(0, 8))]) == (8, 8)


@pytest.mark.parametrize("box", [(Run(0, 3),), (Run(0, 3), Run(0, 9)), (Run(-1, 2), Run(0, 1))])
def test_a_box_outside_its_tensor_is_refused(box: tuple[Run, ...]) -> None:
    with pytest.raises(ValueError, match="does not lie within"):
        coverage((3, 4), [box])
