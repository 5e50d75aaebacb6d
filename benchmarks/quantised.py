#!/usr/bin/env python3
"""One projection in every format against a dense bfloat16 one: seconds as ratios, bytes held over bytes stored.

    python benchmarks/quantised.py [--in 1024] [--out 3072] [--rows 1,16,64] [--rounds 9]

Rounds are interleaved: each round times every method once, in turn, so that what else the machine does falls on all of
them alike; the median over the rounds is printed. A ratio above 1 is faster than `torch.nn.functional.linear` on a
bfloat16 weight. Where bitsandbytes is installed, its own NF4 product is timed beside ours.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.quant.formats import FORMATS
from tpkit import Registry
from tpkit.layers import ColumnParallelLinear
from tpkit.quant.stated import Stated
from tpkit.quant.target import Target


def main() -> None:
    """Prints one table for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in", type=int, default=1024, dest="in_")
    parser.add_argument("--out", type=int, default=3072)
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.manual_seed(0)
    layers = {name: made(name, args.out, args.in_) for name in (*FORMATS, *online())}
    dense = torch.randn(args.out, args.in_).bfloat16()
    for rows in map(int, args.rows.split(",")):
        x = torch.randn(rows, args.in_).bfloat16()
        work: dict[str, Callable[[], Any]] = {"bfloat16": lambda x=x: torch.nn.functional.linear(x, dense)}
        work |= {name: lambda x=x, layer=layer: layer(x) for name, (layer, _) in layers.items()}
        work |= peers(dense, x)
        seconds = interleaved(work, args.rounds)
        print(f"\n{rows} rows, {args.in_} -> {args.out}, {torch.get_num_threads()} threads")
        for name, took in seconds.items():
            held = f"  held/stored {ratio(*layers[name]):.3f}" if name in layers else ""
            kernel = layers[name][0].kernel if name in layers else ""
            print(f"  {name:16} {seconds['bfloat16'] / took:5.2f} x{held}  {kernel}")


def online() -> dict[str, dict[str, Any]]:
    """Returns the methods that quantise while loading."""
    return {"online_int8": {}, "online_int4": {"group_size": 32}, "online_fp8": {}}


def made(name: str, out: int, in_: int) -> tuple[ColumnParallelLinear, int]:
    """Returns a loaded layer and the bytes of its tensors on disk."""
    from tpkit.quant.resolve import Resolver

    if name in FORMATS:
        form = FORMATS[name]
        tensors, _ = form.encode(out, in_)
        stated = Stated(source="benchmark", method=form.method, options=form.config, foreign=True)
    else:
        tensors = {"weight": torch.randn(out, in_).bfloat16()}
        stated = Stated(source="benchmark", method=name, options=online()[name])
    target = Target(name="model.layers.0.mlp.up_proj", in_features=in_, out_features=out)
    method = Resolver(Registry.default(), [stated]).choose(target).method
    layer = ColumnParallelLinear(in_, out, bias=False, quant=method, dtype=torch.bfloat16)
    layer.load(tensors)
    return layer, sum(t.numel() * t.element_size() for t in tensors.values())


def ratio(layer: ColumnParallelLinear, stored: int) -> float:
    """Returns bytes held over bytes stored."""
    blobs = [blob for held in layer.blobs.values() for blob in held.values()]
    return sum(t.numel() * t.element_size() for t in (*layer.parameters(), *blobs)) / stored


def peers(dense: torch.Tensor, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Returns what other libraries offer for the same, where they are installed."""
    try:
        import bitsandbytes.functional as bnb
    except ImportError:
        return {}
    packed, state = bnb.quantize_4bit(dense, quant_type="nf4", blocksize=64)
    import bitsandbytes

    return {"bitsandbytes nf4": lambda: bitsandbytes.matmul_4bit(x, packed.t(), quant_state=state)}


def interleaved(work: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Returns the median seconds of one call of each."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds + 1):
        for name, call in work.items():
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}  # the first round warms up


if __name__ == "__main__":
    main()
