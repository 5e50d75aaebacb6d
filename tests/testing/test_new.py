"""``tpkit new quant``: what it writes is a plugin that keeps the contract, and it writes over nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.small import weights, write
from tpkit import cli

ROOT = Path(__file__).parents[2]
WRITTEN = {
    "README.md", "pyproject.toml", "src/tpkit_int6_groups/__init__.py", "src/tpkit_int6_groups/py.typed",
    "tests/test_int6_groups.py",
}  # fmt: skip


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([str(w) for w in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=600)


def generated(folder: Path, name: str = "int6_groups") -> Path:
    assert cli.main(["new", "quant", name, "--dir", str(folder)]) == 0
    return folder / name


def test_it_writes_a_plugin_and_says_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = generated(tmp_path)
    files = {str(path.relative_to(plugin)) for path in plugin.rglob("*") if path.is_file()}
    assert files == WRITTEN
    said = capsys.readouterr().out
    assert all(f"  {path}\n" in said for path in WRITTEN)
    assert "pip install -e '.[test]'" in said
    assert "tpkit plugins" in said
    texts = [path.read_text() for path in plugin.rglob("*") if path.is_file()]
    assert not any("$" in text for text in texts)
    assert 'int6_groups = "tpkit_int6_groups:Int6GroupsQuant"' in (plugin / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Int6",
        "6bit",
        "int-6",
        "int 6",
        "_int6",
        "int6_",
        "int__6",
        "class",
        "a/b",
        "../up",
        "int6.py",
        "zahl_ä",
        "none",
        "x" * 31,
    ],
)
def test_a_name_that_cannot_be_or_is_taken_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["new", "quant", name, "--dir", str(tmp_path)]) == 2
    assert repr(name) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert not (tmp_path.parent / "up").exists()


def test_a_package_that_is_there_is_not_shadowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tpkit_taken.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["new", "quant", "taken", "--dir", str(tmp_path)]) == 2
    assert "tpkit_taken is installed" in capsys.readouterr().err


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for make in (lambda place: place.mkdir(), lambda place: place.write_text("mine")):
        folder = tmp_path / "int6_groups"
        make(folder)
        assert cli.main(["new", "quant", "int6_groups", "--dir", str(tmp_path)]) == 2
        assert "exists" in capsys.readouterr().err
        assert list(folder.iterdir()) == [] if folder.is_dir() else folder.read_text() == "mine"
        folder.rmdir() if folder.is_dir() else folder.unlink()
    assert cli.main(["new", "quant", "int6_groups", "--dir", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_torch_is_not_imported(tmp_path: Path) -> None:
    done = run(sys.executable, "-X", "importtime", "-m", "tpkit", "new", "quant", "int6_groups", "--dir", tmp_path)
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "importlib.resources" in imported  # the lines are read right
    assert not imported & {"torch", "pydantic", "safetensors", "pytest"}


def test_its_tests_pass_as_generated(tmp_path: Path) -> None:
    plugin = generated(tmp_path)
    done = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=plugin, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "failed" not in done.stdout


def test_it_is_clean(tmp_path: Path) -> None:
    if shutil.which("ruff", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("ruff is not installed")
    plugin = generated(tmp_path, "x")  # the shortest and the longest name give lines of other lengths
    long = generated(tmp_path, "int6_groups_of_channels_in_all")
    for folder in (plugin, long):
        for how in (["check"], ["format", "--check"], ["check", "--config", ROOT / "pyproject.toml"]):
            where = ["src"] if "--config" in how else ["."]
            done = run(sys.executable, "-m", "ruff", *how, "--no-cache", *where, cwd=folder)
            assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_mypy_finds_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    plugin = generated(tmp_path)
    done = run(sys.executable, "-m", "mypy", "--follow-imports=silent", cwd=plugin, MYPYPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_installed_from_wheels_it_is_found_and_its_tests_pass(tmp_path: Path) -> None:
    source = tmp_path / "tpkit"
    source.mkdir()
    for name in ("tpkit", "model_configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    plugin, wheels = generated(tmp_path), tmp_path / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    for folder in (source, plugin):
        flags = ["--no-deps", "--no-build-isolation", "--wheel-dir", wheels]
        done = run(*pip, "wheel", *flags, folder, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    built = sorted(wheels.glob("*.whl"))
    assert [wheel.name.partition("-0")[0] for wheel in built] == ["tpkit", "tpkit_int6_groups"]
    with zipfile.ZipFile(built[0]) as wheel:
        assert "tpkit/testing/template/pyproject.toml.in" in wheel.namelist()

    venv = tmp_path / "venv"
    done = run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    python = venv / "bin" / "python"
    done = run(*pip, "--python", python, "install", "--no-deps", "--no-index", *built, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # torch and pytest come from here; a plain path runs no other .pth files, so an editable tpkit is not found
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "zz_outer.pth").write_text(sysconfig.get_path("purelib") + "\n")

    done = run(venv / "bin" / "tpkit", "plugins", cwd=tmp_path, PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    assert "int6_groups  " in done.stdout
    assert "tpkit-int6-groups 0.1.0  tpkit_int6_groups:Int6GroupsQuant" in done.stdout
    tests = shutil.copytree(plugin / "tests", tmp_path / "apart")
    flags = ["-q", "-p", "no:cacheprovider", "--rootdir", tests, "-m", "conformance"]
    done = run(python, "-m", "pytest", *flags, tests, cwd=tests, PYTHONPATH="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 deselected" in done.stdout  # the marker is known, by the entry point of the installed tpkit
    _computes_on_three_ranks(python, tmp_path)
    again = run(venv / "bin" / "tpkit", "new", "quant", "second", "--dir", tmp_path, cwd=tmp_path, PYTHONPATH="")
    assert again.returncode == 0, again.stderr


SCRIPT = """
import sys, torch, tpkit
from safetensors.torch import save_file
if "RANK" in __import__("os").environ:
    torch.distributed.init_process_group("gloo")
