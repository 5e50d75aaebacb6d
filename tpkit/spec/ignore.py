"""Patterns of tensors that may lie in a checkpoint and are not wanted. They may never cover a declared parameter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tpkit.spec.compiling import Context, compile_slot
from tpkit.spec.data import Data, Mark, Scalar
from tpkit.spec.draft import Draft
from tpkit.spec.slot_types import SlotType
from tpkit.spec.slots import Given, Scope, Slot
from tpkit.spec.words import Pack

__all__ = ["Pattern", "check_covered", "compile_pattern"]

_INDEX = SlotType(frozenset({"int"}))
_COMPONENT = re.compile(r"\*\*|\*|\{[^{}]*\}|[^*{}\s]+")


@dataclass(frozen=True)
class Pattern:
    """Dotted components: a name, ``*`` for one, ``**`` for one or more, or ``{expression}`` for a number.

    Attributes:
        text: as written.
        components: names and stars as text, numbers as slots.
        mark: where it is written.
        path: its path in the description.
    """

    text: str
    components: tuple[str | Slot, ...]
    mark: Mark
    path: str

    def bound(self, scope: Scope) -> str:
        """Returns the pattern with its numbers filled in."""
        return ".".join(c if isinstance(c, str) else str(c.value(scope)) for c in self.components)


def compile_pattern(data: Data, path: str, context: Context) -> Pattern | None:
    """Returns a compiled pattern; None if it is none, which has been noted."""
    if not isinstance(data, Scalar) or not isinstance(data.value, str):
        return None
    components: list[str | Slot] = []
    for component in _split(data.value):
        if not _COMPONENT.fullmatch(component):
            message = f"{component!r} is no component of a name; use a word, *, ** or {{expression}}"
            context.problems.add(data.mark, path, message)
            return None
        if component.startswith("{"):
            components.append(compile_slot(Scalar(component[1:-1], data.mark), _INDEX, path, context))
        else:
            components.append(component)
    return Pattern(data.value, tuple(components), data.mark, path)


def _split(text: str) -> list[str]:
    """Splits at dots outside of braces."""
    return re.split(r"\.(?![^{}]*\})", text)


def check_covered(pattern: Pattern, root: Draft, context: Context) -> None:
    """Notes a pattern that could match a declared parameter. A number in it is judged when it is bound."""
    for draft, stem in _stems(root, ()):
        for name in _tensors(draft, stem):
            if _matches(pattern.components, name):
                message = f"{pattern.text!r} covers {'.'.join(_shown(name))}, a declared parameter; make it narrower"
                context.problems.add(pattern.mark, pattern.path, message)
                return


#: stands for any index of a repeat
_ANY_INDEX = "#"


def _shown(name: tuple[str, ...]) -> Iterator[str]:
    return ("*" if part == _ANY_INDEX else part for part in name)


def _stems(draft: Draft, path: tuple[str, ...]) -> Iterator[tuple[Draft, tuple[str, ...]]]:
    for branches in draft.children.values():
        for child in branches:
            below = path if child.inline else (*path, child.name)
            if child.repeat is not None:
                below = (*below, _ANY_INDEX)
            yield child, below
            yield from _stems(child, below)


def _tensors(draft: Draft, stem: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yields the names on disk of a node's own tensors, as far as they are known before a quant method is."""
    if draft.kind == "parameter":
        yield stem
    elif draft.kind == "norm" or (draft.kind == "module" and draft.plugin is not None and not draft.plugin.roles):
        yield (*stem, "weight")
    elif draft.kind == "projection":
        packs: tuple[Pack, ...] = draft.literal("packs") or ()
        for base in [(*stem[:-1], *pack.name.split(".")) for pack in packs] or [stem]:
            yield (*base, "weight")
            bias = draft.words.get("bias")
            if bias is not None and not (isinstance(bias, Given) and bias.literal is not True):
                yield (*base, "bias")


def _matches(pattern: tuple[str | Slot, ...], name: tuple[str, ...]) -> bool:
    if not pattern or not name:
        return not pattern and not name
    first, rest = pattern[0], pattern[1:]
    if first == "**":
        return any(_matches(rest, name[taken:]) for taken in range(1, len(name) + 1))
    if not isinstance(first, str):
        return False
    fits = first in ("*", name[0]) or (name[0] == _ANY_INDEX and first.isdigit())
    return fits and _matches(rest, name[1:])
