"""A rank program with one command more than tpkit has: ranks that fail in every way there is.

``python -m tests.distributed.faulty faulty RANK:WAY ...`` where WAY is one of the methods of `Ways`; all other ranks
wait in a collective.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

from tpkit import cli
from tpkit.errors import CheckpointError


class Ways:
    """How a rank can fail."""

    @staticmethod
    def checkpoint() -> None:
        raise CheckpointError("model.safetensors is cut short: 10 of 20 bytes", hint="download it again")

    @staticmethod
    def bug() -> None:
        raise ZeroDivisionError("a mistake of ours")

    @staticmethod
    def late() -> None:
        time.sleep(0.5)
        raise CheckpointError("this one came later")

    @staticmethod
    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def segv() -> None:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)

    @staticmethod
    def silent() -> None:
        os._exit(3)

    @staticmethod
    def here() -> None:
        Path(os.environ["FAULTY_FOLDER"], str(os.getpid())).touch()
        Ways.hang()

    @staticmethod
    def hang() -> None:
        time.sleep(600)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ways", nargs="*")
    parser.add_argument("--before-joining", action="store_true")


def run(args: argparse.Namespace) -> int:
    ways = dict(each.split(":") for each in args.ways)
    mine = ways.get(os.environ["RANK"])
    if args.before_joining and mine:
        getattr(Ways, mine)()
    import torch

    from tpkit.distributed.group import TensorParallel, init_from_env, shutdown

    init_from_env("cpu")
    tp = TensorParallel.of()
    tp.all_reduce(torch.ones(2))
    if mine:
        getattr(Ways, mine)()
    total = tp.all_reduce(torch.full((2,), float(tp.rank + 1)))
    if tp.rank == 0:
        sys.stdout.write(f"sum {total[0].item():g} threads {os.environ['OMP_NUM_THREADS']}\n")
    shutdown()
    return 0


if __name__ == "__main__":
    cli.COMMANDS["faulty"] = "fails as it is told"
    command = ModuleType("tpkit.cli.faulty")
    command.add_arguments, command.run = add_arguments, run  # type: ignore[attr-defined]
    sys.modules["tpkit.cli.faulty"] = command
    raise SystemExit(cli.main())
