"""The example of docs/plugins.md is a plugin that works."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tpkit.testing import REASONS, check
from tpkit.testing.conformance import QuantConformance

TEXT = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")


def test_the_example_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    file = tmp_path / "example_of_the_docs.py"
    file.write_text("\n\n".join(blocks), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)  # where pickle looks for its class
    spec.loader.exec_module(module)
    assert [str(finding) for finding in check(module.TestNibbles)] == []
    assert sum(len(block.splitlines()) for block in blocks) < 60


def test_what_it_says_of_the_kit_is_so() -> None:
    section = TEXT.partition("## The conformance kit")[2].partition("## Formats")[0]
    named = set(re.findall(r"`(\w+)`", "\n".join(row for row in section.splitlines() if row.startswith("| `"))))
    assert {"step_in", "step_out", "tolerance", "resident", "fused", "optional", "config", "dtype"} <= named
    assert all(hasattr(QuantConformance, name) for name in named - {"quantization_config", "method", "read_config"})
    assert set(re.findall(r'"(trim|expand|segments)"', section)) <= set(REASONS)
