"""Real ranks for tests: processes that stay, and run one function after another as the ranks of a gloo world.

    def test_sum(ranks):
        assert ranks(3).run(add_up, 10) == [33, 33, 33]

A function is sent by name, so it stands at the top of its module; arguments and results are pickled. Every run is a
world of its own: the processes join a fresh process group and leave it again, so worlds of different sizes share them.
A rank that raises, dies or hangs ends the run within seconds, and what it raised is raised in the test.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

__all__ = ["Ranks", "World"]

#: seconds the other ranks have once one has failed: they are most likely in a collective that will never end
GRACE = 3.0
#: seconds after which a run counts as hung; far more than any test takes
PATIENCE = 240.0
LOOPBACK = "127.0.0.1"


class Ranks:
    """Keeps the processes. They are started when a world first needs them, and replaced when they were killed."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        # One process imports torch, the ranks are forked from it: a rank more, or anew, costs milliseconds.
        self._context.set_forkserver_preload(["torch", "torch.distributed", "tests.ranks"])
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._store: Any = None
        self._runs = 0

    def __call__(self, size: int) -> World:
        """Returns a world of `size` ranks."""
        return World(self, size)

    def start(self, size: int) -> list[tuple[BaseProcess, Connection]]:
        """Returns `size` processes that wait for work."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        if self._store is None:
            # Port 0: the system chooses, and the store keeps listening, so that no port is found and lost.
            self._store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        while len(self._workers) < size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, self._store.port), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        return self._workers[:size]

    def next_run(self) -> str:
        """Returns a key that no other run of these processes has."""
        self._runs += 1
        return f"run{self._runs}"

    def discard(self, process: BaseProcess) -> None:
        """Kills a process that is of no more use."""
        for worker in [worker for worker in self._workers if worker[0] is process]:
            self._workers.remove(worker)
            worker[1].close()
        process.kill()
        process.join()

    def close(self) -> None:
        """Ends all processes."""
        for process, _ in list(self._workers):
            self.discard(process)


class World:
    """A number of ranks that run a function together."""

    def __init__(self, pool: Ranks, size: int) -> None:
        self.pool = pool
        self.size = size

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs ``fn(*args)`` on every rank.

        Returns:
            What each rank returned, in the order of the ranks.

        Raises:
            BaseException: what the first rank that failed raised; its cause shows the rank and the traceback there.
        """
        outcomes = self._collect(fn, args)
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if failed:
            first = min(failed, key=lambda outcome: outcome.time)
            assert first.error is not None
            raise first.error from RankTraceback(f"rank {first.rank} of {self.size}:\n{first.trace}")
        return [outcome.value for outcome in outcomes]

    def outcomes(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Like `run`, but an exception that a rank raised stands in its place in the list."""
        return [outcome.value if outcome.error is None else outcome.error for outcome in self._collect(fn, args)]

    def _collect(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Outcome]:
        workers = self.pool.start(self.size)
        run = self.pool.next_run()
        for rank, (_, connection) in enumerate(workers):
            connection.send_bytes(pickle.dumps((run, rank, self.size, fn, args)))
        waiting: dict[Any, tuple[int, BaseProcess]] = {
            connection: (rank, process) for rank, (process, connection) in enumerate(workers)
        }
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + PATIENCE
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in cast("list[Connection]", wait(list(waiting), timeout=left)):
                rank, process = waiting.pop(connection)
                outcomes[rank] = self._receive(connection, rank, process)
                if outcomes[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE)
        for rank, process in waiting.values():
            self.pool.discard(process)
            outcomes[rank] = Outcome.of(rank, TimeoutError(f"rank {rank} did not come back"), "no traceback\n")
        return [outcomes[rank] for rank in range(self.size)]

    def _receive(self, connection: Connection, rank: int, process: BaseProcess) -> Outcome:
        try:
            outcome = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            process.join()
            code = process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            self.pool.discard(process)
            return Outcome.of(rank, ChildProcessError(f"rank {rank} died: {how}"), "no traceback\n")
        assert isinstance(outcome, Outcome)
        return outcome


class RankTraceback(Exception):
    """Where it happened, in the rank's process; shown as the cause of the exception that the test gets."""


class Outcome:
    """What came of a function on one rank."""

    def __init__(self, rank: int, value: Any, error: BaseException | None, trace: str) -> None:
        self.rank = rank
        self.value = value
        self.error = error
        self.trace = trace
        self.time = time.monotonic()  # one clock for all processes of a machine

    @classmethod
    def of(cls, rank: int, error: BaseException, trace: str) -> Outcome:
        """Describes a failure; an exception that cannot be pickled is replaced by one that says the same."""
        try:
            pickle.dumps((type(error), error.args, error.__dict__))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return cls(rank, None, error, trace)

    def __getstate__(self) -> dict[str, Any]:
        # Exceptions whose constructor takes more than their message do not survive pickle's own way.
        error = self.error and (type(self.error), self.error.args, self.error.__dict__)
        return {**self.__dict__, "error": error}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["error"]:
            kind, args, attributes = state["error"]
            self.error = kind.__new__(kind, *args)
            self.error.args = args
            self.error.__dict__.update(attributes)


def _serve(connection: Connection, port: int) -> None:
    """The life of a rank's process: receive a function, run it in a world, answer."""
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    store = TCPStore(LOOPBACK, port, is_master=False)
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, KeyboardInterrupt):
            return
        if not _one_run(connection, store, message):
            return  # what is left of a world that was never whole would spoil the next one


def _one_run(connection: Connection, store: Any, message: bytes) -> bool:
    """Runs one function in a world of its own; returns whether this rank was ever in that world."""
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    rank, joined = -1, False
    try:
        run, rank, size, fn, args = pickle.loads(message)
        world = PrefixStore(run, store)
        dist.init_process_group("gloo", store=world, rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE))
        # A quick rank whose function talks to nobody could leave while another is still connecting to it.
        world.set(f"joined{rank}", "")
        world.wait([f"joined{other}" for other in range(size)], timedelta(seconds=PATIENCE))
        joined = True
        outcome = Outcome(rank, fn(*args), None, "")
        answer = pickle.dumps(outcome)
    except BaseException as error:
        answer = pickle.dumps(Outcome.of(rank, error, traceback.format_exc()))
    # The answer goes first: leaving the group makes the ranks that still wait in it fail as well, and later.
    connection.send_bytes(answer)
    if dist.is_initialized():
        dist.destroy_process_group()
    return joined
