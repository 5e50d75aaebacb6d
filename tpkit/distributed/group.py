"""Joining the ranks that a launcher started, and the collectives of one tensor-parallel group.

The collectives are torch's functional ones, so ``torch.compile`` sees through them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh

from tpkit.distributed.rank import OtherRankFailed, in_launcher
from tpkit.errors import RankError, ShardingError, UsageError

__all__ = ["TensorParallel", "in_launcher", "init_from_env", "shutdown"]

T = TypeVar("T")

#: torch 2.13 renamed it
_gather_single = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor

#: device type -> the backend that its ranks talk over
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def init_from_env(device_type: str) -> None:
    """Joins the ranks of a launcher, unless this process has joined already. For cuda also chooses the device.

    Args:
        device_type: "cuda" (NCCL) or "cpu" (gloo).

    Raises:
        UsageError: for another device type, without a launcher, or with fewer devices than ranks on this machine.
    """
    backend = BACKENDS.get(device_type)
    if backend is None:
        raise UsageError(f"ranks run on {' or '.join(BACKENDS)}, not on {device_type!r}")
    if dist.is_initialized():
        return
    if not in_launcher():
        raise UsageError("this process is not one of several ranks", hint="start it with --tp N, or with torchrun")
    if device_type == "cuda":
        torch.cuda.set_device(_local_device())
    try:
        dist.init_process_group(backend)
    except ValueError as missing:  # torch names the environment variable that is not there
        raise UsageError(str(missing), hint="start the ranks with --tp N, or with torchrun") from missing


def _local_device() -> int:
    """Returns the ordinal of this rank's device among the visible ones, which need not be numbered in the variable."""
    local, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    visible = torch.cuda.device_count()
    if local_size > visible:
        setting = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = "not set" if setting is None else repr(setting)
        raise UsageError(
            f"rank {os.environ['RANK']} (local rank {local}): {local_size} ranks on this machine need a CUDA device "
            f"each, {visible} visible (CUDA_VISIBLE_DEVICES {shown})",
            hint="use fewer ranks, make more devices visible, or run on the CPU with --device cpu",
        )
    return local


