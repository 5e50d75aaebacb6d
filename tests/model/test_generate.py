"""Decoding: greedy is the argmax of transformers' logits, sampling is seeded, ends of sequences end it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tpkit
from tests.families import Families, Tiny
from tests.ranks import Ranks
from tpkit.generation import eos_ids

TINY = Tiny(family="qwen3", heads=9, kv=3, ffn=136, vocab=257, hidden=144)
PROMPT = [3, 17, 200, 5]


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """What transformers continues with, one whole pass for every token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def generated(family: str, folder: Path, options: dict[str, Any]) -> list[int]:
    model = tpkit.build(tpkit.load_spec(family, config=folder), checkpoint=folder)
    return tpkit.generate(model, PROMPT, **options)


@pytest.mark.parametrize("tiny", [TINY, Tiny(family="mistral", vocab=257)], ids=lambda tiny: tiny.family)
def test_greedy_tokens_are_those_of_transformers(tiny: Tiny, families: Families, ranks: Ranks) -> None:
    folder = families.make(tiny).folder
    wanted = greedy(folder, PROMPT, 12)
    assert len(set(wanted)) > 3, "a model that repeats itself tests little"
    for tp in (1, 3):
        assert ranks(tp).run(generated, tiny.description, folder, {"max_new_tokens": 12}) == [wanted] * tp


def test_an_end_token_ends_it_and_is_returned(families: Families, ranks: Ranks) -> None:
    folder = families.make(TINY).folder
    wanted = greedy(folder, PROMPT, 12)
    end = wanted[4]
    first = wanted.index(end)
    options = {"max_new_tokens": 12, "eos": {end, 9999}}
    assert ranks(2).run(generated, "qwen3", folder, options) == [wanted[: first + 1]] * 2


def test_ranks_draw_the_same_tokens_and_seeds_others(families: Families, ranks: Ranks) -> None:
    folder = families.make(TINY).folder
    options = {"max_new_tokens": 8, "temperature": 1.5, "seed": 1}
    one, two = ranks(2).run(generated, "qwen3", folder, options)
    assert one == two == ranks(1).run(generated, "qwen3", folder, options)[0]
    assert ranks(1).run(generated, "qwen3", folder, {**options, "seed": 2})[0] != one


def test_the_smallest_nucleus_is_greedy(families: Families) -> None:
    folder = families.make(TINY).folder
    options = {"max_new_tokens": 6, "temperature": 2.0, "top_p": 1e-6}
    assert generated("qwen3", folder, options) == generated("qwen3", folder, {"max_new_tokens": 6})


def test_tokens_are_told_as_they_come(families: Families) -> None:
    told: list[int] = []
    assert generated("qwen3", families.make(TINY).folder, {"max_new_tokens": 3, "on_token": told.append}) == told


@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}], ids=str
)
def test_numbers_that_make_no_sense(options: dict[str, Any], families: Families) -> None:
    with pytest.raises(tpkit.UsageError, match="at least one token each"):
        generated("qwen3", families.make(TINY).folder, options)


@pytest.mark.parametrize(
    ("generation", "config", "found"),
    [
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 3}, {1, 2, 3}),
        ({"eos_token_id": None}, {"text_config": {"eos_token_id": 7}}, {7}),
        (None, {}, set()),
    ],
)
def test_end_tokens_come_from_both_files(
    generation: dict[str, Any] | None, config: dict[str, Any], found: set[int], tmp_path: Path
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert eos_ids(tmp_path) == found


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "end"}', '{"eos_token_id": {}}'])
def test_a_damaged_generation_config_names_the_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(tpkit.CheckpointError, match=r"generation_config\.json"):
        eos_ids(tmp_path)
