"""Checkpoints as they are published: what a description expects is what their index lists, to the byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import tpkit
from tpkit.checkpoint.stored import Checkpoint, Stored
from tpkit.planning import ModelPlan, derived_checkpoint

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "data" / "real_configs"
INDEX = "model.safetensors.index.json"


def described() -> dict[str, str]:
    """Returns model_type -> description."""
    found = {}
    for file in sorted((ROOT / "model_configs").glob("*.yaml")):
        for model_type in yaml.safe_load(file.read_text(encoding="utf-8")).get("model_types", []):
            if found.get(model_type) != model_type:
                found[model_type] = file.stem
    return found


def cases() -> list[Any]:
    known, found = described(), []
    for folder in sorted(file.parent for file in REAL.glob(f"*/{INDEX}")):
        description = known.get(json.loads((folder / "config.json").read_text())["model_type"])
        if description is not None:
            found.append(pytest.param(description, folder, id=folder.name))
    return found


def unexpected(name: str, expected: Mapping[str, Stored]) -> Stored:
    """Returns a tensor that a description does without: its size is known where what lies beside it says it."""
    stem, _, kind = name.rpartition(".")
    if kind == "g_idx":  # of GPTQ, which packs eight inputs in a word
        return Stored(dtype="int32", shape=(expected[f"{stem}.qweight"].shape[0] * 8,), file=Path("beside"), begin=0)
    if kind == "bias":  # which must prove to be all zero
        scales = expected[f"{stem}.scales"]
        return Stored(dtype=scales.dtype, shape=(scales.shape[1],), file=Path("beside"), begin=0)
    return Stored(dtype="float32", shape=(1,), file=Path("unknown"), begin=0)


def on_disk(name: str, prefix: Mapping[str, str]) -> str:
    """Returns the name of a tensor in a checkpoint that keeps the tree under another prefix."""
    for tree, disk in prefix.items():
        if name.startswith(f"{tree}."):
            return f"{disk}{name[len(tree) :]}".removeprefix(".")
    return name


def planned(description: str, folder: Path) -> tuple[ModelPlan, Checkpoint]:
    """Plans with the tensors that the index names; their types and shapes are those that the description expects."""
    spec = tpkit.load_spec(description, config=folder)
    bare = tpkit.plan_model(spec, ranks=1)
    index = json.loads((folder / INDEX).read_text())
    size = index.get("metadata", {}).get("total_size")
    derived = derived_checkpoint(bare).tensors
    expected = {on_disk(name, prefix): t for name, t in derived.items() for prefix in spec.prefixes}
    tensors = {name: expected.get(name) or unexpected(name, expected) for name in index["weight_map"]}
    checkpoint = Checkpoint(folder, tensors, total_size=size)
    return tpkit.plan_model(spec, ranks=3, checkpoint=checkpoint, dtype=bare.dtype), checkpoint


@pytest.mark.skipif(not REAL.is_dir(), reason="no real configs beside this clone")
@pytest.mark.parametrize(("description", "folder"), cases())
def test_every_tensor_of_the_index_is_known_and_needed(description: str, folder: Path) -> None:
    plan, checkpoint = planned(description, folder)  # refuses tensors that it misses and those it does not know
    assert not plan.load.conversions
    if checkpoint.total_size is not None:
        known = sum(stored.nbytes for stored in checkpoint.tensors.values() if stored.file != Path("unknown"))
        if plan.load.ignored:  # buffers whose size nothing says
            assert 0 <= checkpoint.total_size - known < checkpoint.total_size / 1000
        else:
            assert known == checkpoint.total_size
