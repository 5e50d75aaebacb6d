"""Reading boxes of stored tensors. Only the bytes of the box are touched: the file is mapped, never loaded."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch

from tpkit.checkpoint.stored import Stored
from tpkit.dtypes import itemsize, torch_dtype
from tpkit.errors import CheckpointError
from tpkit.geometry import Box

__all__ = ["MappedReader", "Reader"]


class Reader(Protocol):
    """Hands out boxes of stored tensors. What `read` returns is valid until the next call."""

    #: bytes asked for so far
    bytes_read: int

    def read(self, name: str, stored: Stored, shape: Sequence[int], box: Box) -> torch.Tensor:
        """Returns a box of a tensor that is seen in `shape` (same elements as stored, row-major)."""
        ...

    def close(self) -> None:
        """Lets go of its files."""
        ...


class MappedReader:
    """Reads through a private mapping of each file; mapped pages are the page cache's, not this process' own."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._maps: dict[Path, mmap.mmap] = {}

    def read(self, name: str, stored: Stored, shape: Sequence[int], box: Box) -> torch.Tensor:
        dtype, size = torch_dtype(stored.dtype), itemsize(stored.dtype)
        raw, index = self._bytes(name, stored), tuple(slice(run.start, run.stop, run.step) for run in box)
        if stored.begin % size:
            # an old writer left the data unaligned: the box moves to where its type may begin
            moved = raw.view(*shape, size)[index].clone(memory_format=torch.contiguous_format)
            piece = moved.view(dtype).squeeze(-1)
        else:
            piece = raw.view(dtype).view(tuple(shape))[index]
        self.bytes_read += piece.numel() * size
        return piece

    def _bytes(self, name: str, stored: Stored) -> torch.Tensor:
        if stored.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        data = self._map(stored.file)
        if stored.begin + stored.nbytes > len(data):
            raise CheckpointError(f"{stored.file}: {name} ends at byte {stored.begin + stored.nbytes} of {len(data)}")
        with warnings.catch_warnings():
            # torch warns that the buffer is read-only; nothing here writes to it
            warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(data, dtype=torch.uint8, count=stored.nbytes, offset=stored.begin)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            try:
                with file.open("rb") as stream:
                    self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as cause:
                raise CheckpointError(f"{file} cannot be read any more: {cause}") from cause
        return self._maps[file]

    def close(self) -> None:
        # the maps are closed when the last tensor that views them is gone
        self._maps.clear()

    def __enter__(self) -> MappedReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
