"""Checkpoint formats are plugins: a broken one stops nothing, two that claim one folder are told apart."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tests.small import write
from tpkit.checkpoint.open import open_checkpoint
from tpkit.errors import CheckpointError, PluginError
from tpkit.registry import Plugin, Registry


def _with(*plugins: Plugin) -> Registry:
    return Registry((*Registry.default().listing(), *plugins))


def _format(name: str, distribution: str, target: Any = None) -> Plugin:
    point = None if target else EntryPoint(name, "nothing_here:Format", "tpkit.checkpoint_formats")
    value = f"{distribution}:{name}"
    return Plugin(
        kind="checkpoint format", name=name, value=value, distribution=distribution, version="1",
        entry_point=point, target=target,
    )  # fmt: skip


class Greedy:
    api = 1

    @staticmethod
    def recognises(path: Path) -> bool:
        return True


@pytest.mark.parametrize("name", ["aaa", "safetensors"])
def test_a_broken_format_stops_no_other(name: str, tmp_path: Path) -> None:
    opened = open_checkpoint(write(tmp_path), _with(_format(name, "broken")))
    assert "lm_head.weight" in opened.tensors


def test_a_broken_format_is_told_where_nothing_else_reads_the_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no weights in a known format(.|\n)*'aaa' of broken 1 .*nothing_here"):
        open_checkpoint(tmp_path, _with(_format("aaa", "broken")))


def test_two_formats_that_recognise_one_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="recognised by greedy of other and safetensors of tpkit"):
        open_checkpoint(write(tmp_path), _with(_format("greedy", "other", Greedy)))
