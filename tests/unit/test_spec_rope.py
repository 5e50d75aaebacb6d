"""Rotary scaling: both spellings, both homes, and kinds that are not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.spec_common import BASE, bind_problems, described
from tpkit.errors import SpecError
from tpkit.spec import Description, check_scaling

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Description:
    return described(BASE, tmp_path_factory.mktemp("rope"))


def rope(description: Description, config: dict[str, Any]) -> Any:
    spec = description.bind({"num_hidden_layers": 1, **config})
    return next(node for node in spec.root.walk() if node.word == "attention").options.rope


@pytest.mark.parametrize(
    "given", [None, {}, {"type": "default"}, {"rope_type": "default", "rope_theta": 1e4}, {"type": None}]
)
def test_nothing_is_scaled(given: dict[str, Any] | None) -> None:
    assert check_scaling(given) is None


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize(("kind", "numbers"), [("linear", {"factor": 2}), ("llama3", LLAMA3)])
def test_both_spellings_come_out_as_one(key: str, kind: str, numbers: dict[str, Any]) -> None:
    assert check_scaling({key: kind, **numbers}) == {"rope_type": kind, **numbers}
    assert check_scaling({"type": kind, "rope_type": kind, "rope_theta": 5, **numbers}) == {
        "rope_type": kind,
        **numbers,
    }


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
FACTORS = {"short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"type": "su", **FACTORS}, {"rope_type": "longrope", **FACTORS}),
        ({"type": "su", "rope_type": "longrope", **FACTORS}, {"rope_type": "longrope", **FACTORS}),
        ({**YARN, "type": "yarn", "finetuned": True, "llama_4_scaling_beta": 0.1, "rope_theta": 1e6}, YARN),
        ({**YARN, "beta_fast": None, "max_position_embeddings": None, "mrope_section": [1, 1, 2]}, YARN),
        ({"type": "linear", "factor": 2, "original_max_position_embeddings": 9}, {"rope_type": "linear", "factor": 2}),
        ({"type": "dynamic", "factor": 2.0, "alpha": None}, {"rope_type": "dynamic", "factor": 2.0}),
        (
            {"type": "dynamic", "alpha": 1e3, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0},
            {"rope_type": "dynamic", "alpha": 1e3},
        ),
        ({"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]}, None),
        ({"rope_type": "default", "mrope_section": [11, 11, 10], "mrope_interleaved": True}, None),
        (
            {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            {"rope_type": "proportional"},
        ),
    ],
)
def test_what_config_json_files_write_beside(given: dict[str, Any], read: dict[str, Any] | None) -> None:
    assert check_scaling(given) == read


def test_a_length_that_a_scaling_needs_is_missed_while_binding(small: Description, tmp_path: Path) -> None:
    config = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64}
    (problem,) = bind_problems(small, config)
    assert "rope scaling 'dynamic' has no max_length" in problem
    text = BASE.replace("rope: {pairs: half}", "rope: {pairs: half, max_length: max_position_embeddings}")
    text = text.replace("  rope_scaling: null\n", "  rope_scaling: null\n  max_position_embeddings: 2048\n")
    assert rope(described(text, tmp_path), config).max_length == 64


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"type": "foo"}, "rope scaling of kind 'foo' is not known; supported: default, linear, dynamic, "),
        ({"type": "liner", "factor": 2}, "rope scaling of kind 'liner' is not known (did you mean 'linear'?)"),
        ({"rope_type": "yarn", "factor": 4, "alpha": 2}, "rope scaling 'yarn' has no alpha; it knows: factor, "),
        ({"rope_type": "yarn", "truncate": 1}, "truncate must be true or false, not 1"),
        ({"rope_type": "yarn", "mscale": -1}, "mscale must be a number from 0, not -1"),
        ({"rope_type": "yarn", "beta_fast": 1, "beta_slow": 2}, "beta_fast 1 must not be less than beta_slow 2"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "missing: long_factor"),
        ({"type": "su", "short_factor": [1.0], "long_factor": 2}, "long_factor must be a list of positive numbers"),
        ({"type": "su", "short_factor": [1.0], "long_factor": [0]}, "long_factor must be a list of positive numbers"),
        (
            {"type": "su", "short_factor": [1.0], "long_factor": [1.0, 2.0]},
            "1 numbers in short_factor, but 2 in long_factor",
        ),
        (
            {"type": "su", "short_factor": [1.0], "long_factor": [1.0], "short_mscale": 1.0},
            "needs short_mscale and long_mscale, or attention_factor, or none of them; it has short_mscale",
        ),
        ({"type": "dynamic"}, "rope scaling 'dynamic' needs factor or alpha"),
        ({"type": "dynamic", "factor": 2.0, "mscale": 1.0}, "'dynamic' with a factor has no mscale"),
        ({"type": 3}, "rope scaling of kind 3 is not known"),
        ({"type": ["linear"]}, "is not known"),
        ({"type": "linear", "rope_type": "llama3", "factor": 2}, "says type 'linear' and rope_type 'llama3'"),
        ({"type": "linear"}, "rope scaling 'linear' needs factor; missing: factor"),
        ({"type": "linear", "factor": None}, "missing: factor"),
        ({"type": "linear", "factor": 2, "beta": 3}, "rope scaling 'linear' has no beta; it knows: factor"),
        ({"type": "linear", "factor": "2"}, "factor must be a positive number, not text '2'"),
        ({"type": "linear", "factor": True}, "factor must be a positive number, not true"),
        ({"type": "linear", "factor": 0.5}, "factor must be at least 1, not 0.5"),
        (
            {"type": "llama3", "factor": 8},
            "missing: low_freq_factor, high_freq_factor, original_max_position_embeddings",
        ),
        (
            {"type": "llama3", **LLAMA3, "low_freq_factor": 4.0},
            "low_freq_factor 4.0 must be less than high_freq_factor 4.0",
        ),
        ({"type": "llama3", **LLAMA3, "original_max_position_embeddings": -1}, "must be a positive number, not -1"),
        ({"factor": 2}, "gives numbers but no kind to use them"),
        ({"type": "mrope", "mrope_section": [1, 2], "factor": 2}, "gives numbers but no kind to use them"),
        ({"full_attention": {"rope_type": "default"}}, "differs by layer type is not supported"),
    ],
)
def test_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_scaling(given)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("config", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 500000, "rope_scaling": None}, 500000, None),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5, None),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": 5e5}, 5e5, None),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            5e5,
            {"rope_type": "llama3", **LLAMA3},
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            5e5,
            {"rope_type": "llama3", **LLAMA3},
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 10000.0, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0},
            },
            7.0,
            {"rope_type": "linear", "factor": 2.0},
        ),
    ],
)
def test_where_config_json_says_it(small: Description, config: dict[str, Any], theta: float, scaling: Any) -> None:
    found = rope(small, config)
    assert found.theta == theta
    assert found.scaling == scaling


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            {"rope_parameters": {"rope_theta": 5, "rope_type": "default"}, "rope_theta": 6},
            "config: rope_parameters.rope_theta: is 5, but rope_theta is 6; keep the one that is meant",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "linear", "factor": 4}},
            "keep the one that is meant",
        ),
        ({"rope_scaling": {"type": "foo"}}, "rope scaling of kind 'foo' is not known"),
        ({"rope_scaling": 3}, "rope_scaling is 3 (config: rope_scaling); a mapping or null is needed"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5}}}, "from config: rope_parameters"),
        (
            {"partial_rotary_factor": 0.5},
            "config: partial_rotary_factor: is 0.5, which changes what the model computes",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor: is 0.5, which changes",
        ),
    ],
)
def test_what_config_json_may_not_say(small: Description, config: dict[str, Any], told: str) -> None:
    (problem,) = bind_problems(small, config)
    assert told in problem


def test_a_description_that_reads_no_scaling_refuses_one(tmp_path: Path) -> None:
    text = BASE.replace("  rope_scaling: null\n", "")
    (problem,) = bind_problems(described(text, tmp_path), {"rope_scaling": {"type": "linear", "factor": 2}})
    assert "config: rope_scaling: is" in problem
