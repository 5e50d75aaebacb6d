"""The command line for models of experts: --ep beside --tp."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import small, small_experts
from tpkit import cli

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_experts.write(tmp_path_factory.mktemp("experts"))


def planned(capsys: Capture, folder: Path, *words: str) -> list[dict[str, Any]]:
    assert cli.main(["plan", small_experts.FAMILY, "--checkpoint", str(folder), "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1 and found["model"] == small_experts.FAMILY
    return found["plans"]  # type: ignore[no-any-return]


def shapes(plan: dict[str, Any], last: str) -> list[list[int]]:
    (row,) = [row for row in plan["parameters"] if row["name"].endswith(f".experts.{last}.weight")]
    return row["shapes"]  # type: ignore[no-any-return]


def test_four_ranks_in_two_groups(folder: Path, capsys: Capture) -> None:
    (plan,) = planned(capsys, folder, "--tp", "4", "--ep", "2")
    assert (plan["tp"], plan["ep"], plan["balance"]) == (4, 2, 1.0)
    assert shapes(plan, "gate_up_proj") == [[4, 24, 32]] * 4 and shapes(plan, "w2") == [[4, 32, 12]] * 4


def test_several_numbers_of_ranks_in_as_many_groups(folder: Path, capsys: Capture) -> None:
    plans = planned(capsys, folder, "--tp", "3,5", "--ep", "3")
    assert [(plan["tp"], plan["ep"]) for plan in plans] == [(3, 3), (5, 3)]
    assert shapes(plans[0], "w2") == [[3, 32, 24], [3, 32, 24], [2, 32, 24]]
    assert shapes(plans[1], "w2") == [[3, 32, 12], [3, 32, 12], [3, 32, 12], [3, 32, 12], [2, 32, 24]]


def test_groups_alone_are_as_many_ranks(folder: Path, capsys: Capture) -> None:
    (plan,) = planned(capsys, folder, "--ep", "2")
    assert (plan["tp"], plan["ep"]) == (2, 2)


def test_the_table_shows_experts_and_groups(folder: Path, capsys: Capture) -> None:
    words = ["--checkpoint", str(folder), "--tp", "4", "--ep", "2"]
    assert cli.main(["plan", small_experts.FAMILY, *words]) == 0
    text = capsys.readouterr().out
    assert "mixtral, tp 4, ep 2, float32" in text
    assert "axis experts: 8 -> " in text and "axis expert ffn: 24 -> " in text
    assert "model.layers.*.block_sparse_moe.experts.gate_up_proj.weight" in text
    assert cli.main(["plan", small_experts.FAMILY, *words[:4]]) == 0
    assert "ep" not in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("command", ["plan", "build"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tp", "2", "--ep", "3"], "3 expert-parallel groups of 2 ranks: from 1 to 2 are possible"),
        (["--tp", "2", "--ep", "0"], "0"),
        (["--ep", "two"], "two"),
    ],
)
def test_groups_that_cannot_be_are_usage_errors(
    command: str, words: list[str], said: str, folder: Path, capsys: Capture
) -> None:
    assert cli.main([command, small_experts.FAMILY, "--checkpoint", str(folder), *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "build"])
def test_groups_without_experts_are_a_usage_error(command: str, tmp_path: Path, capsys: Capture) -> None:
    dense = small.write(tmp_path)
    assert cli.main([command, "llama", "--checkpoint", str(dense), "--tp", "2", "--ep", "2"]) == 2
    assert "has no experts" in capsys.readouterr().err


def test_two_ranks_build_half_of_the_experts_each(folder: Path) -> None:
    command = [sys.executable, "-m", "tpkit", "build", small_experts.FAMILY, "--checkpoint", str(folder), "--ep", "2"]
    done = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["tp"], answer["ep"], answer["model"]) == (2, 2, "mixtral")
    tensors = small_experts.weights()
    experts = sum(t.nbytes for name, t in tensors.items() if ".experts." in name)
    replicated = sum(t.nbytes for name, t in tensors.items() if "norm" in name or ".gate." in name)
    others = sum(t.nbytes for t in tensors.values()) - experts - replicated
    for row in answer["ranks"]:
        assert row["param_bytes"] == row["bytes_read"] == (experts + others) // 2 + replicated
