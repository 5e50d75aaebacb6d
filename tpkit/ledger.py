"""The proof that a plan is complete: every element written exactly once, every stored element used. Pure.

Boxes are counted exactly, on a grid of classes: indices of one dimension that the same runs contain are one class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product
from math import prod

from tpkit.geometry import Box
from tpkit.layout import Run

__all__ = ["coverage"]


def coverage(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[int, int]:
    """Counts how boxes cover a tensor.

    Args:
        shape: the tensor's shape.
        boxes: one run per dimension each; all within the shape.

    Returns:
        ``(missing, doubled)``: elements that no box contains, and elements that more than one contains.

    Raises:
        ValueError: if a box lies outside the shape or has another number of dimensions.
    """
    for box in boxes:
        if len(box) != len(shape) or any(
            run.start < 0 or run.stop > n for run, n in zip(box, shape, strict=True) if run.count
        ):
            raise ValueError(f"box {box} does not lie within shape {tuple(shape)}")
    boxes = [box for box in boxes if all(run.count for run in box)]
    if not boxes:
        return prod(shape), 0
    weights: list[list[int]] = []
    members: list[dict[Run, list[int]]] = []
    for dim, size in enumerate(shape):
        w, m = _classes(size, {box[dim] for box in boxes})
        weights.append(w)
        members.append(m)
    times: Counter[tuple[int, ...]] = Counter()
    for box in boxes:
        times.update(product(*(members[dim][run] for dim, run in enumerate(box))))
    covered = doubled = 0
    for cell, count in times.items():
        elements = prod(weights[dim][index] for dim, index in enumerate(cell))
        covered += elements
        doubled += elements if count > 1 else 0
    return prod(shape) - covered, doubled


def _within(run: Run, size: int) -> bool:
    return run.count == 0 or (run.start >= 0 and run.stop <= size)


def _classes(size: int, runs: set[Run]) -> tuple[list[int], dict[Run, list[int]]]:
    """Returns the size of each class of indices, and for each run the classes it is made of."""
    if all(run.step == 1 or run.count == 1 for run in runs):
        cuts = sorted({0, size, *(run.start for run in runs), *(run.stop for run in runs)})
        place = {cut: i for i, cut in enumerate(cuts)}
        weights = [b - a for a, b in pairwise(cuts)]
        return weights, {run: list(range(place[run.start], place[run.stop])) for run in runs}
    masks = {run: _mask(run) for run in runs}
    classes = [(1 << size) - 1]
    for mask in masks.values():
        parts = ((c & mask, c & ~mask) for c in classes)
        classes = [part for pair in parts for part in pair if part]
    members = {run: [i for i, c in enumerate(classes) if c & mask] for run, mask in masks.items()}
    return [c.bit_count() for c in classes], members


def _mask(run: Run) -> int:
    """Returns the run's indices as the bits of an integer."""
    ones, have = 1, 1
    while have < run.count:  # doubling: a strided run of n bits in log n shifts
        take = min(have, run.count - have)
        ones |= (ones & ((1 << (take * run.step)) - 1)) << (have * run.step)
        have += take
    return ones << run.start
