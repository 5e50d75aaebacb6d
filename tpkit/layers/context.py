"""What one forward pass knows beside the hidden state: positions, masks, and the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

from tpkit.errors import SpecError, UsageError

__all__ = ["ForwardContext", "KVCache"]

T = TypeVar("T")


class KVCache:
    """Keys and values of earlier tokens. Each rank holds those of its own kv heads.

    A recurrent layer has a state instead, which does not grow: see `ForwardContext.state`.

    Args:
        shapes: for each attention layer, this rank's ``(kv heads, features of a key, of a value)``.
        states: for each state of a recurrent layer, this rank's shape of it, for one sequence.
        batch: sequences.
        length: tokens that fit.
        dtype, device: of keys and values.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int]],
        states: Sequence[tuple[int, ...]] = (),
        *,
        batch: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        for name, value in (("batch", batch), ("length", length)):
            if type(value) is not int:
                raise UsageError(f"a KV cache with {name} {value!r}: a whole number is needed")
        self.batch, self.length = batch, length
        self.shapes, self.state_shapes = tuple(shapes), tuple(states)
        self.used = 0
        if batch < 1 or length < 1:
            raise UsageError(f"a KV cache for {batch} sequences of {length} tokens: at least one each")
        self.keys = [torch.zeros(batch, n, length, d, dtype=dtype, device=device) for n, d, _ in shapes]
        self.values = [torch.zeros(batch, n, length, d, dtype=dtype, device=device) for n, _, d in shapes]
        #: by slot; None before the first token. A layer reads and replaces its own, in the dtype that it keeps it in
        self.states: list[torch.Tensor | None] = [None] * len(states)

    def check(self, batch: int, length: int) -> None:
        """Says whether new tokens fit, on every rank alike: one without kv heads would otherwise not notice, and wait.

        Raises:
            UsageError: if they do not.
        """
        if batch != self.batch or self.used + length > self.length:
            raise UsageError(
                f"the KV cache holds {self.length} tokens of {self.batch} sequences; "
                f"{self.used + length} of {batch} are needed"
            )

    def append(self, slot: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the new tokens' keys and values of a layer and returns all of them so far.

        Args:
            slot: number of the attention layer.
            k, v: ``[B, kv heads, L, head_dim]``.

        Returns:
            keys and values ``[B, kv heads, used + L, head_dim]``.
        """
        end = self.used + k.shape[2]
        self.keys[slot][:, :, self.used : end] = k
        self.values[slot][:, :, self.used : end] = v
        return self.keys[slot][:, :, :end], self.values[slot][:, :, :end]


class ForwardContext:
    """One forward pass over ``L`` new tokens.

    Args:
        length: new tokens.
        device: where they are.
        cache: of the tokens before them; None: there are none.
        last_only: logits are wanted of the last new token alone.

    Attributes:
        past: tokens before the new ones.
        positions: ``[L]`` int64 positions of the new ones.
    """

    def __init__(
        self, length: int, device: torch.device, cache: KVCache | None = None, *, last_only: bool = False
    ) -> None:
        self.cache = cache
        self.past = cache.used if cache is not None else 0
        self.length = length
        self.last_only = last_only
        self.positions = torch.arange(self.past, self.past + length, device=device)
        self._made: dict[Hashable, object] = {}
        self._left: dict[str, Any] = {}
        self._entered: set[tuple[str, int]] = set()
        self._kept: dict[int, torch.Tensor] = {}

    def enter(self, slot: int, kind: str = "attention") -> None:
        """Notes that a layer that has a place in the cache is run, on every rank alike.

        Args:
            slot: number of its place.
            kind: "attention" for keys and values, "recurrent" for a state.

        Raises:
            UsageError: if it has run in this pass and there is a cache: it has one place there.
        """
        if self.cache is not None and (kind, slot) in self._entered:
            raise UsageError(
                f"{kind} layer {slot} is called twice in one pass, and the KV cache has one place for it",
                hint="run this description without a cache",
            )
        self._entered.add((kind, slot))

    def state(self, slot: int) -> torch.Tensor | None:
        """Returns what a recurrent layer kept of the tokens before; None if there are none.

        Every rank asks, one that holds nothing too, so that all of them see the same errors.

        Args:
            slot: what `BuildContext.state_slot` gave.
        """
        self.enter(slot, "recurrent")
        return self.cache.states[slot] if self.cache is not None and self.past > 0 else None

    def keep(self, slot: int, state: torch.Tensor) -> None:
        """Keeps a recurrent layer's state for the tokens to come, if there is a cache; see `finish`.

        Args:
            slot: what `BuildContext.state_slot` gave.
            state: ``[B, *shape]``, with memory of its own.
        """
        if self.cache is not None:
            self._kept[slot] = state

    def finish(self) -> None:
        """Lets the cache have taken up the new tokens. A pass that failed on its way leaves it as it was."""
        if self.cache is not None:
            for slot, state in self._kept.items():
                self.cache.states[slot] = state
            self.cache.used += self.length

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns what `make` makes, made once per pass: layers of the same kind share it."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[return-value]

    def leave(self, name: str, value: object) -> None:
        """Leaves a value for modules that come later in this pass, beside the hidden state that one hands to the next.

        Args:
            name: what those ask for; a plugin's own, so that no other one has it.
            value: alike on every rank, unless those that read it know better.

        Raises:
            SpecError: if another module has left one under this name.
        """
        if name in self._left:
            raise SpecError(f"two modules of one pass leave {name}; those after them could not tell which is meant")
        self._left[name] = value

    def left(self, name: str) -> Any:
        """Returns what a module before left in this pass.

        Raises:
            SpecError: if none did.
        """
        if name not in self._left:
            raise SpecError(
                f"a module needs {name}, which none before it leaves in this pass",
                hint="write the module that leaves it before the one that needs it",
            )
        return self._left[name]

    def mask(self, window: int | None, chunk: int | None = None) -> tuple[torch.Tensor | None, bool]:
        """Returns ``(mask, is_causal)`` for scaled dot product attention.

        A query at position i sees keys at positions j with ``0 <= i - j`` and, with a window, ``i - j < window``; with
        chunks, those of its own chunk. The mask is ``[L, past + L]`` bool, True where it sees; None where `is_causal`
        says it all or all is seen.
        """
        total = self.past + self.length
        window = window if window is not None and total > window else None
        chunk = chunk if chunk is not None and total > chunk else None
        if window is None and chunk is None and (self.past == 0 or self.length == 1):
            return None, self.length > 1
        return self.seen(window, chunk), False

    def seen(self, window: int | None, chunk: int | None = None) -> torch.Tensor:
        """Returns the mask of `mask`, always: ``[L, past + L]`` bool."""
        return self.once(("mask", window, chunk), lambda: self._mask(window, chunk))

    def distance(self) -> torch.Tensor:
        """Returns how far each key lies before each new token, ``[L, past + L]`` int64."""

        def make() -> torch.Tensor:
            keys = torch.arange(self.past + self.length, device=self.positions.device)
            return self.positions[:, None] - keys[None, :]

        return self.once("distance", make)

    def _mask(self, window: int | None, chunk: int | None) -> torch.Tensor:
        distance = self.distance()
        seen = distance >= 0
        if window is not None:
            seen = seen & (distance < window)
        if chunk is not None:
            keys = torch.arange(self.past + self.length, device=self.positions.device)
            seen = seen & (self.positions[:, None] // chunk == keys[None, :] // chunk)
        return seen
