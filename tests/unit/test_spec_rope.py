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


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"type": "foo"}, "rope scaling of kind 'foo' is not known; supported: default, linear, llama3"),
        ({"type": "liner", "factor": 2}, "rope scaling of kind 'liner' is not known (did you mean 'linear'?)"),
        ({"rope_type": "yarn", "factor": 4}, "rope scaling of kind 'yarn' is not known"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "rope scaling of kind 'longrope' is not known"),
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
        ({"type": "default", "mrope_section": [1, 2]}, "gives numbers but no kind to use them"),
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
