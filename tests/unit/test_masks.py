"""Which keys a query sees, against the definition; and slopes against the published ones."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from tpkit.layers.alibi import slopes
from tpkit.layers.context import ForwardContext, KVCache


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 9), st.integers(1, 9), st.none() | st.integers(1, 20), st.none() | st.integers(1, 20)
)  # tokens before, new tokens, window, chunk
def test_a_query_sees_what_it_should(past: int, length: int, window: int | None, chunk: int | None) -> None:
    cache = KVCache([(1, 2, 2)], batch=1, length=20, dtype=torch.float32)
    cache.used = past
    context = ForwardContext(length, torch.device("cpu"), cache)
    wanted = [
        [
            j <= i and (window is None or i - j < window) and (chunk is None or i // chunk == j // chunk)
            for j in range(past + length)
        ]
        for i in range(past, past + length)
    ]
    assert context.seen(window, chunk).tolist() == wanted
    mask, causal = context.mask(window, chunk)
    if mask is not None:
        assert not causal
        assert mask.tolist() == wanted
    elif causal:
        assert wanted == [[j <= i for j in range(length)] for i in range(length)]
    else:
        assert all(map(all, wanted))


@pytest.mark.parametrize(
    ("heads", "kind", "wanted"),
    [
        (8, "below", [2.0**-n for n in range(1, 9)]),
        (8, "above", [2.0**-n for n in range(1, 9)]),
        # arXiv:2108.12409 and its code: the slopes of 4 heads, then every other one of 8
        (6, "below", [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]),
        (6, "above", [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]),
        (3, "below", [2.0**-4, 2.0**-8, 2.0**-2]),
        (1, "below", [2.0**-8]),
    ],
)
def test_slopes(heads: int, kind: str, wanted: list[float]) -> None:
    assert slopes(heads, kind) == pytest.approx(wanted)
