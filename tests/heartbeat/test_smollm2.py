"""The heartbeat: a real model, on several ranks, says what transformers says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODEL = Path(__file__).parents[2] / "build" / "smollm2"
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "Water boils at a temperature of",
    "The three laws of motion are: 1.",
]

pytestmark = pytest.mark.skipif(not (MODEL / "config.json").is_file(), reason="`make model` has not made SmolLM2")


@pytest.fixture(scope="module")
def expected() -> Callable[[int, int], list[list[int]]]:
    """Greedy tokens of transformers in float32, for the first prompts, computed once for the most asked for."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    known: dict[str, list[int]] = {}

    def compute(prompts: int, tokens: int) -> list[list[int]]:
        for prompt in PROMPTS[:prompts]:
            if len(known.get(prompt, [])) < tokens:
                ids = tokenizer(prompt, return_tensors="pt").input_ids
                made = model.generate(ids, max_new_tokens=tokens, do_sample=False)
                known[prompt] = made[0, ids.shape[1] :].tolist()
        return [known[prompt][:tokens] for prompt in PROMPTS[:prompts]]

    return compute


def greedy(prompts: int, tokens: int) -> list[list[int]]:
    """Runs on every rank."""
    import torch

    import tpkit
    from tpkit.chat import TextCodec
    from tpkit.generation import eos_ids

    spec = tpkit.load_spec("llama.yaml", config=MODEL)
    model = tpkit.build(spec, checkpoint=MODEL, dtype=torch.float32, device="cpu")
    codec, eos = TextCodec(MODEL), eos_ids(MODEL)
    return [tpkit.generate(model, codec.encode(prompt), max_new_tokens=tokens, eos=eos) for prompt in PROMPTS[:prompts]]


@pytest.mark.parametrize("size", [2, 3])
def test_the_same_greedy_tokens_as_transformers(ranks: Any, expected: Any, size: int) -> None:
    wanted = expected(2, 24)
    assert ranks(size).run(greedy, 2, 24) == [wanted] * size


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_64_greedy_tokens_of_five_prompts(ranks: Any, expected: Any, size: int) -> None:
    wanted = expected(5, 64)
    assert ranks(size).run(greedy, 5, 64) == [wanted] * size


def test_the_command_line_answers_on_three_ranks() -> None:
    command = [sys.executable, "-m", "tpkit", "build", "llama.yaml", "--checkpoint", str(MODEL), "--tp", "3", "--json"]
    question = ["--chat", "--prompt", "What is the capital of France?", "--max-new-tokens", "16"]
    done = subprocess.run([*command, *question], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)  # one object and nothing else
    assert (answer["schema"], answer["model"], answer["tp"], answer["backend"]) == (1, "llama", 3, "gloo")
    assert [row["rank"] for row in answer["ranks"]] == [0, 1, 2]
    assert all(0 < row["bytes_read"] <= 1.3 * row["param_bytes"] for row in answer["ranks"])
    assert "Paris" in answer["generated"]["text"]
    assert answer["generated"]["token_ids"][-1] == 2  # the end of the turn is the last token
