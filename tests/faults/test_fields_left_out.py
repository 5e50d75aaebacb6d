"""Faults of fields of config.json that a model needs and a loader leaves out: none is read as if it were not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tpkit
from tests.families import Families, Made, Tiny, rewrite
from tests.model.test_families_tp import TOLERANCE, off
from tests.small import CONFIG, on_rank, write
from tpkit import SpecError

KINDS = ["sliding_attention", "full_attention"]
#: caps, a scale that is no head size, a window shorter than the prompt of 14
FIELDS = {
    "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 20, "sliding_window": 4,
    "layer_types": KINDS,
}  # fmt: skip
CAPPED = Tiny(family="gemma2", heads=4, kv=2, tied=True, fields=json.dumps(FIELDS))


def differs(made: Made, folder: Path) -> float:
    model = on_rank(folder, source="gemma2")
    with torch.inference_mode():
        return off(model(made.ids), made.logits)


def test_caps_window_and_scale_count(families: Families) -> None:
    assert differs(families.make(CAPPED), families.make(CAPPED).folder) < TOLERANCE


@pytest.mark.parametrize(
    "other",
    [
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
        {"query_pre_attn_scalar": 256},
        {"sliding_window": 4096},
        {"layer_types": KINDS[::-1]},
    ],
    ids=lambda other: next(iter(other)),
)
def test_each_of_them_counts(other: dict[str, Any], families: Families, tmp_path: Path) -> None:
    """The reference does not change where one is left out: so each is seen."""
    folder = rewrite(families.copy(CAPPED, tmp_path / "other"), **other)
    assert differs(families.make(CAPPED), folder) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"attn_logit_softcapping": 0.0}, "a positive number or null is needed"),
        ({"attn_logit_softcapping": -50.0}, "a positive number or null is needed"),
        ({"final_logit_softcapping": 0}, "a positive number or null is needed"),
        ({"final_logit_softcapping": float("inf")}, "finite"),
        ({"attn_logit_softcapping": float("nan")}, "finite"),
        ({"layer_types": KINDS[:1]}, "layer_types: has 1 entries for 2 layers"),
        ({"layer_types": [*KINDS, KINDS[0]]}, "layer_types: has 3 entries for 2 layers"),
        ({"layer_types": ["sliding_atention", KINDS[1]]}, "'sliding_atention' is not known here"),
        ({"sliding_window": 0}, "a positive integer or null is needed"),
    ],
)
def test_values_that_mean_nothing_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        tpkit.load_spec("gemma2", config=CONFIG | {"model_type": "gemma2"} | FIELDS | fields)


@pytest.mark.parametrize(
    "fields",
    [{"attn_logit_softcapping": 50.0}, {"final_logit_softcapping": 30.0}, {"query_pre_attn_scalar": 16}],
    ids=lambda fields: next(iter(fields)),
)
def test_a_description_without_them_refuses_them(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"{next(iter(fields))}: is .* changes what the model computes"):
        tpkit.load_spec("llama", config=CONFIG | fields)


# rotary scaling -------------------------------------------------------------------------------------------------------

SCALED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    },
    "longrope": {
        "short_factor": [1.0, 2.0, 3.0, 4.0], "long_factor": [2.0, 4.0, 6.0, 8.0],
        "original_max_position_embeddings": 8, "factor": 4.0,
    },
}  # fmt: skip


def computed(folder: Path, **fields: Any) -> torch.Tensor:
    model = on_rank(write(folder, **fields, max_position_embeddings=64))
    with torch.inference_mode():
        found: torch.Tensor = model(torch.arange(80).unsqueeze(0))
    return found


@pytest.mark.parametrize("kind", SCALED)
def test_every_spelling_of_a_scaling_is_the_same_and_none_is_left_out(kind: str, tmp_path: Path) -> None:
    words = SCALED[kind]
    wanted = computed(tmp_path, rope_scaling={"rope_type": kind, **words}, rope_theta=1000.0)
    for fields in (
        {"rope_scaling": {"type": kind, **words}, "rope_theta": 1000.0},
        {"rope_scaling": {"type": kind, "rope_type": kind, **words}, "rope_theta": 1000.0},
        {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **words}},
    ):
        assert torch.equal(computed(tmp_path, **fields), wanted), fields
    assert off(computed(tmp_path, rope_theta=1000.0), wanted) > 1e-3


def test_no_scaling_has_as_many_spellings(tmp_path: Path) -> None:
    wanted = computed(tmp_path, rope_theta=1000.0)
    for fields in (
        {"rope_scaling": None, "rope_theta": 1000.0},
        {"rope_scaling": {"type": "default"}, "rope_theta": 1000.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
        {"rope_parameters": {"rope_theta": 1000.0}},
    ):
        assert torch.equal(computed(tmp_path, **fields), wanted), fields


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"type": "foo"}, "'foo' is not known; supported: default, linear"),
        ({"type": "dynamic", "rope_type": "linear", "factor": 2.0}, "type 'dynamic' and rope_type 'linear'"),
        ({"type": "linear"}, "missing: factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "missing: low_freq_factor, high_freq_factor, original_max_position"),
        ({"rope_type": "linear", "factor": 2.0, "bogus": 3}, "'linear' has no bogus; it knows: factor"),
        ({"factor": 2.0}, "type"),
    ],
)
def test_a_scaling_that_is_not_understood_is_refused(scaling: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        tpkit.load_spec("llama", config=CONFIG | {"rope_scaling": scaling})


@pytest.mark.parametrize(("factors", "told"), [(3, "3"), (5, "5")])
def test_as_many_factors_as_pairs_are_needed(factors: int, told: str, tmp_path: Path) -> None:
    words = SCALED["longrope"] | {"short_factor": [1.0] * factors, "long_factor": [1.0] * factors}
    with pytest.raises(SpecError, match=told):
        computed(tmp_path, rope_scaling={"rope_type": "longrope", **words})
