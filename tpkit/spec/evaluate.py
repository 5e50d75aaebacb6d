"""What an expression means: its value for given names, and, before any are known, its type.

``and``, ``or``, ``not`` and conditions take null and 0 as false, so that ``when: q_lora_rank`` asks whether there is
one; texts and lists are no conditions. ``in null`` is false. Everything else that meets a null is an error.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tpkit.errors import did_you_mean
from tpkit.spec.expr import HUGE, Binary, Compare, Expr, ExprError, Name, Negative, Not, Number, Text
from tpkit.spec.problems import shown

__all__ = ["Type", "evaluate", "infer", "is_quotient", "truth", "type_of"]

Lookup = Callable[[str], Any]

_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "**": operator.pow,
}
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def is_quotient(expr: Expr) -> bool:
    """Tells whether an expression is nothing but ``a // b``: a size divided into equal parts, which must come out."""
    return isinstance(expr, Binary) and expr.op == "//"


def evaluate(expr: Expr, lookup: Lookup) -> Any:
    """Returns the value of an expression.

    Args:
        expr: the parsed expression.
        lookup: returns the value of a name.

    Raises:
        ExprError: if there is no finite value; the column tells which part is to blame.
    """
    if isinstance(expr, (Number, Text)):
        return expr.value
    if isinstance(expr, Name):
        return lookup(expr.name)
    if isinstance(expr, Not):
        return not truth(evaluate(expr.operand, lookup), expr.operand)
    if isinstance(expr, Negative):
        return -_number(evaluate(expr.operand, lookup), expr.operand)
    if isinstance(expr, Compare):
        return _compare(expr, evaluate(expr.left, lookup), evaluate(expr.right, lookup))
    left = evaluate(expr.left, lookup)
    if expr.op == "and":
        return truth(left, expr.left) and truth(evaluate(expr.right, lookup), expr.right)
    if expr.op == "or":
        return truth(left, expr.left) or truth(evaluate(expr.right, lookup), expr.right)
    right = evaluate(expr.right, lookup)
    return _compute(expr, _number(left, expr.left), _number(right, expr.right))


