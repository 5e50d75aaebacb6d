"""``tpkit check`` tells everything at once, and `auto` picks a description for every command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import small
from tpkit import cli

ROOT = Path(__file__).parents[2]
Capture = pytest.CaptureFixture[str]


def written(path: Path, *changes: tuple[str, str]) -> Path:
    """Writes llama.yaml with texts replaced."""
    text = (ROOT / "model_configs" / "llama.yaml").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def checked(capsys: Capture, *arguments: object) -> tuple[int, str]:
    code = cli.main(["check", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_a_description_alone(capsys: Capture) -> None:
    code, said = checked(capsys, "llama")
    assert code == 0
    assert "in all branches" in said
    assert "--checkpoint" in said


def test_all_problems_of_a_description_with_their_positions(tmp_path: Path, capsys: Capture) -> None:
    path = written(tmp_path / "bad.yaml", ("pairs: half", "pears: half"), ("style: row", "style: rwo"))
    code, said = checked(capsys, path)
    assert code == 2
    assert "did you mean 'pairs'" in said
    assert said.count("did you mean 'row'") == 2
    assert said.count(f"  {path}:") == said.count(": tree.")


def test_a_checkpoint_that_fits(tmp_path: Path, capsys: Capture) -> None:
    folder = small.write(tmp_path / "c")
    code, said = checked(capsys, "llama", "--checkpoint", folder)
    assert code == 0, said
    assert "21 tensors in 1 file" in said
    assert "21 bound, 0 ignored" in said


def test_names_that_do_not_fit_are_all_told_with_lines(tmp_path: Path, capsys: Capture) -> None:
    tensors = small.weights()
    tensors["model.layers.1.mlp.gate.weight"] = tensors.pop("model.layers.1.mlp.gate_proj.weight")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:16].clone()
    folder = small.write(tmp_path / "c", tensors)
    path = written(tmp_path / "mine.yaml")
    code, said = checked(capsys, path, "--checkpoint", folder)
    assert code == 4
    lines = [line for line in said.splitlines() if f"{path}:" in line]
    assert any("missing: model.layers.1.mlp.gate_proj.weight" in line for line in lines)
    assert "model.layers.1.mlp.gate.weight" in said
    assert "model.norm.weight is [16]" in said
    assert len(lines) >= 2


def test_a_config_that_does_not_fit(tmp_path: Path, capsys: Capture) -> None:
    folder = small.write(tmp_path / "c", logit_scale=2.0)
    code, said = checked(capsys, "llama", "--config", folder / "config.json")
    assert code == 2
    assert "logit_scale" in said


def test_a_config_alone_is_planned(tmp_path: Path, capsys: Capture) -> None:
    folder = small.write(tmp_path / "c")
    code, said = checked(capsys, "llama", "--config", folder)
    assert code == 0
    assert "plan" in said


def indexed(folder: Path, names: dict[str, Any]) -> Path:
    small.write(folder, files=[list(names)], tensors=names)
    (folder / "model-00001-of-00001.safetensors").unlink()
    return folder


def test_an_index_without_weights_is_compared_by_names(tmp_path: Path, capsys: Capture) -> None:
    tensors = small.weights()
    folder = indexed(tmp_path / "c", tensors)
    code, said = checked(capsys, "llama", "--checkpoint", folder)
    assert code == 0, said
    assert "21 bound" in said
    assert "names alone" in said
    tensors["model.layers.0.surprise.weight"] = tensors.pop("model.norm.weight")
    code, said = checked(capsys, "llama", "--checkpoint", indexed(tmp_path / "d", tensors))
    assert code == 4
    assert "model.norm.weight" in said
    assert "not in the description: model.layers.0.surprise.weight" in said
    assert "float32 [" not in said


def test_json(tmp_path: Path, capsys: Capture) -> None:
    folder = small.write(tmp_path / "c")
    assert cli.main(["check", "auto", "--checkpoint", str(folder), "--json"]) == 0
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert answer["ok"]
    assert [row["stage"] for row in answer["stages"]] == ["description", "config.json", "checkpoint"]
    assert "auto: llama" in said.err


def test_no_torch_is_needed(tmp_path: Path) -> None:
    folder = small.write(tmp_path / "c")
    code = "import sys; from tpkit.cli import main; assert main(sys.argv[1:]) == 0; assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "check", "auto", "--checkpoint", str(folder)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_plan_takes_auto(tmp_path: Path, capsys: Capture) -> None:
    folder = small.write(tmp_path / "c")
    assert cli.main(["plan", "auto", "--checkpoint", str(folder)]) == 0
    said = capsys.readouterr()
    assert "auto: llama" in said.err
    assert said.out.startswith("llama, tp 1")
    assert cli.main(["plan", "auto", "--config", str(folder / "config.json"), "--tp", "2"]) == 0
    assert cli.main(["plan", "auto"]) == 2
    assert "give --checkpoint or --config" in capsys.readouterr().err


def test_build_takes_auto(tmp_path: Path, capsys: Capture) -> None:
    folder = small.write(tmp_path / "c")
    assert cli.main(["build", "auto", "--checkpoint", str(folder), "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert said.err.count("auto: llama") == 1
    assert "llama, tp 1" in said.out


def test_a_file_called_auto_is_meant_by_a_path(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "auto", ("family: llama", "family: mine"))
    folder = small.write(tmp_path / "c")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "./auto", "--checkpoint", str(folder)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("mine, tp 1")
    assert "auto:" not in said.err
    assert cli.main(["plan", "auto", "--checkpoint", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("llama, tp 1")
