"""Random weights are those of the whole tensor, whatever box of it is asked for."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import tpkit.checkpoint.dummy as dummy
from tpkit import UsageError
from tpkit.checkpoint.stored import Stored
from tpkit.layout import Run


def stored(dtype: str = "float32", shape: tuple[int, ...] = (37, 5)) -> Stored:
    return Stored(dtype=dtype, shape=shape, file=Path("(derived)"), begin=0)


@st.composite
def runs(draw: st.DrawFn, size: int) -> Run:
    step = draw(st.integers(1, 6))
    start = draw(st.integers(0, size - 1))
    return Run(start, draw(st.integers(1, 1 + (size - 1 - start) // step)), step)


@settings(max_examples=100, deadline=None)
@given(runs(37), runs(5), st.sampled_from([1, 4, 37, 1024]))
def test_a_box_is_that_part_of_the_whole(rows: Run, columns: Run, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dummy, "ROWS", block)
        reader = dummy.DummyReader(3)
        whole = reader.read("a.weight", stored(), (37, 5), (Run(0, 37), Run(0, 5)))
        box = reader.read("a.weight", stored(), (37, 5), (rows, columns))
    assert torch.equal(box, whole[rows.start : rows.stop : rows.step, columns.start : columns.stop : columns.step])


def test_seeds_names_and_kinds_differ() -> None:
    def read(name: str, seed: int = 0, shape: tuple[int, ...] = (4000,)) -> torch.Tensor:
        return dummy.DummyReader(seed).read(name, stored(shape=shape), shape, tuple(Run(0, n) for n in shape))

    assert torch.equal(read("a.weight"), read("a.weight"))
    assert not torch.equal(read("a.weight"), read("b.weight"))
    assert not torch.equal(read("a.weight"), read("a.weight", seed=1))
    means = [read("norm.weight").mean(), read("q_proj.bias").mean(), read("q_proj.weight", shape=(4000, 2)).mean()]
    assert [round(float(mean), 2) for mean in means] == [1, 0, 0]


def test_a_quantised_model_has_no_random_weights() -> None:
    with pytest.raises(UsageError, match=r"a\.weight is int8"):
        dummy.DummyReader().read("a.weight", stored("int8"), (37, 5), (Run(0, 37), Run(0, 5)))
