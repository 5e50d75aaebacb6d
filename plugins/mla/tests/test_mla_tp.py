"""The logits of transformers on 1 to 5 real ranks, more of them than heads too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plugins.mla.tests.tiny import CASES, TOLERANCE, Made, differences, off, quantised

#: by number of ranks: those that run in the fast suite
FAST = {1: [], 2: ["v2-yarn"], 3: ["v3", "v3-few-heads"], 5: ["v2-q_proj", "v3-yarn-half"]}


def cases() -> list[Any]:
    return [
        pytest.param(name, tp, marks=[] if name in fast else [pytest.mark.slow], id=f"{name}-tp{tp}")
        for name in CASES
        for tp, fast in FAST.items()
    ]


@pytest.mark.parametrize(("name", "tp"), cases())
def test_logits_are_those_of_transformers(name: str, tp: int, checkpoint: Callable[[str], Made], ranks: Any) -> None:
    for rank, found in enumerate(ranks(tp).run(differences, checkpoint(name))):
        assert max(found) < TOLERANCE, f"rank {rank} of {tp}: {found}"


@pytest.mark.parametrize("method", ["online_int8", "online_fp8"])
def test_a_quantised_weight_is_absorbed(method: str, checkpoint: Callable[[str], Made], ranks: Any) -> None:
    """Absorbed or expanded, on one rank or on three, it is the same decoded weight."""
    pytest.importorskip("tpkit_online")
    alone, *found = quantised(checkpoint("v3"), method)
    assert max(found) < TOLERANCE
    assert 1e-4 < off(alone, checkpoint("v3").logits) < 0.5
    for logits, *found in ranks(3).run(quantised, checkpoint("v3"), method):
        assert max(off(logits, alone), *found) < TOLERANCE
