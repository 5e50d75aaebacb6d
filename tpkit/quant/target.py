"""A module as the rules of a quantised checkpoint see it: its names, and what is stored for it. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate
from functools import lru_cache
from typing import Literal

from tpkit.errors import PluginError
from tpkit.layout import EXPERT, of_expert
from tpkit.params import Header

__all__ = ["Dialect", "Target"]

#: how an entry of a list of modules is meant
Dialect = Literal["exact", "component", "substring", "prefix", "glob"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One part of a layer as it is stored: what a quant method is asked about in `QuantMethod.for_module`.

    Attributes:
        name: its dotted path in the checkpoint, e.g. ``model.layers.0.self_attn.q_proj``.
        aliases: other names that rules may call it by: the packed projection's, and both as the description has them.
        siblings: names of the other parts of the same packed layer.
        kind: "linear", "head" (the projection to the vocabulary) or "embedding".
        role: its role in the module around it, e.g. "up_proj", or "router" of experts; "" where it stands alone.
        in_features, out_features: its logical sizes.
        stored: headers of what the checkpoint has for it, by the rest of their names; empty without a checkpoint.
        patterns: notes every pattern it is compared with, and how, and whether it ever matched.
    """

    name: str
    aliases: tuple[str, ...] = ()
    siblings: tuple[str, ...] = ()
    kind: Literal["linear", "head", "embedding"] = "linear"
    role: str = ""
    in_features: int = 0
    out_features: int = 0
    stored: Mapping[str, Header] = field(default_factory=dict)
    patterns: dict[tuple[str, Dialect], bool] = field(default_factory=dict, compare=False, repr=False)

    def matches(self, patterns: Iterable[str] | None, dialect: Dialect = "component") -> bool:
        """Says whether a list of modules has it, by any of its names; see `match` for the dialects."""
        return self.match(patterns, dialect) is not None

    def match(self, patterns: Iterable[str] | None, dialect: Dialect = "component") -> str | None:
        """Returns the first entry of a list that means it, or None.

        An entry that names a part of a packed layer means that part alone; one that names the packed projection, and
        none of its parts, means all of them.

        An entry that starts with ``re:`` is a regular expression that must match from the start of the name, in every
        dialect. Otherwise:

        - exact: it is the whole name.
        - component: it is a run of whole dotted components of the name; ``*`` and ``?`` stand within one.
        - substring: it occurs anywhere in the name.
        - prefix: the name starts with it.
        - glob: ``*`` is any text, dots too, and the whole name must match.

        Raises:
            PluginError: for a regular expression that is none.
        """
        for pattern in patterns or ():
            if self._means_this(pattern, dialect):
                self.patterns[pattern, dialect] = True
                return pattern
            self.patterns.setdefault((pattern, dialect), False)
        return None

    def of(self, expert: int, patterns: dict[tuple[str, Dialect], bool]) -> Target:
        """Returns the target of one expert, where this is of all of them; it notes patterns in `patterns`."""
        return replace(
            self,
            name=of_expert(self.name, expert),
            aliases=tuple(of_expert(name, expert) for name in self.aliases),
            siblings=tuple(of_expert(name, expert) for name in self.siblings),
            patterns=patterns,
        )

    def apart(self, pattern: str, dialect: Dialect, experts: int) -> list[int]:
        """Returns the experts that a pattern means where it does not mean expert 0, or the other way round."""
        compared = self._told_apart(pattern, dialect, experts)
        first = bool(compared) and self.of(0, {})._means_this(pattern, dialect)
        return [e for e in compared if self.of(e, {})._means_this(pattern, dialect) != first]

    def _told_apart(self, pattern: str, dialect: Dialect, experts: int) -> Sequence[int]:
        """Returns experts to compare: all where the pattern speaks of their numbers, else some, or none."""
        around = self.name.split(".")
        before = around[around.index(EXPERT) - 1] if EXPERT in around[1:] else ""
        return _speaks_of(before, pattern, dialect, experts) if before else ()

    def _means_this(self, pattern: str, dialect: Dialect) -> bool:
        if _fits(pattern, self.name, dialect):
            return True
        of_a_part = any(_fits(pattern, name, dialect) for name in self.siblings)
        return not of_a_part and any(_fits(pattern, name, dialect) for name in self.aliases)


def _fits(pattern: str, name: str, dialect: Dialect) -> bool:
    return _test(pattern, dialect)(name)


@lru_cache(maxsize=8192)
def _test(pattern: str, dialect: Dialect) -> Callable[[str], bool]:
    """Returns what says whether a name fits; made once for a pattern, as a model has very many names."""
    if pattern.startswith("re:"):
        try:
            found = re.compile(pattern[3:])
        except re.error as cause:
            raise PluginError(f"{pattern!r} in a list of modules is no regular expression: {cause}") from cause
        return lambda name: found.match(name) is not None
    if dialect == "exact":
        return pattern.__eq__
    if dialect == "substring":
        return lambda name: pattern in name
    if dialect == "prefix":
        return lambda name: name.startswith(pattern)
    if dialect == "glob":
        return re.compile(translate(pattern)).match  # type: ignore[return-value]
    return _run(pattern.strip(".").split("."))


def _run(wanted: list[str]) -> Callable[[str], bool]:
    """Returns what says whether a name has a run of components that these patterns fit."""
    if not any(char in part for part in wanted for char in "*?["):
        text = f".{'.'.join(wanted)}."
        return lambda name: text in f".{name}."
    fits = [re.compile(translate(part)).match for part in wanted]

    def has_run(name: str) -> bool:
        found = name.split(".")
        return any(
            all(fit(part) for fit, part in zip(fits, found[at:], strict=False))
            for at in range(len(found) - len(wanted) + 1)
        )

    return has_run


@lru_cache(maxsize=8192)
def _speaks_of(before: str, pattern: str, dialect: Dialect, experts: int) -> Sequence[int]:
    """Returns the experts to compare with the first one: all where a pattern speaks of numbers after `before`."""
    expression = pattern.startswith("re:")
    if before in pattern:
        tells = re.search(r"[\d\[?(|{]", pattern.rpartition(before)[2])
    else:  # it may speak of the place before their numbers by wildcards, or of the numbers alone
        tells = re.search(r"\d" if expression or dialect == "substring" else r"^\d|[*?\]][^.]*\.\d|[\[?]", pattern)
    if tells:
        return range(1, experts)
    wild = expression or any(char in pattern for char in "*?[")
    return [e for e in (1, 2, 9, 10, 99, 100, experts - 1) if 0 < e < experts] if wild else ()
