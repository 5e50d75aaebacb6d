"""``tpkit plan``: what every rank would hold, without ranks and without reading a weight."""

from __future__ import annotations

import argparse
import json
import sys

from tpkit.cli.common import add_model_arguments, check_ep, config_of, spec_of, split_of
from tpkit.errors import UsageError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_model_arguments(parser)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="that kernels are chosen for")
    parser.add_argument("--tp", metavar="N,N,...", help="numbers of ranks, e.g. 1,2,3,8 (default: N of --ep)")


def run(args: argparse.Namespace) -> int:
    """Prints a plan for each number of ranks."""
    from tpkit.checkpoint.open import open_checkpoint
    from tpkit.planning import prepare
    from tpkit.report import plan_json, plan_text, ranks_text

    check_ep(args)
    sizes = _sizes(str(args.ep) if args.tp is None else args.tp)
    config = config_of(args)
    spec = spec_of(args, config)
    if config is None:
        sys.stderr.write("no config.json is given: the sizes are the description's defaults (see --config, --set)\n")
    checkpoint = open_checkpoint(args.checkpoint) if args.checkpoint is not None else None
    prepared = prepare(spec, checkpoint=checkpoint, dtype=args.dtype)
    plans = [prepared.divide(ranks, split_of(args), args.ep) for ranks in sizes]
    if args.json:
        answer = {"schema": 1, "model": spec.family, "plans": [plan_json(plan) for plan in plans]}
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
        return 0
    for plan in plans:
        ranks = plan_json(plan)["ranks"]
        sys.stdout.write(
            f"{spec.family}, tp {plan.load.ranks}{f', ep {plan.ep}' if plan.ep > 1 else ''}, {plan.dtype}\n\n"
            f"{plan_text(plan, args.device)}\n\n{ranks_text(ranks)}\n\n"
        )
    return 0


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise UsageError(f"--tp {text}: numbers of ranks separated by commas are needed, e.g. 1,2,3,8")
    return sizes
