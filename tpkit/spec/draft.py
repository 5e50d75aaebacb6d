"""A node of the module tree before it is bound: every branch of every choice, with its values compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import BaseModel

from tpkit.spec.bound import Kind
from tpkit.spec.data import Mark, Table
from tpkit.spec.expr import StepExpr
from tpkit.spec.slots import Failed, Formula, Scope, Slot

__all__ = ["Draft", "Member", "StepDraft", "children_in", "members_in"]


@dataclass(frozen=True, kw_only=True)
class StepDraft:
    """One step of a container's forward, taken where `when` holds."""

    parts: StepExpr
    when: Formula | None
    mark: Mark
    path: str


@dataclass(frozen=True, kw_only=True)
class Draft:
    """One node, or one branch of a choice of nodes.

    Attributes:
        name: its key.
        where: its path in the description, for messages.
        table: as written.
        kind: what it is; a repeated container is a container here.
        word: module type, style or norm word.
        plugin: the module type or style of that word, where it is known.
        options: the class of its words, None for containers.
        when: it is there where this holds; None: always, or unless an earlier branch is.
        role: as written.
        inline: it adds no component to the names below it.
        repeat: how many copies there are.
        stacked: as `repeat`, and all copies are one tensor on disk, of one dimension more.
        words: compiled values.
        children: branches by name, in written order.
        steps: the forward; None: children run in order.
    """

    name: str
    where: str
    table: Table
    kind: Kind
    word: str = ""
    plugin: Any = None
    options: type[BaseModel] | None = None
    when: Formula | None = None
    role: str | None = None
    inline: bool = False
    repeat: Slot | None = None
    stacked: Slot | None = None
    words: Mapping[str, Slot] = field(default_factory=dict)
    children: Mapping[str, tuple[Draft, ...]] = field(default_factory=dict)
    steps: tuple[StepDraft, ...] | None = None

    @property
    def mark(self) -> Mark:
        """Where it is written."""
        return self.table.mark

    def literal(self, word: str) -> Any:
        """Returns the value of a word that is plain data, None where it is not given."""
        slot = self.words.get(word)
        return getattr(slot, "literal", None)

    def walk(self) -> Iterator[Draft]:
        """Yields this node and all below it, every branch."""
        yield self
        for child in children_in(self):
            yield from child.walk()


def children_in(draft: Draft) -> Iterator[Draft]:
    """Yields every branch of every child."""
    for branches in draft.children.values():
        yield from branches


class Member(NamedTuple):
    """What may fill a role of a module.

    Attributes:
        name: its dotted name below the module.
        draft: the node.
        copies: of how many alike ones it is one, by its own word or a container's; None: it is a single one.
    """

    name: str
    draft: Draft
    copies: Slot | None

    def number(self, scope: Scope) -> int | None:
        """Returns the number of copies; None where there are none, or where it cannot be known."""
        try:
            return None if self.copies is None else self.copies.value(scope)
        except Failed:
            return None


def members_in(
    draft: Draft,
    among: Callable[[Draft], Iterable[Draft]] = children_in,
    prefix: str = "",
    copies: Slot | None = None,
) -> Iterator[Member]:
    """Yields what may fill the roles of a module: its children, through containers, and parameters in projections.

    Args:
        draft: the module.
        among: returns the children of a draft that count; by default every branch of all.
        prefix: dotted name of what `draft` is in the module.
        copies: of how many alike ones that is one.
    """
    for child in among(draft):
        name, several = f"{prefix}.{child.name}".lstrip("."), child.stacked or child.repeat or copies
        if child.kind != "container" or child.role is not None or not child.children:
            yield Member(name, child, several)
        if child.kind in ("container", "projection"):
            yield from members_in(child, among, name, several)
