"""Prefill and greedy decoding on one rank beside transformers, in interleaved rounds, as ratios.

    python benchmarks/decoding.py build/smollm2 --rounds 5 --dtype float32

Above 1 tpkit is faster. Both use the same weights, one thread count, a KV cache, and the same tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import tpkit


def timed(work: Callable[[], object]) -> float:
    """Returns the seconds that work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    """Builds both models and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens that are decoded")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    theirs = AutoModelForCausalLM.from_pretrained(args.folder, dtype=getattr(torch, args.dtype))
    spec = tpkit.load_spec("llama.yaml", config=args.folder)
    ours = tpkit.build(spec, checkpoint=args.folder, dtype=args.dtype, device="cpu")
    ids = torch.arange(args.prompt)[None] * 13 % 40000 + 5
    prompt = ids[0].tolist()

    def prefill(model: Callable[[torch.Tensor], object]) -> Callable[[], object]:
        def work() -> object:
            with torch.inference_mode():
                return model(ids)

        return work

    def peer_decode() -> object:
        with torch.inference_mode():
            return theirs.generate(ids, max_new_tokens=args.new, min_new_tokens=args.new, do_sample=False)

    pairs = {
        "prefill": (prefill(ours), prefill(theirs)),
        "prompt and decoding": (lambda: tpkit.generate(ours, prompt, max_new_tokens=args.new), peer_decode),
    }
    for name, (mine, peer) in pairs.items():
        mine(), peer()
        ratios = [timed(peer) / timed(mine) for _ in range(args.rounds)]
        shown = ", ".join(f"{r:.2f}" for r in ratios)
        print(f"{name}: transformers / tpkit = {statistics.median(ratios):.2f} (rounds: {shown})")


if __name__ == "__main__":
    main()
