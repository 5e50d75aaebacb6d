"""The top of the command line: help without torch, errors as messages with exit codes, pipes that close."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tpkit import cli
from tpkit.errors import CheckpointError, PluginError, TpkitError, UsageError

ROOT = Path(__file__).parents[2]


def tpkit(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "tpkit", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["plugins"], ["plugins", "--json"], ["build", "--help"], ["plan", "--help"], ["biuld"]],
    ids=" ".join,
)
def test_torch_is_not_imported(arguments: list[str]) -> None:
    done = tpkit(*arguments)
    assert done.returncode == (2 if arguments == ["biuld"] else 0)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "argparse" in imported  # the lines are read right
    assert not imported & {"torch", "pydantic", "safetensors", "transformers"}


def test_version_is_the_distribution_s(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tpkit {version('tpkit')}\n"


def test_usage_errors_are_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert cli.main(["no-such-command"]) == 2
    assert cli.main(["plugins", "--no-such-option"]) == 2
    assert "usage: tpkit" in capsys.readouterr().err


def test_plugins_lists_what_is_built_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plugins"]) == 0
    table = capsys.readouterr().out
    assert "quant method (tpkit.quant_methods)" in table
    assert cli.main(["plugins", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = {(row["kind"], row["name"]) for row in found["plugins"]}
    assert found["schema"] == 1
    assert {("quant method", "none"), ("style", "row"), ("module", "attention")} <= names
    for row in found["plugins"]:
        assert row["object"] in table
        assert row["distribution"]


def command_that(monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> None:
    """Adds a command ``fails`` to the command line."""

    def run(_: object) -> int:
        if error is not None:
            raise error
        return 0

    module = ModuleType("tpkit.cli.fails")
    module.add_arguments = lambda parser: None  # type: ignore[attr-defined]
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tpkit.cli.fails", module)
    monkeypatch.setitem(cli.COMMANDS, "fails", "fails")
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("not like this"), 2),
        (PluginError("not like this"), 3),
        (CheckpointError("not like this", hint="but so"), 4),
    ],
)
def test_errors_are_messages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: TpkitError, code: int
) -> None:
    command_that(monkeypatch, error)
    assert cli.main(["fails"]) == code
    said = capsys.readouterr()
    assert said.err == "error: not like this\n" + ("  hint: but so\n" if error.hint else "")
    assert said.out == ""


def test_a_bug_is_a_traceback_and_70(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command_that(monkeypatch, ZeroDivisionError("oh"))
    assert cli.main(["fails"]) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "ZeroDivisionError: oh" in err
    assert "please report" in err


def test_interruption_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command_that(monkeypatch, KeyboardInterrupt())
    assert cli.main(["fails"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_went_away_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        command = [sys.executable, "-m", "tpkit", "plugins"]
        done = subprocess.run(command, cwd=ROOT, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 141
    assert done.stderr == ""
