"""`find_spec` picks by architecture, then model_type, then names, and says what it could not decide."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import tpkit
from tests import small
from tpkit.errors import SpecError
from tpkit.registry import Registry
from tpkit.spec import description_names
from tpkit.spec.data import to_python
from tpkit.spec.find import read_source
from tpkit.spec.match import claims, find_description


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that installs descriptions: files in a folder that a distribution offers."""
    folder = tmp_path / "site" / "offered_descriptions"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(folder.parent))

    def install(**texts: str) -> Registry:
        for name, text in texts.items():
            (folder / f"{name}.yaml").write_text(text)
        registry = Registry.default().copy()
        marker = type("marker", (), {"__module__": "x", "__qualname__": "y"})
        registry.register("model configs", "offered", marker)
        (plugin,) = [p for p in registry.listing() if p.kind == "model configs" and p.name == "offered"]
        object.__setattr__(plugin, "value", "offered_descriptions")
        return registry

    yield install
    sys.modules.pop("offered_descriptions", None)


def bent(**changes: Any) -> str:
    """Returns the small description with top-level keys replaced, as text."""
    data = small.description() | changes
    return yaml.safe_dump(data, sort_keys=False, width=1000)


def config(**fields: Any) -> dict[str, Any]:
    return {**small.CONFIG, **fields}


def test_every_installed_description_is_found_by_what_it_names() -> None:
    found, broken = claims(Registry.default())
    assert not broken
    assert [claim.name for claim in found if claim.name in ("llama", "qwen2", "qwen3")] == ["llama", "qwen2", "qwen3"]
    assert {claim.name for claim in found} == set(description_names(Registry.default()))
    for claim in found:
        table = to_python(read_source(claim.path, Registry.default())[1])
        assert claim.architectures >= set(table["architectures"])
        assert claim.model_types == set(table.get("model_types", []))


def test_a_folder_a_file_and_a_mapping(tmp_path: Path) -> None:
    folder = small.write(tmp_path / "c", architectures=["LlamaForCausalLM"])
    for source in (folder, folder / "config.json", config(architectures=["LlamaForCausalLM"])):
        spec = tpkit.find_spec(source, overrides={"config.num_hidden_layers": 1})
        assert spec.family == "llama"
        assert spec.values["num_hidden_layers"] == 1
    assert (
        spec.fingerprint
        == tpkit.load_spec("llama", config=source, overrides={"config.num_hidden_layers": 1}).fingerprint
    )


def test_the_model_type_counts_where_no_class_is_named() -> None:
    assert find_description({"model_type": "qwen3"}).name == "qwen3"


def test_a_class_that_nobody_claims_is_not_taken_for_its_model_type() -> None:
    with pytest.raises(SpecError) as caught:
        find_description({"architectures": ["Qwen3RewardModel"], "model_type": "qwen3"})
    message = str(caught.value)
    assert "Qwen3RewardModel" in message
    assert "qwen3 is of the same model_type" in message
    assert "tpkit init" in message


def test_the_nearest_known_names_are_told() -> None:
    with pytest.raises(SpecError, match="nearest known names: Qwen2ForCausalLM"):
        find_description({"architectures": ["Qwen2ForCausaLM"]})


def test_the_inner_model_type_decides_between_claimants(installed: Any) -> None:
    wrapped = [{"architectures": ["BothForAll"], "config": "language"}]
    first = bent(family="one", architectures=["OneLM"], model_types=["one"], stored_as=wrapped)
    second = bent(family="two", architectures=["TwoLM"], model_types=["two"], stored_as=wrapped)
    registry = installed(one=first, two=second)
    outer = {"architectures": ["BothForAll"], "model_type": "both"}
    for kind in ("one", "two"):
        assert find_description({**outer, "language": {"model_type": kind}}, registry=registry).name == kind
    with pytest.raises(SpecError, match="claimed by 2 descriptions") as caught:
        find_description({**outer, "language": {"model_type": "three"}}, registry=registry)
    assert "one.yaml" in str(caught.value)
    assert "name the one that is meant" in str(caught.value)


def test_the_names_of_tensors_decide_last(installed: Any, tmp_path: Path) -> None:
    identity = {"architectures": ["SameLM"], "model_types": ["llama"]}
    other = small.description()["tree"]
    other = {"core": other["model"], "lm_head": {"style": "vocab"}}
    registry = installed(here=bent(**identity), there=bent(**identity, tree=other, ignore=[]))
    folder = small.write(tmp_path / "c", architectures=["SameLM"])
    assert find_description(folder, registry=registry).name == "here"
    names = list(small.weights())
    folder = small.write(tmp_path / "d", files=[names], architectures=["SameLM"])
    (folder / "model-00001-of-00001.safetensors").unlink()  # the index is enough
    assert find_description(folder, registry=registry).name == "here"
    with pytest.raises(SpecError, match="claimed by 2"):
        find_description(config(architectures=["SameLM"]), registry=registry)


def test_a_broken_description_stops_no_other(installed: Any) -> None:
    registry = installed(broken="schema: [1\n", nameless="schema: 1\ntree: {}\n")
    assert find_description({"model_type": "qwen3"}, registry=registry).name == "qwen3"
    with pytest.raises(SpecError, match=r"cannot be read, so it was not looked at: .*broken\.yaml"):
        find_description({"model_type": "no such"}, registry=registry)
