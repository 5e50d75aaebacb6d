"""Plans as they were agreed on. A change of who holds what must be meant: rewrite with ``TPKIT_UPDATE_GOLDEN=1``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tpkit.planning import plan_model
from tpkit.report import plan_json
from tpkit.spec import load_spec

FOLDER = Path(__file__).parent
SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "num_hidden_layers": 30, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
    "num_key_value_heads": 2, "num_hidden_layers": 24, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "head_dim": 128,
    "num_key_value_heads": 8, "num_hidden_layers": 28, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(("family", "config"), [("llama", SMOLLM2), ("qwen2", QWEN2), ("qwen3", QWEN3)])
def test_the_plan_is_the_agreed_one(family: str, config: dict[str, Any]) -> None:
    spec = load_spec(family, config=config)
    plans = [plan_json(plan_model(spec, ranks=ranks, dtype="bfloat16")) for ranks in (1, 2, 3, 5, 16)]
    file = FOLDER / f"{family}.json"
    if os.environ.get("TPKIT_UPDATE_GOLDEN"):
        file.write_text(_compact(plans), encoding="utf-8")
    assert plans == json.loads(file.read_text(encoding="utf-8"))


def _compact(plans: list[dict[str, Any]]) -> str:
    """One line for each parameter and rank, so that a change reads well as a diff."""
    blocks = []
    for plan in plans:
        fields = []
        for key, value in plan.items():
            lines = [f"    {json.dumps(row)}" for row in value] if isinstance(value, list) else []
            fields.append(
                f"  {json.dumps(key)}: " + ("[\n" + ",\n".join(lines) + "\n  ]" if lines else json.dumps(value))
            )
        blocks.append("{\n" + ",\n".join(fields) + "\n}")
    return "[" + ",\n".join(blocks) + "]\n"
