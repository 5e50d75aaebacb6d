"""Ranks started by tpkit itself: how they end, and what the user reads. Real processes, gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tpkit.distributed.launch import _cause, launch
from tpkit.distributed.rank import Failure, OtherRankFailed, in_launcher
from tpkit.errors import CheckpointError, PluginError, UsageError

ROOT = Path(__file__).parents[2]
LAUNCH = (
    "import sys; from tpkit.distributed.launch import launch; "
    "sys.exit(launch(['faulty', *sys.argv[2:]], int(sys.argv[1]), module='tests.distributed.faulty'))"
)
#: far beyond what a run takes; a run that reaches it hangs
PATIENCE = 240


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def start(nproc: int, *arguments: str, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LAUNCH, str(nproc), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment(**more), stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    return process.returncode, out, err


def assert_quiet(err: str) -> None:
    """What elastic and torch say of a failure is not for the user."""
    for noise in ("elastic", "SIGTERM", "ChildFailedError", "gloo", "Connection", "local_rank"):
        assert noise not in err


def test_launches_at_once_do_not_disturb_each_other() -> None:
    launch_at_once(2)


@pytest.mark.slow
def test_eight_launches_at_once() -> None:
    launch_at_once(8)


def launch_at_once(number: int) -> None:
    cores = len(os.sched_getaffinity(0))
    for code, out, err in [finish(each) for each in [start(2) for _ in range(number)]]:
        assert (code, err) == (0, "")
        assert out == f"sum 3 threads {max(1, cores // 2)}\n"


def test_threads_chosen_by_the_user_stand() -> None:
    assert finish(start(1, OMP_NUM_THREADS="3")) == (0, "sum 1 threads 3\n", "")


@pytest.mark.parametrize("when", [[], ["--before-joining"]], ids=["in a collective", "before joining"])
def test_the_error_of_the_rank_that_failed_is_all_the_user_reads(when: list[str]) -> None:
    code, out, err = finish(start(3, "1:checkpoint", *when))
    assert err == ("error on rank 1: model.safetensors is cut short: 10 of 20 bytes\n  hint: download it again\n")
    assert (code, out) == (CheckpointError.exit_code, "")


def test_a_killed_rank_is_named_with_its_signal() -> None:
    code, _, err = finish(start(2, "1:kill"))
    assert err.startswith("error on rank 1: the process was killed by SIGKILL\n  hint: ")
    assert code == 128 + signal.SIGKILL
    assert_quiet(err)


@pytest.mark.parametrize(
    ("ways", "code", "text"),
    [
        (["0:segv"], 128 + signal.SIGSEGV, "error on rank 0: the process was killed by SIGSEGV\n"),
        (["1:silent"], 3, "error on rank 1: the process ended with exit code 3 and without a message\n"),
        (["0:hang", "1:checkpoint"], 4, "error on rank 1: model.safetensors is cut short"),
        (["0:late", "1:checkpoint"], 4, "error on rank 1: model.safetensors is cut short"),
    ],
)
def test_other_ways_to_end(ways: list[str], code: int, text: str) -> None:
    got, _, err = finish(start(2, "--before-joining", *ways))
    assert err.startswith(text)
    assert got == code
    assert_quiet(err)


def test_a_bug_shows_its_traceback_once_and_asks_for_a_report() -> None:
    code, _, err = finish(start(2, "--before-joining", "0:bug"))
    assert code == 70
    assert err.count("Traceback") == 1
    assert "ZeroDivisionError: a mistake of ours" in err
    assert "error on rank 0: this is a bug in tpkit or in a plugin; please report it with the lines above" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_all(number: signal.Signals, tmp_path: Path) -> None:
    process = start(2, "--before-joining", "0:here", "1:here", FAULTY_FOLDER=str(tmp_path))
    while len(pids := [int(path.name) for path in tmp_path.iterdir()]) < 2:
        assert process.poll() is None
    process.send_signal(number)
    code, _, err = finish(process)
    assert (code, err) == (128 + number, "")
    assert not any(alive(pid) for pid in pids)


def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("the kernel's death signal is Linux's")
    process = start(2, "--before-joining", "0:here", "1:here", FAULTY_FOLDER=str(tmp_path))
    while len(pids := [int(path.name) for path in tmp_path.iterdir()]) < 2:
        assert process.poll() is None
    process.kill()
    finish(process)  # returns when the last process that holds the pipes is gone
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def faulty_alone(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs the rank program as another launcher would start it."""
    command = [sys.executable, "-m", "tests.distributed.faulty", "faulty", "--before-joining", *arguments]
    environ = environment(RANK="1", WORLD_SIZE="2", **more)
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=PATIENCE)