def shutdown() -> None:
    """Leaves the ranks that `init_from_env` joined.

    Call it when all went well and not in a ``finally``: a rank that failed and closes its connections first makes its
    neighbours fail of that before its own error is told. All ranks leave together: one that is still reading when
    another closes its connections may be aborted by that.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """This process's place among the ranks that share a model, and how they talk. Make one with `of`.

    Attributes:
        rank: 0 <= rank < size.
        size: number of ranks.
        group: how they talk; None for one rank, or where shards of several ranks are handled in one process.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise UsageError(f"rank {self.rank} of {self.size}: ranks are counted from 0")

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        return self  # a group is a connection: a copied model talks over the same one

    @classmethod
    def of(cls, tp: object = None, rank: int | None = None, size: int | None = None) -> TensorParallel:
        """Returns the place that a caller means.

        Args:
            tp: a process group, a 1-d device mesh, a `TensorParallel`, or None. None without `rank` and `size` means
                all ranks of an initialised torch.distributed world, and one rank where there is none.
            rank, size: a place without a group, to handle the shard of any rank in one process.

        Raises:
            UsageError: if the arguments contradict each other or this process is not in the group.
        """
        if rank is not None or size is not None:
            if tp is not None or rank is None or size is None:
                raise UsageError("give rank and size together and without a group, or a group alone")
            return cls(rank=rank, size=size)
        if isinstance(tp, TensorParallel):
            return tp
        if tp is None:
            if not (dist.is_available() and dist.is_initialized()):
                return cls()
            tp = dist.group.WORLD
        if isinstance(tp, DeviceMesh):
            if tp.ndim != 1:
                raise UsageError(f"a device mesh of {tp.ndim} dimensions", hint='choose one of them: mesh["tp"]')
            if tp.get_coordinate() is None:
                raise UsageError("this process is not in the device mesh it was given")
            tp = tp.get_group()
        if tp is dist.GroupMember.NON_GROUP_MEMBER:
            raise UsageError(f"rank {dist.get_rank()} of the world is not in the group it was given")
        if not isinstance(tp, dist.ProcessGroup):
            raise UsageError(f"ranks are given as a process group, a device mesh or None, not {type(tp).__name__}")
        return cls(rank=dist.get_rank(tp), size=dist.get_world_size(tp), group=tp)

    def _connected(self) -> dist.ProcessGroup:
        if self.group is None:
            raise UsageError(
                f"rank {self.rank} of {self.size} has no process group to talk over",
                hint="build the layer inside torch.distributed, or without a step that needs the other ranks "
                "(reduce_results=False, gather_output=False)",
            )
        return self.group

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Returns the sum (or "max", "min", "avg", "product") of `x` over the ranks; `x` itself for one rank.

        Raises:
            UsageError: for several ranks without a group.
        """
        if self.size == 1:
            return x
        result: torch.Tensor = funcol.wait_tensor(funcol.all_reduce(x, op, self._connected()))
        return result

    def all_gather_last(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Returns the ranks' tensors side by side along the last dimension, in the order of the ranks.

        Args:
            x: this rank's part, [..., sizes[rank]]; the leading dimensions are the same on all ranks.
            sizes: last dimension on every rank; they may differ and be 0.

        Returns:
            [..., sum(sizes)].

        Raises:
            ShardingError: if `sizes` is not about these ranks or `x` is not of its size.
            UsageError: for several ranks without a group.
        """
        if len(sizes) != self.size or x.shape[-1] != sizes[self.rank]:
            raise ShardingError(
                f"rank {self.rank} of {self.size} gathers {list(x.shape)}; announced last dimensions: {list(sizes)}"
            )
        if self.size == 1:
            return x
        group, widest = self._connected(), max(sizes)
        if widest == 0:
            return x
        if x.shape[-1] < widest:
            x = torch.nn.functional.pad(x, (0, widest - x.shape[-1]))
        stacked: torch.Tensor = funcol.wait_tensor(_gather_single(x.contiguous().unsqueeze(0), 0, group))
        if min(sizes) == widest:
            return stacked.movedim(0, -2).flatten(-2)
        return torch.cat([stacked[rank, ..., :width] for rank, width in enumerate(sizes)], dim=-1)

    def same_on_all_ranks(self, values: dict[str, str]) -> None:
        """Compares what must be the same everywhere (fingerprints of inputs) before anything is communicated.

        Args:
            values: field -> fingerprint.

        Raises:
            RankError: on every rank alike, naming the ranks and fields that differ from rank 0.
        """
        everyone = self.gather_objects(values)
        findings = [
            f"rank {rank}: {field} is {_shown(theirs.get(field))}, on rank 0 {_shown(everyone[0].get(field))}"
            for rank, theirs in enumerate(everyone)
            for field in _union(everyone[0], theirs)
            if theirs.get(field) != everyone[0].get(field)
        ]
        if findings:
            raise RankError(
                "\n".join(["the ranks do not build the same model", *(f"  {line}" for line in findings)]),
                hint="start all ranks with the same files, arguments and installed plugins",
            )

    def all_or_none(self, error: BaseException | None) -> None:
        """Lets every rank say whether it can go on, so that none waits in a collective for one that can't.

        Args:
            error: what kept this rank from going on, or None. Every rank calls this, whichever it is.

        Raises:
            BaseException: `error`, on the rank that has one.
            OtherRankFailed: on the ranks without one, if another has; with the other's message.
        """
        said = None if error is None else f"{type(error).__name__}: {error}"
        try:
            everyone = self.gather_objects(said)
        except Exception:
            if error is not None:
                raise error from None  # a rank that is gone already must not hide what happened here
            raise
        if error is not None:
            raise error
        for rank, text in enumerate(everyone):
            if text is not None:
                raise OtherRankFailed(f"rank {rank} failed: {text}")

    def together(self, work: Callable[[], T]) -> T:
        """Does work that may fail on some ranks only, and returns its result once all ranks have theirs.

        Raises:
            BaseException: this rank's own error.
            OtherRankFailed: where another rank failed.
        """
        failed: Exception | None = None
        try:
            done = work()
        except Exception as error:
            failed = error
        self.all_or_none(failed)
        return done

    def gather_objects(self, mine: Any) -> list[Any]:
        """Returns every rank's object. Without a group there is nobody to ask, and nobody who could wait either."""
        if self.group is None or self.size == 1:
            return [mine] * self.size
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone


def _union(first: Iterable[str], second: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*first, *second]))


def _shown(value: str | None) -> str:
    return "absent" if value is None else value