folder, description, out = sys.argv[1:]
spec = tpkit.load_spec(description, config=folder)
model = tpkit.build(spec, checkpoint=folder, dtype=torch.float32, device="cpu")
logits = model(torch.arange(14)[None] * 5 % 96)
if model.tp.rank == 0:
    save_file({"logits": logits.contiguous(), "ranks": torch.tensor(model.tp.size)}, out)
if torch.distributed.is_initialized():
    torch.distributed.barrier()  # a rank that still reads when another leaves may be aborted by that
    torch.distributed.destroy_process_group()
"""


def _computes_on_three_ranks(python: Path, folder: Path) -> None:
    """A checkpoint in its format, the method chosen by name in the description: the logits of the decoded weights."""
    torch.manual_seed(0)
    stored, dense = {}, {}
    for name, tensor in weights().items():
        stem = name.removesuffix(".weight")
        if not stem.endswith("_proj"):
            stored[name] = dense[name] = tensor
            continue
        codes = torch.randint(0, 256, tensor.shape, dtype=torch.uint8)
        scales = (torch.rand(tensor.shape[0], tensor.shape[1] // 32) * 0.01 + 0.001).half()
        stored |= {f"{stem}.qweight": codes.view(torch.int32), f"{stem}.scales": scales}
        dense[name] = (codes.float() - 128) * scales.float().repeat_interleave(32, 1)
    quantised, plain = write(folder / "quantised", stored), write(folder / "dense", dense)
    text = (ROOT / "model_configs" / "llama.yaml").read_text()
    (folder / "theirs.yaml").write_text(text.replace("config:\n", "quant: {method: int6_groups}\n\nconfig:\n", 1))
    (folder / "script.py").write_text(SCRIPT)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    for flags, where, description, out in (
        (launch, quantised, folder / "theirs.yaml", "three"),
        ([], plain, "llama.yaml", "one"),
    ):
        done = run(
            python,
            *flags,
            folder / "script.py",
            where,
            description,
            folder / out,
            cwd=folder,
            PYTHONPATH="",
            GLOO_SOCKET_IFNAME="lo",
            PYTHONFAULTHANDLER="1",
        )
        assert done.returncode == 0, done.stderr
    three, one = load_file(folder / "three"), load_file(folder / "one")
    assert (int(three["ranks"]), int(one["ranks"])) == (3, 1)
    torch.testing.assert_close(three["logits"], one["logits"], rtol=1e-4, atol=1e-4)
