"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.families import Families
from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Real gloo ranks: ``ranks(3).run(function, *args)`` returns what the three returned. See tests/ranks.py."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    """Tiny checkpoints made with transformers, each once in a session. See tests/families.py."""
    return Families(tmp_path_factory.getbasetemp() / "families")
