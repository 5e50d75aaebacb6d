"""Starts the ranks of one machine through torch's elastic launcher, and says why they ended.

The ranks run ``python -m tpkit ARGUMENTS`` with the environment that ``torchrun`` would give them, so a command has one
way to be a rank. Nobody picks a port: the launcher's store listens on one that the system chose, and stays open.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tpkit.distributed.rank import LAUNCHED, Failure
from tpkit.errors import UsageError

__all__ = ["launch"]

#: seconds a rank has to end once another one failed, before it is killed
GRACE = 5
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def launch(argv: Sequence[str], nproc: int, *, module: str = "tpkit") -> int:
    """Runs ``python -m tpkit *argv`` as `nproc` ranks on this machine and waits for all of them.

    Output of the ranks passes through. The first rank that fails ends the others; its own error is written to stderr.

    Args:
        argv: arguments of the command, as after the word ``tpkit``.
        nproc: number of ranks, at least 1.
        module: what every rank runs instead of ``tpkit``; it ends through `tpkit.cli.main`.

    Returns:
        0, the exit code of the error that ended the run, or 128 + the number of the signal that did.

    Raises:
        UsageError: if there is no rank to start.
    """
    if nproc < 1:
        raise UsageError(f"cannot start {nproc} ranks")
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    _silence_elastic()
    with tempfile.TemporaryDirectory(prefix="tpkit-") as folder, _environment(nproc), _signal_handlers():
        try:
            elastic_launch(_config(nproc, folder), sys.executable)(*_interpreter_options(), "-m", module, *argv)
        except ChildFailedError as failed:
            cause = _cause(failed.failures)
        except SignalException as stop:
            return 128 + int(stop.sigval)
        else:
            return 0
    sys.stderr.write(cause.text)
    return cause.exit_code


def _config(nproc: int, folder: str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    options: dict[str, Any] = {"shutdown_timeout": GRACE}
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        role="tpkit",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_configs={"is_host": "true"},
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        # Older releases of torch know fewer options.
        **{name: value for name, value in options.items() if name in known},
    )


def _interpreter_options() -> list[str]:
    """Keeps modules that happen to lie in the current folder out of the ranks, unless this process sees them too."""
    sees_folder = sys.path[:1] in ([""], [os.getcwd()])  # noqa: PTH109 - compared as the interpreter wrote it
    return [] if sees_folder or sys.version_info < (3, 11) else ["-P"]


@contextlib.contextmanager
def _environment(nproc: int) -> Iterator[None]:
    """Sets what the ranks inherit, and restores this process's own environment."""
    before = dict(os.environ)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ[LAUNCHED] = "1"
    # The cores are shared: every rank taking all of them would be many times slower.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    # All ranks are on this machine; a host name that does not resolve must not matter.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _signal_handlers() -> Iterator[None]:
    """Restores the handlers that the elastic launcher replaces for good."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            with contextlib.suppress(ValueError):  # only the main thread may, and only there were they replaced
                signal.signal(number, handler)


def _silence_elastic() -> None:
    """The launcher's own log lines speak of agents and attempts; the user's error is said by `launch` alone."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _cause(failures: Mapping[int, Any]) -> Failure:
    """Returns the failure that came first by itself, not through the loss of another rank.

    In this order: the earliest error of a rank's own, a rank ended by a signal that the launcher did not send, a rank
    that ended without a word, and at last the earliest error that only tells of a lost connection.

    Args:
        failures: local rank -> torch's ProcessFailure, in the order in which the launcher saw them.
    """
    told = [found for each in failures.values() if (found := Failure.from_record(each.error_file_data))]
    told.sort(key=lambda failure: failure.time_ns)
    ranks_told = {failure.rank for failure in told}
    silent = [_silent(rank, each.exitcode) for rank, each in failures.items() if rank not in ranks_told]
    own = [failure for failure in told if not failure.secondary]
    # The launcher ends the other ranks with SIGTERM once one has failed.
    not_by_launcher = [failure for failure in silent if failure.exit_code != 128 + signal.SIGTERM]
    return (own or not_by_launcher or told or silent)[0]


def _silent(rank: int, exitcode: int) -> Failure:
    """Describes a rank that left no record: killed by a signal, or ended by something that skips Python's handling."""
    if exitcode < 0:
        number = -exitcode
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        text = f"error on rank {rank}: the process was killed by {name}\n"
        if number == signal.SIGKILL:
            text += "  hint: most often the system ran out of memory; its kernel log (dmesg) says so\n"
        return Failure(rank=rank, exit_code=128 + number, text=text, time_ns=0, secondary=False)
    text = f"error on rank {rank}: the process ended with exit code {exitcode} and without a message\n"
    return Failure(rank=rank, exit_code=exitcode, text=text, time_ns=0, secondary=False)
