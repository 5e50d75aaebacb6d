"""What loading asks of the disk and of memory, on every rank, beside transformers' tensor parallelism.

    python benchmarks/loading.py build/smollm2 --tp 2 --rounds 3

For each rank: bytes asked, counted by a reader of this script's own, over the bytes of its shard, by kind of slice; and
the largest rise of RssAnon while loading over the bytes of its parameters. Then seconds to load, tpkit over
transformers, in interleaved rounds (a ratio: absolute times say more about the machine).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tpkit
from tpkit.checkpoint.reader import MappedReader
from tpkit.checkpoint.stored import Stored

MARGIN = 64 * 2**20


class CountingReader(MappedReader):
    """Counts for itself: the elements of every box it is asked for, times their size, by tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def read(self, name: str, stored: Stored, shape: Sequence[int], box: Any) -> torch.Tensor:
        piece = super().read(name, stored, shape, box)
        elements = 1
        for run in box:
            elements *= len(range(run.start, run.stop, run.step))
        self.asked[name] += elements * piece.element_size()
        return piece


def load_tpkit(folder: Path) -> tuple[float, dict[str, Any]]:
    """Builds on this rank and measures."""
    reader = CountingReader()
    began = time.perf_counter()
    model = tpkit.build(tpkit.load_spec("llama.yaml", config=folder), checkpoint=folder, device="cpu", reader=reader)
    seconds = time.perf_counter() - began
    shard: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for layer in model.plan.load.layers:
        style = "norm" if not layer.spec.in_ else layer.spec.style
        shard[style] += layer.geometry.nbytes[model.tp.rank]
        names = {source.tensor(name) for source in layer.form for name, _ in layer.spec.params}
        asked[style] += sum(reader.asked[name] for name in names)
    return seconds, {
        "rank": model.tp.rank,
        "asked": asked,
        "shard": shard,
        "total": sum(reader.asked.values()),
        "held": model.param_bytes(),
        "peak": model.peak_anon_bytes,
    }


def load_transformers(folder: Path, tp: int) -> float:
    """Loads with the peer's own tensor parallelism."""
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    extra = {}
    if tp > 1:
        from transformers.distributed import DistributedConfig

        extra["distributed_config"] = DistributedConfig(tp_size=tp)
    began = time.perf_counter()
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **extra)
    return time.perf_counter() - began


def rank_main(rank: int, tp: int, store: str, folder: Path, rounds: int, answers: Any) -> None:
    """One rank: interleaved rounds of both."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=tp)
    ours, theirs = [], []
    _, first = load_tpkit(folder)  # memory is measured in a process that has not loaded anything yet
    for _ in range(rounds):
        ours.append(load_tpkit(folder)[0])
        try:
            theirs.append(load_transformers(folder, tp))
        except Exception as error:  # the peer refuses some sizes
            sys.stderr.write(f"rank {rank}: transformers does not load at tp {tp}: {error}\n")
            break
    answers.put((rank, ours, theirs, first))
    dist.barrier()
    dist.destroy_process_group()


def report(rank: int, ours: list[float], theirs: list[float], first: dict[str, Any]) -> bool:
    """Prints one rank's figures; returns whether it stays within what is promised."""
    total, held = first["total"], first["held"]
    print(f"rank {rank}: asked {total:,} bytes for a shard of {held:,}: {total / held:.3f} x")
    for style, size in first["shard"].items():
        asked = first["asked"][style]
        print(f"  {style:14} asked {asked:>13,}  shard {size:>13,}  {asked / max(size, 1):.3f} x")
    over = first["peak"] - first["held"]
    print(f"  peak anonymous memory {first['peak']:,}: parameters {over:+,} bytes ({over / 2**20:+.1f} MiB)")
    if theirs:
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        print(f"  seconds, tpkit / transformers (median of {len(theirs)}): {ratio:.2f}")
    return first["total"] <= 1.3 * first["held"] and over <= MARGIN


def main() -> int:
    """Runs the ranks and reports; 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    answers = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as scratch:
        given = (args.tp, f"{scratch}/store", args.folder.resolve(), args.rounds, answers)
        mp.spawn(rank_main, args=given, nprocs=args.tp)
    kept = [report(*row) for row in sorted(answers.get() for _ in range(args.tp))]
    print("within 1.3 x and parameters + 64 MiB" if all(kept) else "NOT within 1.3 x and parameters + 64 MiB")
    return 0 if all(kept) else 1


if __name__ == "__main__":
    raise SystemExit(main())
