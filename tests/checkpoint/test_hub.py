"""Where weights named by hub id are looked for, without ever using the network."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tpkit
from tests.small import CONFIG, description, write
from tpkit import CheckpointError, UsageError
from tpkit.checkpoint.hub import cached, locate
from tpkit.spec.bound import BoundSpec


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def snapshot(cache: Path, name: str = "abc") -> Path:
    folder = cache / "models--org--model"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(name)
    return write(folder / "snapshots" / name)


def spec(checkpoint: str | None = "org/model") -> BoundSpec:
    data: dict[str, Any] = description()
    del data["checkpoint"]
    return tpkit.load_spec(data | ({"checkpoint": checkpoint} if checkpoint else {}), config=CONFIG)


def test_the_snapshot_that_main_names_is_found(cache: Path) -> None:
    wanted = snapshot(cache, "abc")
    snapshot(cache, "newer")
    (cache / "models--org--model" / "refs" / "main").write_text("abc\n")
    assert cached("org/model") == wanted == locate(None, spec())
    assert locate("elsewhere", spec()) == Path("elsewhere")


def test_the_cache_may_be_moved_by_either_variable(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(cache / "home"))
    assert cached("org/model") is None
    assert snapshot(cache / "home" / "hub") == cached("org/model")


@pytest.mark.parametrize("gone", ["config.json", "model.safetensors"])
def test_an_incomplete_snapshot_does_not_count(gone: str, cache: Path) -> None:
    (snapshot(cache) / gone).unlink()
    assert cached("org/model") is None


def test_a_description_that_names_no_weights(cache: Path) -> None:
    with pytest.raises(UsageError, match="names no weights") as caught:
        locate(None, spec(None))
    assert "--checkpoint DIR" in str(caught.value) and "--dummy-weights" in str(caught.value)


def test_without_the_hub_library_it_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="org/model is not in the local Hugging Face cache") as caught:
        locate(None, spec())
    assert "install huggingface_hub" in str(caught.value)


def test_a_download_that_fails_tells_why(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=refuse))
    with pytest.raises(CheckpointError, match="cannot be downloaded: no route to host"):
        locate(None, spec())


def test_a_download_takes_no_pickles(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fetch(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        return str(cache / "there")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=fetch))
    assert locate(None, spec()) == cache / "there"
    assert asked["repository"] == "org/model"
    assert not any("bin" in pattern or pattern in ("*", "**") for pattern in asked["allow_patterns"])
