"""The two grammars: what they mean is what Python means, as far as they go."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpkit.spec.evaluate import ANY, FLAG, INT, Type, evaluate, infer
from tpkit.spec.expr import ExprError, Name, names_in
from tpkit.spec.parsing import MAX_LENGTH, parse_step, parse_value

VALUES: dict[str, Any] = {
    "a": 3,
    "b": 0,
    "c": 2.5,
    "no_one": None,
    "on": True,
    "off": False,
    "kind": "x",
    "some": [1, 2],
}
OPERATORS: dict[str, tuple[int, Callable[[Any, Any], Any]]] = {
    "+": (1, operator.add),
    "-": (1, operator.sub),
    "*": (2, operator.mul),
    "/": (2, operator.truediv),
    "//": (2, operator.floordiv),
}


def value_of(text: str) -> Any:
    return evaluate(parse_value(text), VALUES.__getitem__)


class Tree:
    """An arithmetic tree: its text with as few brackets as it needs, and its value."""

    def __init__(self, text: str, level: int, value: Callable[[], Any]) -> None:
        self.text, self.level, self.value = text, level, value

    def inside(self, level: int) -> str:
        return self.text if self.level >= level else f"({self.text})"


def _leaf(number: int) -> Tree:
    return Tree(str(number), 4, lambda: number)


def _name(name: str) -> Tree:
    return Tree(name, 4, lambda: VALUES[name])


def _binary(left: Tree, op: str, right: Tree) -> Tree:
    level, function = OPERATORS[op]
    text = f"{left.inside(level)} {op} {right.inside(level + 1)}"
    return Tree(text, level, lambda: function(left.value(), right.value()))


def _power(base: Tree, exponent: int) -> Tree:
    # `-a ** 2` is -(a ** 2), as in Python, so only atoms stand before ** without brackets
    return Tree(f"{base.inside(4)} ** {exponent}", 3, lambda: base.value() ** exponent)


def _negative(inner: Tree) -> Tree:
    return Tree(f"-{inner.inside(3)}", 3, lambda: -inner.value())


trees = st.recursive(
    st.builds(_leaf, st.integers(0, 99)) | st.builds(_name, st.sampled_from("abc")),
    lambda inner: (
        st.builds(_binary, inner, st.sampled_from(sorted(OPERATORS)), inner)
        | st.builds(_negative, inner)
        | st.builds(_power, inner, st.integers(0, 3))
    ),
    max_leaves=8,
)


@settings(max_examples=400)
@given(trees)
def test_arithmetic_is_that_of_python(tree: Tree) -> None:
    if len(tree.text) > MAX_LENGTH:
        return
    try:
        wanted = tree.value()
        fine = not isinstance(wanted, complex) and math.isfinite(wanted)
    except (ZeroDivisionError, OverflowError):
        fine = False
    try:
        found = value_of(tree.text)
    except ExprError as error:
        # refused: no value, or a number on the way that is too large
        assert not fine or "nested" in error.message or "sensible size" in error.message
        return
    assert fine
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a == 3", True),
        ("a != 3 or on", True),
        ("not on and off", False),
        ("not (on and off)", True),
        ("a < 4 and a >= 3", True),
        ("kind == 'x'", True),
        ('kind == "y"', False),
        ("1 in some", True),
        ("3 not in some", True),
        ("3 in no_one", False),
        ("3 not in no_one", True),
        ("no_one or a", True),
        ("not no_one", True),
        ("b or off", False),
        ("no_one == 3", False),
        ("-a ** 2", -9),
        ("(-a) ** 2", 9),
        ("a ** -1", 1 / 3),
        ("a ** 0.5", 3**0.5),
        ("1e-6", 1e-6),
        ("7 // 2 * 2", 6),
    ],
)
def test_values(text: str, value: Any) -> None:
    assert value_of(text) == value
    assert type(value_of(text)) is type(value)


@pytest.mark.parametrize(
    ("text", "col", "part"),
    [
        ("", 0, "a value is missing"),
        ("a +", 3, "a value is missing"),
        ("a b", 2, "'b' is not expected"),
        ("(a", 2, "')' is missing"),
        ("a)", 1, "')' is not expected"),
        ("1 < a < 3", 6, "not chained"),
        ("f(a)", 1, "calls nothing"),
        ("a[0]", 1, "'[' has no meaning"),
        ("a.b", 1, "'.' has no meaning"),
        ("a % 2", 2, "'%' has no meaning"),
        ("a if on else b", 2, "'if' is not expected"),
        ("lambda: 1", 6, "':' has no meaning"),
        ("a ** b", 5, "an exponent is a number"),
        ("2 ** 9", 5, "exponents go up to 8"),
        ("9" * 30, 0, "too large"),
        ("1e400", 0, "too large"),
        ("1x", 0, "has no meaning"),
        ("'open", 0, "has no meaning"),
        ("in a", 0, "a value is missing"),
        ("(" * 60 + "a" + ")" * 60, 21, "nested more than 20"),
        ("a" * 201, 0, "at most 200 characters"),
        ("- " * 40 + "a", 42, "nested more than 20"),
    ],
)
def test_not_in_the_grammar(text: str, col: int, part: str) -> None:
    with pytest.raises(ExprError) as caught:
        parse_value(text)
    assert part in caught.value.message
    assert caught.value.col == col


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a / b", "3 / 0 divides by zero"),
        ("a // 0", "divides by zero"),
        ("no_one + 1", "no_one is null, not a number"),
        ("kind * 2", "kind is text 'x', not a number"),
        ("on + 1", "on is true, not a number"),
        ("kind and on", "kind is text 'x', neither true nor false"),
        ("a in kind", "kind is text 'x', not a list"),
        ("kind < 3", "kind is text 'x', not a number"),
        ("99999999999 ** 8", "no number of a sensible size"),
        ("(0 - 8) ** 0.5", "no number of a sensible size"),
    ],
)
def test_no_value(text: str, part: str) -> None:
    with pytest.raises(ExprError) as caught:
        value_of(text)
    assert part in caught.value.message


@given(st.text(alphabet="ab12 +-*/()<>=!'\".x_notinadr%[]{}:\n", max_size=40))
def test_any_text_parses_or_is_refused(text: str) -> None:
    for parse in (parse_value, parse_step):
        try:
            parse(text)
        except ExprError as error:
            assert 0 <= error.col <= len(text)


def test_names_have_columns() -> None:
    assert list(names_in(parse_value("a + (b * 2)"))) == [Name("a", 0), Name("b", 5)]


def test_steps() -> None:
    (x, call) = parse_step("x + 0.5 * mlp(norm(x))")
    assert (x.child, x.factor) == (None, None)
    assert call.child == "mlp"
    assert getattr(call.factor, "value", None) == 0.5
    assert call.argument[0].child == "norm"
    assert call.argument[0].argument[0].child is None
    (scaled,) = parse_step("scale * x")
    assert (scaled.child, getattr(scaled.factor, "name", None)) == (None, "scale")


@pytest.mark.parametrize(
    ("text", "col", "part"),
    [
        ("", 0, "'x' or a child is missing"),
        ("x - mlp(x)", 2, "'-' is not expected"),
        ("x + mlp", 4, "applied to something"),
        ("x + mlp()", 8, "'x' or a child is missing"),
        ("x + mlp(x", 9, "')' is missing"),
        ("2 x", 2, "'*' is missing"),
        ("x * mlp(x) * 2", 11, "'*' is not expected"),
        ("x +", 3, "'x' or a child is missing"),
        ("x+m(" * 25 + "x" + ")" * 25, 84, "nested more than 20"),
    ],
)
def test_no_step(text: str, col: int, part: str) -> None:
    with pytest.raises(ExprError) as caught:
        parse_step(text)
    assert part in caught.value.message
    assert caught.value.col == col


@pytest.mark.parametrize(
    ("text", "kind"),
    [("a * 2", "int"), ("a / 2", "float"), ("a ** -1", "float"), ("a < 2", "flag"), ("u + 1", "any"), ("'w'", "text")],
)
def test_types_are_known_before_values(text: str, kind: str) -> None:
    assert infer(parse_value(text), {"a": INT, "u": ANY}, pytest.fail).kind == kind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("z + 1", "'z' is not declared"),
        ("numbr + 1", "'numbr' is not declared (did you mean 'number'?)"),
        ("kind + 1", "a number is needed here, not kind, which is text"),
        ("on + 1", "a number is needed here, not on, which is true or false"),
        ("kind == 'hlaf'", "kind is never 'hlaf' (did you mean 'half'?); it is one of: full, half"),
        ("'full' != kind2", "'kind2' is not declared (did you mean 'kind'?)"),
        ("number == 'full'", "number is an integer and never equals a text"),
        ("number in number", "a list is needed after 'in', not number, which is an integer"),
        ("kind and on", "true or false is needed here, not kind, which is text"),
    ],
)
def test_what_is_wrong_is_known_before_values(text: str, message: str) -> None:
    types = {"number": INT, "on": FLAG, "kind": Type("text", frozenset({"half", "full"}))}
    found: list[str] = []
    infer(parse_value(text), types, lambda col, told: found.append(told))
    assert found == [message]
