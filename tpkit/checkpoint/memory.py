"""How much memory of its own a process takes while loading (Linux; elsewhere nothing is known)."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from pathlib import Path
from types import TracebackType

__all__ = ["AnonymousMemory", "give_back"]

_STATUS = Path("/proc/self/status")


def anonymous_bytes() -> int | None:
    """Returns the resident anonymous memory (RssAnon) of this process; None where the system does not say."""
    try:
        with _STATUS.open("rb") as stream:
            for line in stream:
                if line.startswith(b"RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def give_back() -> None:
    """Returns freed memory to the system: the allocator keeps what it thinks will be asked for again."""
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


class AnonymousMemory:
    """Follows the largest rise of RssAnon over its value on entry, in a thread and wherever `sample` is called.

    Mapped files do not count: their pages are the page cache's.
    """

    def __init__(self, interval: float = 0.005) -> None:
        self.interval = interval
        self.first: int | None = None
        self.peak: int | None = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def sample(self) -> None:
        """Looks now."""
        now = anonymous_bytes()
        if now is not None and self.first is not None:
            self.peak = max(self.peak or 0, now - self.first)

    def __enter__(self) -> AnonymousMemory:
        give_back()  # what is reused later without a rise would not be counted
        self.first = anonymous_bytes()
        if self.first is not None:
            self.peak = 0
            self._thread = threading.Thread(target=self._follow, name="tpkit-memory", daemon=True)
            self._thread.start()
        return self

    def _follow(self) -> None:
        while not self._done.wait(self.interval):
            self.sample()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        self.sample()
