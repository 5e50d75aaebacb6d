"""One resolver reads everything that is said of a model's quantisation, and quotes who disagrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tpkit
from tests.quant.methods import Rows, dense, quantised, registry
from tests.small import CONFIG, description, write
from tpkit.errors import LoadError, PluginError, SpecError
from tpkit.planning import ModelPlan


def planned(folder: Path, source: Any = "llama", quant: Any = None, overrides: Any = None) -> ModelPlan:
    spec = tpkit.load_spec(source, config=folder, quant=quant, overrides=overrides, registry=registry())
    return tpkit.plan_model(spec, ranks=2, checkpoint=tpkit.open_checkpoint(folder), registry=registry())


def methods(plan: ModelPlan) -> dict[str, str]:
    found = {path: str(each.choice) for path, each in plan.planned.items() if each.choice is not None}
    return {path.removeprefix("model.layers.0."): method for path, method in found.items() if "layers.1" not in path}


ALL = {
    "model.embed_tokens": "none", "self_attn.qkv_proj": "rows", "self_attn.o_proj": "rows",
    "mlp.gate_up_proj": "rows", "mlp.down_proj": "rows", "lm_head": "none",
}  # fmt: skip


def test_config_json(tmp_path: Path) -> None:
    assert methods(planned(write(tmp_path, quantised(), quantization_config={"quant_method": "rows"}))) == ALL


def test_the_older_key_and_the_translation_of_a_quantiser_s_words(tmp_path: Path) -> None:
    said = {"quant_method": "rows", "group_size": 16, "modules_to_not_convert": ["lm_head"], "version": "9"}
    plan = planned(write(tmp_path, quantised(group=16), compression_config=said))
    assert methods(plan)["mlp.down_proj"] == "rows g16"


def test_inside_the_text_part_of_a_larger_config_and_at_its_top(tmp_path: Path) -> None:
    for place in ("top", "inner"):
        folder = write(tmp_path / place, quantised())
        text, said = {**CONFIG}, {"quantization_config": {"quant_method": "rows"}}
        whole = {"text_config": {**text, **(said if place == "inner" else {})}, **(said if place == "top" else {})}
        (folder / "config.json").write_text(json.dumps(whole))
        assert methods(planned(folder)) == ALL


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json"])
def test_files_beside_it(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, quantised())
    inner = {"quant_method": "rows"}
    said = {"producer": {"name": "rows"}, "quantization": {}} if name.startswith("hf") else inner
    (folder / name).write_text(json.dumps(said))
    assert methods(planned(folder)) == ALL


def test_a_config_that_names_its_producer_in_place_of_a_method(tmp_path: Path) -> None:
    said = {"producer": {"name": "rows", "version": "1"}, "group_size": 16}
    plan = planned(write(tmp_path, quantised(group=16), quantization_config=said))
    assert methods(plan)["mlp.down_proj"] == "rows g16"


def test_the_description_and_the_command_line(tmp_path: Path) -> None:
    folder = write(tmp_path, quantised(group=16))
    for source, quant in (
        ("llama", {"method": "rows", "group": 16}),
        (description(quant={"method": "rows", "group": 16}), None),
    ):
        assert methods(planned(folder, source, quant))["self_attn.o_proj"] == "rows g16"


@pytest.mark.parametrize("quant", ["none", {"method": "none"}])
def test_disagreement_on_the_method_quotes_each(quant: Any, tmp_path: Path) -> None:
    folder = write(tmp_path, quantised(), quantization_config={"quant_method": "rows"})
    with pytest.raises(SpecError, match=r"--quant says none; .*config\.json quantization_config says rows"):
        planned(folder, quant=quant)


def test_disagreement_on_an_option_quotes_each(tmp_path: Path) -> None:
    folder = write(tmp_path, quantised(group=16), quantization_config={"quant_method": "rows", "group_size": 16})
    assert planned(folder, quant="rows")
    assert planned(folder, quant={"method": "rows", "group": 16})
    with pytest.raises(SpecError, match=r"rows group: --quant says 8, .*config\.json quantization_config says 16"):
        planned(folder, quant={"method": "rows", "group": 8})
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "rows"}, "quantization": {"group_size": 32}})
    )
    with pytest.raises(SpecError, match=r"says 16, .*hf_quant_config\.json says 32"):
        planned(folder)


def test_lists_agree_in_any_order_and_null_says_nothing(tmp_path: Path) -> None:
    said = {"quant_method": "rows", "modules_to_not_convert": ["lm_head", "embed_tokens"], "group_size": None}
    folder = write(tmp_path, quantised(), quantization_config=said)
    other = {"producer": {"name": "rows"}, "quantization": {"modules_to_not_convert": ["embed_tokens", "lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(other))
    assert methods(planned(folder)) == ALL


@pytest.mark.parametrize("entry", ["q_pro", "model.layers.0.mlp.down_pro", "layer.0"])
def test_a_misspelt_entry_of_one_s_own_list(entry: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=f"'{entry}' matches no module of the model"):
        planned(write(tmp_path, quantised()), quant={"method": "rows", "ignore": [entry]})


def test_two_names_of_one_method_agree(tmp_path: Path) -> None:
    folder = write(tmp_path, quantised(), quantization_config={"quant_method": "rows"})
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "lines"}, "quantization": {}}))
    both = registry(("lines", Rows))
    spec = tpkit.load_spec("llama", config=folder, registry=both)
    assert tpkit.plan_model(spec, ranks=1, checkpoint=tpkit.open_checkpoint(folder), registry=both)


def test_options_that_nobody_knows(tmp_path: Path) -> None:
    folder = write(tmp_path, quantised(), quantization_config={"quant_method": "rows", "magic": 3})
    with pytest.raises(PluginError, match=r"'rows' of this program .*does not take the options of .*magic"):
        planned(folder)
    assert methods(planned(folder, quant={"accept": ["magic"]})) == ALL


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"bits": 4}, "names no quant_method"),
        (["rows"], "no mapping"),
        ({"quant_method": "rowz"}, "no quant method named 'rowz' is installed .did you mean 'rows'"),
        ({"quant_method": "none", "bits": 4}, "does not take the options"),
    ],
)
def test_what_makes_no_sense_in_config_json(said: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises((SpecError, PluginError), match=message):
        planned(write(tmp_path, quantised(), quantization_config=said))


@pytest.mark.parametrize("quant", ["", 3, {"bits": 4}, {"method": 4}, {"dequantize": "yes"}, {"accept": "x"}])
def test_what_makes_no_sense_as_a_word(quant: Any, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"--quant"):
        planned(write(tmp_path, quantised(), quantization_config={"quant_method": "rows"}), quant=quant)


def test_a_module_s_own_word_wins(tmp_path: Path) -> None:
    folder = write(
        tmp_path, quantised(), quantization_config={"quant_method": "rows", "modules_to_not_convert": ["mlp"]}
    )
    key = "tree.model.layers.mlp.down_proj.quant"
    with pytest.raises(LoadError, match=r"mlp\.down_proj"):
        planned(folder)
    plan = planned(folder, overrides={key: "rows", "tree.model.layers.mlp.gate_up_proj.quant": "rows"})
    assert methods(plan) == ALL
    with pytest.raises(LoadError, match=r"down_proj\.weight is int8"):
        planned(folder, overrides={key: "none", "tree.model.layers.mlp.gate_up_proj.quant": "rows"})


def test_quantised_names_without_a_word_and_a_word_without_quantised_names(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"looks quantised, but nothing says how") as caught:
        planned(write(tmp_path / "a", quantised() | {"model.layers.0.mlp.up_proj.qweight": torch.zeros(2)}))
    assert "name the method with --quant" in str(caught.value)
    plain = dense(quantised())
    with pytest.raises(LoadError, match=r"q_proj\.scale.*beside it: weight"):
        planned(write(tmp_path / "b", plain, quantization_config={"quant_method": "rows"}))


def test_tensors_that_a_method_knows_and_does_not_need_are_listed(tmp_path: Path) -> None:
    tensors = quantised() | {"model.layers.0.self_attn.k_proj.k_scale": torch.ones(())}
    plan = planned(write(tmp_path, tensors, quantization_config={"quant_method": "rows"}))
    assert plan.load.ignored == {"model.layers.0.self_attn.k_proj.k_scale": ("**.k_scale of rows", 4)}


def test_every_rank_must_have_chosen_the_same(tmp_path: Path) -> None:
    folder = write(tmp_path, quantised(group=16))
    prints = [
        planned(folder, quant={"method": "rows", "group": 16}).fingerprints(registry()),
        planned(folder, quant={"method": "rows", "group": 16, "ignore": ["embed_tokens"]}).fingerprints(registry()),
    ]
    assert prints[0]["quantisation"] != prints[1]["quantisation"]
