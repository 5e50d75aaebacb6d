"""What this process knows of being one rank of several, and how a rank that fails says so.

A rank started by `tpkit.distributed.launch` prints nothing when it fails: it leaves a record, and the launcher prints
the one record that is the cause. The record is the error file of torch's elastic launcher with a part of our own, so a
``torchrun`` that started us shows the error in its summary as well. Imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from tpkit.errors import RankError, TpkitError

__all__ = ["BUG", "Failure", "OtherRankFailed", "enter_rank", "fail_rank", "in_launcher", "message_of"]

#: set by `tpkit.distributed.launch` in the environment of the ranks it starts
LAUNCHED = "TPKIT_LAUNCHED"

#: exit code of an error that is none of ours
BUG = 70


class OtherRankFailed(RankError):
    """Another rank failed, so this one cannot go on. The other rank's own error is the one to read."""


def in_launcher() -> bool:
    """Returns whether a launcher (ours or ``torchrun``) started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank ended.

    Attributes:
        rank: which one.
        exit_code: what the program is to exit with.
        text: what the user is to read.
        time_ns: when, on the clock of this machine.
        secondary: whether it only tells of losing another rank, so that the cause is elsewhere.
    """

    rank: int
    exit_code: int
    text: str
    time_ns: int
    secondary: bool

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """Describes an error raised on a rank, now."""
        return cls(
            rank=rank,
            exit_code=error.exit_code if isinstance(error, TpkitError) else BUG,
            text=message_of(error, rank),
            time_ns=time.time_ns(),
            secondary=_lost_another_rank(error),
        )

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Failure | None:
        """Reads back what `fail_rank` wrote; None for a record of somebody else."""
        own = record.get("tpkit")
        return cls(**own) if isinstance(own, dict) else None


def message_of(error: BaseException, rank: int | None = None) -> str:
    """Returns what the user is to read of an error: message and hint, or for a bug the traceback."""
    where = "" if rank is None else f" on rank {rank}"
    if isinstance(error, TpkitError):
        return f"error{where}: {error}\n"
    trace = "".join(traceback.format_exception(error))
    return f"{trace}error{where}: this is a bug in tpkit or in a plugin; please report it with the lines above\n"


def enter_rank() -> None:
    """Prepares a process that may be a rank of our launcher: it ends at once with Ctrl-C, and with its launcher."""
    if LAUNCHED not in os.environ:
        return
    # A rank inside a collective would never come back to Python to see the signal.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        import ctypes

        # Even a launcher that is killed outright leaves no rank behind that holds memory of a GPU.
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)


def fail_rank(error: BaseException) -> NoReturn:
    """Ends a rank with its error: for our launcher as a record, under another launcher as text on stderr as well.

    The process ends here and now. Finalising the interpreter could wait for threads or for a collective that no other
    rank will ever enter.
    """
    failure = Failure.of(error, int(os.environ["RANK"]))
    written = _write_record(error, failure)
    if not (written and LAUNCHED in os.environ):
        sys.stderr.write(failure.text)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(failure.exit_code)


def _write_record(error: BaseException, failure: Failure) -> bool:
    """Writes the error file of torch's elastic launcher; returns whether there is one."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not name:
        return False
    elastic = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": failure.text, "timestamp": str(failure.time_ns // 10**9)},
    }
    part = Path(f"{name}.part")
    try:
        # Renamed when complete: the launcher may end this process in the middle of the write.
        part.write_text(json.dumps({"message": elastic, "tpkit": asdict(failure)}), encoding="utf-8")
        part.replace(name)
    except OSError:
        return False
    return True


def _lost_another_rank(error: BaseException) -> bool:
    """Tells errors of a broken connection from errors of this rank's own."""
    step: BaseException | None = error
    while step is not None:
        # By name, since this module does not import torch: DistError is the base of torch.distributed's errors.
        names = {base.__name__ for base in type(step).__mro__}
        if isinstance(step, OtherRankFailed) or "DistError" in names:
            return True
        if isinstance(step, RuntimeError) and "gloo/" in str(step):
            return True
        step = step.__cause__
    return False
