"""What an expression and a step of a forward are, once parsed: frozen data, with the column of every part."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = [
    "HUGE",
    "RESERVED",
    "Binary",
    "Compare",
    "Expr",
    "ExprError",
    "Name",
    "Negative",
    "Not",
    "Number",
    "Part",
    "StepExpr",
    "Text",
    "is_name",
    "names_in",
]

#: numbers from here on are refused: no size is that large, and arithmetic on them can take forever
HUGE = 2**63
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
RESERVED = frozenset({"and", "or", "not", "in"})


class ExprError(Exception):
    """An expression that cannot be parsed, or evaluated.

    Attributes:
        col: where in the expression, from 0.
    """

    def __init__(self, message: str, col: int = 0) -> None:
        super().__init__(message)
        self.message, self.col = message, col


@dataclass(frozen=True)
class Number:
    """A number."""

    value: int | float
    col: int


@dataclass(frozen=True)
class Text:
    """A quoted text."""

    value: str
    col: int


@dataclass(frozen=True)
class Name:
    """A declared name, or ``layer``."""

    name: str
    col: int


@dataclass(frozen=True)
class Negative:
    """``-operand``."""

    operand: Expr
    col: int


@dataclass(frozen=True)
class Not:
    """``not operand``."""

    operand: Expr
    col: int


@dataclass(frozen=True)
class Binary:
    """``+ - * / // **``, ``and``, ``or``."""

    op: str
    left: Expr
    right: Expr
    col: int


@dataclass(frozen=True)
class Compare:
    """``== != < <= > >= in`` and ``not in``."""

    op: str
    left: Expr
    right: Expr
    col: int


Expr = Number | Text | Name | Negative | Not | Binary | Compare


@dataclass(frozen=True)
class Part:
    """``factor * child(argument)``, or ``factor * x`` where `child` is None."""

    child: str | None
    argument: StepExpr
    factor: Number | Name | None
    col: int


StepExpr = tuple[Part, ...]


def is_name(text: str) -> bool:
    """Tells whether a text is one word that could be a declared name."""
    return bool(_NAME.fullmatch(text)) and text not in RESERVED


def names_in(expr: Expr) -> Iterator[Name]:
    """Yields every name in an expression."""
    if isinstance(expr, Name):
        yield expr
    elif isinstance(expr, (Negative, Not)):
        yield from names_in(expr.operand)
    elif isinstance(expr, (Binary, Compare)):
        yield from names_in(expr.left)
        yield from names_in(expr.right)
