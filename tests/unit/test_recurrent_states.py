"""States of recurrent layers in the cache, and a convolution's, against the definition."""

from __future__ import annotations

import pytest
import torch

from tpkit import UsageError
from tpkit.layers import ForwardContext, KVCache


def cache() -> KVCache:
    return KVCache([], [(3,)], batch=2, length=9, dtype=torch.float32)


def test_a_state_is_read_and_replaced() -> None:
    held = cache()
    first = ForwardContext(2, torch.device("cpu"), held)
    assert first.state(0) is None
    first.keep(0, torch.ones(2, 3))
    first.finish()
    assert held.used == 2
    found = ForwardContext(1, torch.device("cpu"), held).state(0)
    assert found is not None
    assert found.tolist() == [[1.0] * 3] * 2


def test_a_pass_that_fails_leaves_the_state_as_it_was() -> None:
    held = cache()
    for state in (1.0, 2.0):
        context = ForwardContext(2, torch.device("cpu"), held)
        context.keep(0, torch.full((2, 3), state))
        if state == 1.0:
            context.finish()
    found = ForwardContext(1, torch.device("cpu"), held).state(0)
    assert held.used == 2 and found is not None and found.tolist() == [[1.0] * 3] * 2


def test_a_cache_that_is_begun_anew_has_no_state() -> None:
    held = cache()
    context = ForwardContext(2, torch.device("cpu"), held)
    context.keep(0, torch.ones(2, 3))
    context.finish()
    held.used = 0
    assert ForwardContext(2, torch.device("cpu"), held).state(0) is None


def test_without_a_cache_nothing_is_kept() -> None:
    context = ForwardContext(2, torch.device("cpu"))
    for _ in range(2):  # a layer may then be called again
        context.keep(0, torch.ones(2, 3))
        assert context.state(0) is None


def test_a_layer_that_runs_twice_has_one_place() -> None:
    context = ForwardContext(2, torch.device("cpu"), cache())
    context.enter(0)  # an attention layer's place is another
    context.state(0)
    with pytest.raises(UsageError, match="recurrent layer 0 is called twice"):
        context.state(0)
