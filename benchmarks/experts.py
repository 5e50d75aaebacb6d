"""A model of experts on one rank beside transformers': prefill and decoding, in interleaved rounds, as ratios.

    python benchmarks/experts.py [--experts 64] [--width 256] [--tokens 512] [--rounds 7]

Above 1 tpkit is faster. Expected: level in prefill, where both multiply once for all experts (grouped), and in
decoding, where both touch the chosen experts alone. (transformers needs widths that are multiples of 16 bytes here.)
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import tpkit


def reference(folder: Path, args: argparse.Namespace) -> torch.nn.Module:
    """Writes a random checkpoint and returns transformers' model of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=1024, hidden_size=512, intermediate_size=1024, moe_intermediate_size=args.width,
        num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_experts=args.experts,
        num_experts_per_tok=8, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def seconds(work: Callable[[], object]) -> float:
    """Returns how long one call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    """Prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, value in {"experts": 64, "width": 256, "tokens": 512, "rounds": 7}.items():
        parser.add_argument(f"--{flag}", type=int, default=value)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        theirs = reference(Path(name), args)
        ours = tpkit.build(tpkit.load_spec("qwen3_moe", config=name), checkpoint=name)
        prompt, token = torch.arange(args.tokens)[None] % 1024, torch.tensor([[7]])
        cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            f"prefill of {args.tokens} tokens": (lambda: ours(prompt), lambda: theirs(prompt, use_cache=False)),
            "one token": (lambda: ours(token), lambda: theirs(token, use_cache=False)),
        }
        for name, (mine, other) in cases.items():
            mine(), other()
            pairs = [(seconds(mine), seconds(other)) for _ in range(args.rounds)]
            ratios = sorted(b / a for a, b in pairs)
            print(f"{name}: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
