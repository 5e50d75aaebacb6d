"""Errors a user of tpkit can meet, and the exit code each one gives the command line.

Every error says which file, which module and which numbers, and, where there is one, what to do (`hint`).
Errors about values a caller passed are also ``ValueError``, so that plain Python code can catch them as such.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

__all__ = [
    "CheckpointError",
    "LoadError",
    "PluginError",
    "RankError",
    "ShardingError",
    "SpecError",
    "TpkitError",
    "UsageError",
    "did_you_mean",
]


#: findings that are printed under one heading; the rest is counted
SHOWN = 20
#: names beyond which only likely ones are compared with a misspelt one
MANY = 1000


class TpkitError(Exception):
    """Base of all errors that tpkit raises on purpose.

    Attributes:
        hint: what to do about it, or None.
        exit_code: what the command line exits with.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class UsageError(TpkitError, ValueError):
    """An argument or a combination of arguments that cannot be meant."""


class SpecError(TpkitError, ValueError):
    """A model description, or the config.json it is bound to, is not right. Lists every problem found.

    Attributes:
        problems: one line each, with the position in the file where it is known.
    """

    def __init__(self, message: str, *, problems: Iterable[str] = (), hint: str | None = None) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join([message, *(f"  {line}" for line in self.problems)]), hint=hint)


class PluginError(TpkitError):
    """A plugin is missing, ambiguous, broken, or breaks its contract."""

    exit_code = 3


class CheckpointError(TpkitError, ValueError):
    """The checkpoint cannot be read, or is not what the description says."""

    exit_code = 4


class LoadError(CheckpointError):
    """The plan does not write every element exactly once. Lists all findings, grouped.

    Attributes:
        groups: heading -> findings under it.
    """

    def __init__(self, message: str, groups: Mapping[str, Iterable[str]], *, hint: str | None = None) -> None:
        self.groups = {heading: tuple(lines) for heading, lines in groups.items() if lines}
        text = [message]
        for heading, lines in self.groups.items():
            text.append(f"  {heading} ({len(lines)}):")
            folded = _folded(lines)
            text.extend(f"    {line}" for line in folded[:SHOWN])
            if len(folded) > SHOWN:
                text.append(f"    ... and {len(folded) - SHOWN} more kinds")
        super().__init__("\n".join(text), hint=hint)


class ShardingError(TpkitError, ValueError):
    """Sizes, axes or ranks that do not go together."""

    exit_code = 4


class RankError(TpkitError):
    """Ranks that must agree do not, or another rank failed."""

    exit_code = 4


def _folded(lines: Iterable[str]) -> list[str]:
    """Says once what is said of many layers: findings that differ only in numbers between dots."""
    alike: dict[str, list[str]] = {}
    for line in lines:
        said = line.partition(" (did you mean")[0]
        alike.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", said), []).append(line)
    return [f"{same[0]} (and {len(same) - 1} more like it)" if len(same) > 1 else same[0] for same in alike.values()]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns ``" (did you mean 'x'?)"`` for the closest known word, or an empty string."""
    close = get_close_matches(word, _likely(word, sorted(set(known))), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _likely(word: str, known: list[str]) -> list[str]:
    """Returns those of very many names that begin or end like a word: comparing it with each would take minutes."""
    if len(known) <= MANY:
        return known
    at, parts = bisect_left(known, word), word.split(".")
    likely = dict.fromkeys(known[max(0, at - MANY // 4) : at + MANY // 4])
    for first in range(1, len(parts)):
        alike = [name for name in known if name.endswith("." + ".".join(parts[first:]))]
        if alike:
            likely |= dict.fromkeys(alike[: MANY // 2])
            break
    return sorted(likely)
