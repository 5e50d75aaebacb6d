"""What the tests share: checkpoints, each made once, and real ranks where tpkit's own tests are at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from plugins.mla.tests.tiny import CASES, Made, make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """``checkpoint(name)`` makes the one of that name in `CASES`."""
    made: dict[str, Made] = {}

    def get(name: str) -> Made:
        if name not in made:
            made[name] = make(*CASES[name], tmp_path_factory.mktemp("mla") / name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """Real gloo ranks: ``ranks(3).run(function, *args)`` returns what the three returned."""
    pool = pytest.importorskip("tests.ranks").Ranks()
    yield pool
    pool.close()
