"""Seeded random weights where there is no checkpoint. The same values whatever the number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from tpkit.checkpoint.stored import Stored
from tpkit.dtypes import FLOATS, torch_dtype
from tpkit.errors import UsageError
from tpkit.layout import Run

__all__ = ["DummyReader"]

#: rows that share a seed: only those with a wanted row are made
ROWS = 1024


class DummyReader:
    """Makes boxes of random tensors: normal with deviation 0.02, vectors other than biases around 1.

    Args:
        seed: the same seed gives the same model.
    """

    def __init__(self, seed: int = 0) -> None:
        self.bytes_read = 0
        self.seed = seed

    def read(self, name: str, stored: Stored, shape: Sequence[int], box: Sequence[Run]) -> torch.Tensor:
        if stored.dtype not in FLOATS:
            raise UsageError(f"{name} is {stored.dtype}: random weights are made for unquantised models only")
        rows, columns = box[0], (slice(None), *(slice(run.start, run.stop, run.step) for run in box[1:]))
        mean = 1.0 if len(shape) == 1 and not name.endswith("bias") else 0.0
        pieces = []
        for block in range(rows.start // ROWS, (rows.stop - 1) // ROWS + 1):
            first, last = block * ROWS, min(shape[0], (block + 1) * ROWS)
            wanted = _within(rows, first, last)
            if not wanted.count:
                continue
            made = torch.randn(last - first, *shape[1:], generator=self._generator(name, block)) * 0.02 + mean
            pieces.append(made[wanted.start - first : wanted.stop - first : wanted.step][columns])
        return torch.cat(pieces).to(torch_dtype(stored.dtype))

    def _generator(self, name: str, block: int) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed} {name} {block}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))

    def close(self) -> None:
        pass


def _within(run: Run, first: int, last: int) -> Run:
    """Returns the indices of a run from `first` up to, not including, `last`."""
    below = max(0, -(-(first - run.start) // run.step))
    up_to = min(run.count, -(-(last - run.start) // run.step))
    return Run(run.start + below * run.step, max(0, up_to - below), run.step)