def test_under_another_launcher_a_rank_speaks_for_itself(tmp_path: Path) -> None:
    record = tmp_path / "error.json"
    done = faulty_alone("1:checkpoint", TORCHELASTIC_ERROR_FILE=str(record))
    assert done.returncode == CheckpointError.exit_code
    assert done.stderr == "error on rank 1: model.safetensors is cut short: 10 of 20 bytes\n  hint: download it again\n"
    assert json.loads(record.read_text())["message"]["message"].startswith("CheckpointError: model.safetensors")


def test_an_error_that_cannot_be_recorded_is_printed(tmp_path: Path) -> None:
    done = faulty_alone("1:checkpoint", TPKIT_LAUNCHED="1", TORCHELASTIC_ERROR_FILE=str(tmp_path / "no" / "folder"))
    assert "cut short" in done.stderr
    assert done.returncode == CheckpointError.exit_code


@pytest.mark.slow
def test_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    for arguments, code, text in [([], 0, ""), (["1:checkpoint"], 1, "error on rank 1: model.safetensors is cut")]:
        program = [*command, "tests.distributed.faulty", "faulty", *arguments]
        done = subprocess.run(program, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == code
        assert text in done.stderr


def test_no_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="cannot start 0 ranks"):
        launch(["plugins"], 0)
    monkeypatch.delenv("RANK", raising=False)
    assert not in_launcher()


# Which failure is the cause: the launcher's view, without processes


@dataclass
class Ended:
    """What torch's launcher tells of a rank."""

    exitcode: int
    error_file_data: dict[str, Any] = field(default_factory=lambda: {"message": "<NONE>"})


def recorded(rank: int, error: Exception, time_ns: int) -> Ended:
    failure = Failure.of(error, rank)
    told = {"rank": rank, "exit_code": failure.exit_code, "text": failure.text, "secondary": failure.secondary}
    return Ended(failure.exit_code, {"message": {}, "tpkit": {**told, "time_ns": time_ns}})


GLOO = RuntimeError("[/src/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:7357")


def wrapped() -> PluginError:
    error = PluginError("the plugin says: something went wrong")
    error.__cause__ = GLOO
    return error


@pytest.mark.parametrize(
    ("failures", "rank", "code"),
    [
        ({0: recorded(0, GLOO, 1), 1: recorded(1, CheckpointError("mine"), 2)}, 1, 4),
        ({0: recorded(0, PluginError("first"), 1), 1: recorded(1, CheckpointError("second"), 2)}, 0, 3),
        ({0: recorded(0, GLOO, 1), 1: Ended(-9)}, 1, 137),
        ({0: recorded(0, wrapped(), 1), 1: Ended(-9)}, 1, 137),
        ({0: recorded(0, OtherRankFailed("rank 1 failed"), 1), 1: recorded(1, CheckpointError("mine"), 2)}, 1, 4),
        ({0: Ended(-15), 1: recorded(1, CheckpointError("mine"), 1)}, 1, 4),
        ({0: Ended(-15), 1: Ended(-11)}, 1, 139),
        ({0: recorded(0, GLOO, 2), 1: recorded(1, GLOO, 1)}, 1, 70),
        ({0: Ended(-15), 1: recorded(1, GLOO, 1)}, 1, 70),
        ({1: Ended(-15), 0: Ended(-15)}, 1, 143),
    ],
)
def test_the_cause_is_told_from_its_consequences(failures: Mapping[int, Any], rank: int, code: int) -> None:
    cause = _cause(failures)
    assert (cause.rank, cause.exit_code) == (rank, code)
