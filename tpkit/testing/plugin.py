"""What pytest gets from an installed tpkit: short reports of findings, and a marker ``conformance`` on the kit's tests.

The kit works without it too. Imports nothing heavy: pytest loads it in every project that has tpkit installed.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from tpkit.testing.finding import Finding

__all__ = ["pytest_configure", "pytest_itemcollected", "pytest_runtest_makereport"]


def pytest_configure(config: pytest.Config) -> None:
    """Makes the marker known."""
    config.addinivalue_line("markers", "conformance: tests of a quant method that come from tpkit.testing")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks what a test class inherits from the kit."""
    function = getattr(item, "function", None)
    if getattr(function, "__module__", "") == "tpkit.testing.conformance":
        item.add_marker(pytest.mark.conformance)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows of a finding what was found, and not where in the kit; a cause is shown with its traceback."""
    report = yield
    error: Any = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, Finding) and report.failed and error.__cause__ is None:
        report.longrepr = str(error)
    return report
