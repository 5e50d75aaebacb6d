"""Values of words: literals, declared names, expressions and cases, and what they come to for given names.

Everything that can be known without a config.json is checked when a slot is compiled (`tpkit.spec.compiling`), in all
cases at once; the rest here, when it is evaluated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel

from tpkit.errors import SpecError
from tpkit.modules import RopeOptions
from tpkit.spec.data import Mark
from tpkit.spec.evaluate import evaluate, is_quotient, truth
from tpkit.spec.expr import Binary, Expr, ExprError, Name
from tpkit.spec.problems import Problems, shown, told
from tpkit.spec.rope import check_scaling
from tpkit.spec.slot_types import SlotType

__all__ = ["ABSENT", "Cases", "Failed", "Formula", "Given", "Many", "Nested", "Scope", "Slot", "values_of"]


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


#: the value of cases of which none holds: as if the word had not been written
ABSENT = _Absent()


class Scope(Protocol):
    """Gives values to names while slots are evaluated, and takes what is found wrong."""

    problems: Problems

    def value(self, name: str) -> Any:
        """Returns the value of a declared name."""

    def origin(self, name: str) -> str:
        """Returns where a name's value comes from, for messages."""


class Failed(Exception):
    """A slot has no value; the reason is noted in the scope's problems."""


class Slot(Protocol):
    """A compiled value."""

    @property
    def names(self) -> frozenset[str]:
        """Declared names it depends on."""

    def value(self, scope: Scope) -> Any:
        """Returns the value, or `ABSENT`."""


@dataclass(frozen=True)
class Given:
    """A literal."""

    literal: Any
    names: frozenset[str] = frozenset()

    def value(self, scope: Scope) -> Any:
        return self.literal


@dataclass(frozen=True)
class Formula:
    """An expression."""

    expr: Expr
    type: SlotType
    mark: Mark
    path: str
    names: frozenset[str]

    def value(self, scope: Scope) -> Any:
        try:
            value = evaluate(self.expr, scope.value)
            check_quotient(self.expr, scope)
        except ExprError as error:
            scope.problems.add(self.mark.moved(error.col), self.path, error.message + origins(self.names, scope))
            raise Failed from None
        if self.type.refuses(value):
            found = f"this comes out as {shown(value)}{origins(self.names, scope)}"
            if isinstance(self.expr, Name) and self.expr.name != "layer":
                found = f"{self.expr.name} is {shown(value)} ({scope.origin(self.expr.name)})"
            scope.problems.add(self.mark, self.path, f"{found}; {self.type} is needed")
            raise Failed
        return value

    def holds(self, scope: Scope) -> bool:
        """Returns its value as a condition."""
        value = self.value(scope)
        return truth(value, self.expr)


@dataclass(frozen=True)
class Cases:
    """The first case whose condition holds."""

    cases: tuple[tuple[Formula | None, Slot], ...]
    names: frozenset[str]

    def value(self, scope: Scope) -> Any:
        for when, slot in self.cases:
            if when is None or when.holds(scope):
                return slot.value(scope)
        return ABSENT


@dataclass(frozen=True)
class Nested:
    """A mapping of words of its own."""

    model: type[BaseModel]
    words: Mapping[str, Slot]
    names: frozenset[str]
    mark: Mark
    path: str

    def value(self, scope: Scope) -> Any:
        found = values_of(self.words, scope)
        if issubclass(self.model, RopeOptions):
            try:
                found["scaling"] = check_scaling(found.get("scaling"))
            except SpecError as error:
                where = origins(self.words["scaling"].names, scope)
                scope.problems.add(self.mark, f"{self.path}.scaling", told(error) + where)
                raise Failed from None
        return found


@dataclass(frozen=True)
class Many:
    """A list of values."""

    entries: tuple[Slot, ...]
    names: frozenset[str]

    def value(self, scope: Scope) -> Any:
        return tuple(entry.value(scope) for entry in self.entries)


def values_of(words: Mapping[str, Slot], scope: Scope) -> dict[str, Any]:
    """Returns the values of words that are not absent.

    Raises:
        Failed: after trying all of them, if one has no value.
    """
    found, failed = {}, False
    for word, slot in words.items():
        try:
            value = slot.value(scope)
        except Failed:
            failed = True
            continue
        if value is not ABSENT:
            found[word] = value
    if failed:
        raise Failed
    return found


def origins(names: Iterable[str], scope: Scope) -> str:
    """Returns the values of names and where they come from, in brackets; empty for no names."""
    told = [name for name in sorted(names) if name != "layer"]
    found = [f"{name} = {shown(scope.value(name))} from {scope.origin(name)}" for name in told]
    return f" ({', '.join(found)})" if found else ""


def check_quotient(expr: Expr, scope: Scope) -> None:
    """Refuses ``a // b`` with a remainder: a size divided into equal parts must come out."""
    if isinstance(expr, Binary) and is_quotient(expr):
        left, right = evaluate(expr.left, scope.value), evaluate(expr.right, scope.value)
        if isinstance(left, int) and isinstance(right, int) and left % right:
            raise ExprError(f"{left} does not divide by {right}: {left % right} would be left over", expr.col)
