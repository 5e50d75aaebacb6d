"""How a description meets a config.json: fields, defaults, layers, spellings, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.spec_common import BASE, bent, bind_problems, described, registry
from tpkit.errors import SpecError
from tpkit.spec import BoundSpec, Description, Node, describe, load_spec


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Description:
    return described(BASE, tmp_path_factory.mktemp("small"))


def at(spec: BoundSpec, path: str) -> Node:
    return next(node for node in spec.root.walk() if node.path == path)


def options(spec: BoundSpec, path: str) -> Any:
    return at(spec, path).options


def windows(spec: BoundSpec) -> list[int | None]:
    layers = spec.values["num_hidden_layers"]
    return [options(spec, f"model.layers.{n}.self_attn").window for n in range(layers)]


# fields and defaults


def test_defaults_alone_make_a_model(small: Description) -> None:
    spec = small.bind()
    assert spec.values["head_dim"] == 16
    assert spec.values["num_key_value_heads"] == 4
    assert [node.name for node in at(spec, "model.layers").children] == ["0", "1", "2", "3"]
    assert "layer_type" not in spec.values


def test_the_tree(small: Description) -> None:
    spec = small.bind({"num_hidden_layers": 1, "tie_word_embeddings": True})
    found = [(node.path, node.kind, node.word, node.role) for node in spec.root.walk()]
    layer = "model.layers.0"
    assert found == [
        ("", "container", "", ""),
        ("model", "container", "", ""),
        ("model.embed_tokens", "module", "embedding", ""),
        ("model.layers", "repeat", "", ""),
        (layer, "container", "", ""),
        (f"{layer}.input_layernorm", "norm", "rms", ""),
        (f"{layer}.self_attn", "module", "attention", ""),
        (f"{layer}.self_attn.qkv_proj", "projection", "qkv", "qkv_proj"),
        (f"{layer}.self_attn.q_norm", "norm", "rms", "q_norm"),
        (f"{layer}.self_attn.o_proj", "projection", "row", "o_proj"),
        (f"{layer}.post_attention_layernorm", "norm", "rms", ""),
        (f"{layer}.mlp", "module", "mlp", ""),
        (f"{layer}.mlp.gate_up_proj", "projection", "merged_column", "up_proj"),
        (f"{layer}.mlp.down_proj", "projection", "row", "down_proj"),
        ("model.norm", "norm", "rms", ""),
        ("lm_head", "projection", "vocab", ""),
    ]
    assert options(spec, f"{layer}.self_attn.q_norm").size == 16
    assert options(spec, "model.norm").size == 64
    assert [pack.name for pack in options(spec, f"{layer}.self_attn.qkv_proj").packs] == ["q_proj", "k_proj", "v_proj"]
    assert options(spec, "lm_head").tied.to == "model.embed_tokens"
    first = (at(spec, layer).forward or ())[0]
    assert [term.call.child if term.call else "x" for term in first] == ["x", "self_attn"]
    assert at(spec, layer).where.endswith("d.yaml:27:7")


def test_a_null_is_none_unless_the_default_is_computed(small: Description) -> None:
    assert small.bind({"head_dim": None}).values["head_dim"] == 16
    assert small.bind({"sliding_window": None}).values["sliding_window"] is None
    assert small.bind({"head_dim": 24}).values["head_dim"] == 24


def test_other_names_and_nested_ones(tmp_path: Path) -> None:
    text = bent(
        ("  hidden_size: 64", "  hidden_size: {from: [n_embd, attn.width], default: 64}"),
        ("  bias: false", "  bias: {from: use_bias}"),
    )
    description = described(text, tmp_path)
    assert description.bind({"use_bias": True, "attn": {"width": 128}}).values["hidden_size"] == 128
    spec = description.bind({"use_bias": True, "n_embd": 32, "hidden_size": 999, "attn": {"width": 128}})
    assert spec.values["hidden_size"] == 32
    assert options(spec, "model.layers.0.self_attn.qkv_proj").bias is True
    assert bind_problems(description, {}) == ["config: use_bias: is missing, and config.bias has no default"]


def test_the_text_part_of_a_larger_model(small: Description) -> None:
    config = {"model_type": "wide", "hidden_size": 8, "text_config": {"model_type": "small", "hidden_size": 128}}
    spec = small.bind(config)
    assert spec.values["hidden_size"] == 128
    assert spec.config == config["text_config"]
    assert bind_problems(small, {"text_config": {"hidden_size": "64"}}) == [
        "config: text_config.hidden_size: a positive integer is needed, not text '64'"
    ]


def test_other_places_in_a_checkpoint(tmp_path: Path) -> None:
    stored = "stored_as: [{architectures: [Big], config: language, prefix: {model: big.model}, ignore: [vision.**]}]\n"
    spec = described(bent(("config:\n", stored + "config:\n")), tmp_path).bind(
        {"architectures": ["Big"], "language": {"hidden_size": 32}}
    )
    assert spec.values["hidden_size"] == 32
    assert spec.prefixes == ({}, {"model": "big.model"})
    assert spec.ignore == ("model.layers.*.self_attn.rotary_emb.inv_freq", "vision.**")


def test_numbers_in_patterns_are_filled_in(tmp_path: Path) -> None:
    text = bent(("[model.layers.*.self_attn.rotary_emb.inv_freq]", "['model.layers.{num_hidden_layers + 1}.**']"))
    assert described(text, tmp_path).bind({"num_hidden_layers": 9}).ignore == ("model.layers.10.**",)


def test_what_a_description_requires(tmp_path: Path) -> None:
    description = described(bent(("tree:\n", "require: [not bias, hidden_size < 100]\ntree:\n")), tmp_path)
    description.bind({})
    (problem,) = bind_problems(description, {"hidden_size": 128}, tmp_path)
    assert (
        problem
        == "d.yaml:23:21: require[1]: hidden_size < 100 does not hold: hidden_size = 128 from config: hidden_size"
    )


# layers


def test_a_list_per_layer_counts_else_the_pattern(small: Description) -> None:
    assert windows(small.bind({"sliding_window": 7})) == [7, None, 7, None]
    listed = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
    assert windows(small.bind({"sliding_window": 7, "layer_types": listed})) == [None, None, 7, None]
    assert windows(small.bind({"sliding_window": 7, "layer_types": listed, "model_type": "wide"})) == [None] * 4
    assert windows(small.bind({"sliding_window": 7, "layer_types": None})) == [7, None, 7, None]


def test_derived_patterns_and_layers(tmp_path: Path) -> None:
    text = bent(
        ("tree:\n", "derived:\n  third: {every: 3}\n  odd: third or layer == 0\ntree:\n"),
        ("layer_type == 'sliding_attention'", "layer_type == 'sliding_attention' and not odd"),
    )
    assert windows(described(text, tmp_path).bind({"sliding_window": 7})) == [None, None, None, None]
    assert windows(described(text, tmp_path).bind({"sliding_window": 7, "num_hidden_layers": 6}))[4] == 7


def test_choices_and_steps_by_layer(tmp_path: Path) -> None:
    text = bent(
        ("x + mlp(post_attention_layernorm(x))]", "{when: layer > 0, do: x + mlp(post_attention_layernorm(x))}]"),
        ("post_attention_layernorm: {norm: rms}", "post_attention_layernorm: {when: layer > 0, norm: rms}"),
        ("module: mlp\n", "module: mlp\n        when: layer > 0\n"),
    )
    spec = described(text, tmp_path).bind({})
    assert [len(node.forward or ()) for node in at(spec, "model.layers").children] == [1, 2, 2, 2]
    assert [len(node.children) for node in at(spec, "model.layers").children] == [2, 4, 4, 4]
    wrong = text.replace("{when: layer > 0, norm: rms}", "{when: layer > 1, norm: rms}")
    problems = bind_problems(described(wrong, tmp_path), {}, tmp_path)
    assert problems == [
        "d.yaml:28:82: tree.model.layers.forward[1]: there is no child 'post_attention_layernorm' in layer 1"
    ]


def test_the_list_per_layer_has_an_entry_for_every_layer(small: Description) -> None:
    assert bind_problems(small, {"layer_types": ["full_attention"]}) == [
        "config: layer_types: has 1 entries for 4 layers"
    ]
    (problem,) = bind_problems(small, {"layer_types": ["full_attention"] * 3 + ["linear_attention"]})
    assert problem.startswith("config: layer_types[3]: text 'linear_attention' is not known here")


# what does not fit


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"hidden_size": "64"}, "config: hidden_size: a positive integer is needed, not text '64'"),
        ({"hidden_size": -64}, "config: hidden_size: a positive integer is needed, not -64"),
        ({"hidden_size": True}, "config: hidden_size: a positive integer is needed, not true"),
        ({"hidden_size": 64.0}, "config: hidden_size: a positive integer is needed, not 64.0"),
        ({"hidden_size": None}, "config: hidden_size: a positive integer is needed, not null"),
        ({"hidden_size": [64]}, "config: hidden_size: a positive integer is needed, not [64]"),
        ({"num_hidden_layers": 0}, "config: num_hidden_layers: a positive integer is needed, not 0"),
        ({"rms_norm_eps": 0}, "config: rms_norm_eps: a positive number is needed, not 0"),
        ({"rope_theta": "x"}, "config: rope_theta: a positive number is needed, not text 'x'"),
        ({"bias": 1}, "config: bias: true or false is needed, not 1"),
        ({"hidden_act": 3}, "config: hidden_act: text is needed, not 3"),
        ({"tie_word_embeddings": "yes"}, "config: tie_word_embeddings: true or false is needed, not text 'yes'"),
        ({"layer_types": 5}, "config: layer_types: a list with an entry per layer is needed, not 5"),
        (
            {"hidden_size": 66},
            "d.yaml:13:25: config.head_dim: 66 does not divide by 4: 2 would be left over (hidden_size = 66 from "
            "config: hidden_size, num_attention_heads = 4 from its default, d.yaml:11:3)",
        ),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 4, "head_dim": 8},
            "d.yaml:31:9: tree.model.layers.self_attn: axis 'heads': 6 units do not come in 4 groups of equal size; "
            "num_attention_heads must be a multiple of num_key_value_heads",
        ),
        (
            {"sliding_window": 0},
            "d.yaml:33:88: tree.model.layers.self_attn.window: sliding_window is 0 (config: sliding_window); "
            "a positive integer or null is needed",
        ),
        (
            {"num_hidden_layers": 10**12},
            "d.yaml:27:7: tree.model.layers.repeat: 1000000000000 copies; more than 10000 are taken for a mistake",
        ),
        (
            {"hidden_act": None},
            "d.yaml:40:21: tree.model.layers.mlp.activation: hidden_act is null (config: hidden_act); "
            "one of: child, gelu, gelu_fast, gelu_new, gelu_pytorch_tanh, linear, mish, quick_gelu, relu, relu2, "
            "relu6, silu, swish, tanh is needed",
        ),
        (
            {"attn_logit_softcapping": 50.0},
            "config: attn_logit_softcapping: is 50.0, which changes what the model computes, and this description "
            "does not read it",
        ),
        (
            {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]},
            "config: is of gemma, GemmaForCausalLM; this description is of SmallForCausalLM, small, wide. If both "
            "compute the same, say so: override 'architectures'",
        ),
    ],
)
def test_refused(small: Description, config: dict[str, Any], problem: str) -> None:
    assert bind_problems(small, config, Path(small.source).parent) == [problem]


def test_all_that_does_not_fit_comes_at_once(small: Description) -> None:
    found = bind_problems(small, {"hidden_size": "64", "vocab_size": -1, "bias": 3, "layer_types": []})
    assert len(found) == 4


def test_messages_name_the_file(small: Description, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": "64"}))
    (problem,) = bind_problems(small, tmp_path)
    assert problem == f"{tmp_path}/config.json: hidden_size: a positive integer is needed, not text '64'"


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": 1, "a": 2}', "\xff", "[" * 100_000])
def test_no_config(small: Description, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(SpecError, match=r"config\.json"):
        small.bind(tmp_path)
    with pytest.raises(SpecError, match="there is no"):
        small.bind(tmp_path / "other.json")


# overrides and sources


def test_overrides(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_text(BASE)

    def load(**overrides: Any) -> BoundSpec:
        paths = {path.replace("__", "."): value for path, value in overrides.items()}
        return load_spec(tmp_path / "d.yaml", config={"num_hidden_layers": 3}, overrides=paths, registry=registry())

    assert load(config__num_hidden_layers=2).values["num_hidden_layers"] == 2
    assert windows(load(config__layer_type="sliding_attention", config__sliding_window=5)) == [5, 5, 5]
    assert options(load(tree__lm_head__disable_tp=True), "lm_head").disable_tp is True
    assert load(ignore=["mtp.**"]).ignore == ("mtp.**",)
    assert load(tree__model__norm__eps=1e-3).root.children[0].children[-1].options.eps == 1e-3
    for path, told in {
        "config__num_hidden_layer": "declares no field 'num_hidden_layer' (did you mean 'num_hidden_layers'?)",
        "tree__lm_hed__disable_tp": "tree has no 'lm_hed' (did you mean 'lm_head'?)",
        "ignor": "the description has no 'ignor' (did you mean 'ignore'?)",
        "tree__model__embed_tokens__module__x": "tree.model.embed_tokens.module is a value and has no 'x'",
        "architectures__7": "architectures is a list of 1; '7' is none of its indices",
    }.items():
        with pytest.raises(SpecError, match="override") as caught:
            load(**{path: 1})
        assert told in str(caught.value)
    with pytest.raises(SpecError, match="unknown word 'disable_tb' of a projection"):
        load(tree__lm_head__disable_tb=True)
    with pytest.raises(SpecError, match=r"override config\.hidden_size: a positive integer is needed, not text"):
        load(config__hidden_size="64")


def test_a_path_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert describe("llama.yaml", registry=registry()).header.family == "llama"
    assert describe("llama", registry=registry()).header.family == "llama"
    (tmp_path / "llama.yaml").write_text(BASE)
    assert describe("llama.yaml", registry=registry()).header.family == "small"
    with pytest.raises(SpecError) as caught:
        describe("lama.yaml", registry=registry())
    assert "no description 'lama.yaml' (did you mean 'llama'?)" in str(caught.value)
    assert str(tmp_path / "lama.yaml") in str(caught.value)


def test_descriptions_of_a_plugin_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpkit.registry import Plugin, Registry

    (tmp_path / "my_models").mkdir()
    (tmp_path / "my_models" / "mine.yaml").write_text(BASE)
    monkeypatch.syspath_prepend(tmp_path)
    offer = Plugin(kind="model configs", name="mine", value="my_models", distribution="mine", version="1")
    broken = Plugin(kind="model configs", name="gone", value="no_such.thing", distribution="gone", version="1")
    known = Registry((*registry().listing(), offer, broken))
    assert describe("mine", registry=known).header.family == "small"
