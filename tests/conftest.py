"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Real gloo ranks: ``ranks(3).run(function, *args)`` returns what the three returned. See tests/ranks.py."""
    pool = Ranks()
    yield pool
    pool.close()