def truth(value: Any, expr: Expr) -> bool:
    """Returns whether a value counts as true in a condition.

    Raises:
        ExprError: for texts and lists.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return bool(value)
    raise ExprError(f"{_name(expr)}{shown(value)}, neither true nor false", expr.col)


def _name(expr: Expr) -> str:
    return f"{expr.name} is " if isinstance(expr, Name) else ""


def _number(value: Any, expr: Expr) -> int | float:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float):
        return value
    raise ExprError(f"{_name(expr)}{shown(value)}, not a number", expr.col)


def _compute(expr: Binary, left: int | float, right: int | float) -> int | float:
    try:
        result = _ARITHMETIC[expr.op](left, right)
    except ZeroDivisionError:
        raise ExprError(f"{shown(left)} {expr.op} {shown(right)} divides by zero", expr.col) from None
    except OverflowError:
        result = math.inf
    if isinstance(result, complex) or not math.isfinite(result) or abs(result) >= HUGE:
        raise ExprError(f"{shown(left)} {expr.op} {shown(right)} is no number of a sensible size", expr.col)
    number: int | float = result
    return number


def _compare(expr: Compare, left: Any, right: Any) -> bool:
    if expr.op in ("==", "!="):
        return (left == right) is (expr.op == "==")
    if expr.op in ("in", "not in"):
        if right is not None and not isinstance(right, (list, tuple)):
            raise ExprError(f"{_name(expr.right)}{shown(right)}, not a list", expr.right.col)
        return (right is not None and left in right) is (expr.op == "in")
    return _ORDER[expr.op](_number(left, expr.left), _number(right, expr.right))


_NOUNS = {
    "int": "an integer",
    "float": "a number with a fraction",
    "flag": "true or false",
    "list": "a list",
    "mapping": "a mapping",
}


@dataclass(frozen=True)
class Type:
    """What is known of a value before it is known.

    Attributes:
        kind: int, float, flag, text, list, mapping, null, or any.
        words: the only texts it can be, where they are known.
    """

    kind: str
    words: frozenset[str] | None = None

    def __str__(self) -> str:
        return _NOUNS.get(self.kind, self.kind)


ANY, INT, FLOAT, FLAG, TEXT = Type("any"), Type("int"), Type("float"), Type("flag"), Type("text")
_NUMBERS = ("int", "float", "any", "null")


def type_of(value: Any) -> Type:
    """Returns the type of plain data."""
    if value is None:
        return Type("null")
    if isinstance(value, bool):
        return FLAG
    kinds = {int: "int", float: "float", str: "text", dict: "mapping"}
    return Type(kinds.get(type(value), "list"), frozenset({value}) if isinstance(value, str) else None)


def infer(expr: Expr, types: Mapping[str, Type], report: Callable[[int, str], None]) -> Type:
    """Returns the type of an expression and reports what can be known to be wrong with it.

    Args:
        expr: the parsed expression.
        types: of the declared names; a name that is not there is reported.
        report: called with column and message.
    """
    if isinstance(expr, Number):
        return type_of(expr.value)
    if isinstance(expr, Text):
        return replace(TEXT, words=frozenset({expr.value}))
    if isinstance(expr, Name):
        if expr.name not in types:
            report(expr.col, f"{expr.name!r} is not declared{did_you_mean(expr.name, types)}")
        return types.get(expr.name, ANY)
    if isinstance(expr, Not):
        _want_condition(expr.operand, infer(expr.operand, types, report), report)
        return FLAG
    if isinstance(expr, Negative):
        return _want_number(expr.operand, infer(expr.operand, types, report), report)
    left, right = infer(expr.left, types, report), infer(expr.right, types, report)
    if isinstance(expr, Compare):
        _check_comparison(expr, left, right, report)
        return FLAG
    if expr.op in ("and", "or"):
        _want_condition(expr.left, left, report)
        _want_condition(expr.right, right, report)
        return FLAG
    left, right = _want_number(expr.left, left, report), _want_number(expr.right, right, report)
    if expr.op == "/" or "float" in (left.kind, right.kind) or isinstance(expr.right, Negative):
        return FLOAT
    return INT if left.kind == right.kind == "int" else ANY


def _want_number(expr: Expr, found: Type, report: Callable[[int, str], None]) -> Type:
    if found.kind in _NUMBERS:
        return found if found.kind != "null" else ANY
    report(expr.col, f"a number is needed here, not {_described(expr, found)}")
    return ANY


def _want_condition(expr: Expr, found: Type, report: Callable[[int, str], None]) -> None:
    if found.kind in ("text", "list", "mapping"):
        report(expr.col, f"true or false is needed here, not {_described(expr, found)}")


def _described(expr: Expr, found: Type) -> str:
    return f"{expr.name}, which is {found}" if isinstance(expr, Name) else str(found)


def _check_comparison(expr: Compare, left: Type, right: Type, report: Callable[[int, str], None]) -> None:
    if expr.op in ("in", "not in"):
        if right.kind not in ("list", "null", "any"):
            report(expr.right.col, f"a list is needed after {expr.op!r}, not {_described(expr.right, right)}")
        return
    if expr.op not in ("==", "!="):
        _want_number(expr.left, left, report)
        _want_number(expr.right, right, report)
        return
    for side, other, literal in ((left, right, expr.right), (right, left, expr.left)):
        if isinstance(literal, Text) and side.words is not None and literal.value not in side.words:
            known = ", ".join(sorted(side.words))
            report(
                literal.col,
                f"{_subject(expr, literal)} is never {literal.value!r}"
                f"{did_you_mean(literal.value, side.words)}; it is one of: {known}",
            )
            return
        if isinstance(literal, Text) and side.kind not in ("text", "any", "null") and other.kind == "text":
            report(literal.col, f"{_subject(expr, literal)} is {side} and never equals a text")
            return


def _subject(expr: Compare, literal: Text) -> str:
    other = expr.left if literal is expr.right else expr.right
    return other.name if isinstance(other, Name) else "this"
