"""The two small languages of a description: values and conditions, and steps of a forward.

Both are parsed here by recursive descent; nothing is ever handed to Python to evaluate. What an expression means is in
`tpkit.spec.evaluate`.

    value  := and ('or' and)*                 and  := not ('and' not)*            not := 'not' not | cmp
    cmp    := sum [('==' | '!=' | '<' | '<=' | '>' | '>=' | 'in' | 'not in') sum]
    sum    := term (('+' | '-') term)*        term := pow (('*' | '/' | '//') pow)*
    pow    := '-' pow | atom ['**' ['-'] NUMBER]
    atom   := NUMBER | 'text' | NAME | '(' value ')'

    step   := part ('+' part)*                part := [(NUMBER | NAME) '*'] (call | 'x')
    call   := CHILD '(' step ')'
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from tpkit.spec.expr import (
    HUGE,
    RESERVED,
    Binary,
    Compare,
    Expr,
    ExprError,
    Name,
    Negative,
    Not,
    Number,
    Part,
    StepExpr,
    Text,
)

__all__ = ["parse_step", "parse_value"]

MAX_LENGTH = 200
MAX_EXPONENT = 8
#: nested brackets, signs and nots
MAX_NESTING = 20


class _Token(NamedTuple):
    kind: str
    text: str
    col: int


_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?![\w.])"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|'(?P<single>[^'\\\n]*)'|\"(?P<double>[^\"\\\n]*)\""
    r"|(?P<op>\*\*|//|==|!=|<=|>=|[-+*/<>()]))"
)
_ARITHMETIC = ({"+", "-"}, {"*", "/", "//"})
_COMPARISONS = frozenset({"==", "!=", "<", "<=", ">", ">=", "in"})


def parse_value(text: str) -> Expr:
    """Parses a value or condition.

    Raises:
        ExprError: with the column of what is wrong.
    """
    parser = _Parser(text)
    expr: Expr = parser.whole(parser.either)
    return expr


def parse_step(text: str) -> StepExpr:
    """Parses a step of a forward, like ``x + self_attn(input_layernorm(x))``.

    Raises:
        ExprError: with the column of what is wrong.
    """
    parser = _Parser(text)
    parts: StepExpr = parser.whole(parser.step)
    return parts


def _tokens(text: str) -> list[_Token]:
    if len(text) > MAX_LENGTH:
        raise ExprError(f"an expression has at most {MAX_LENGTH} characters, this one has {len(text)}")
    tokens, at = [], 0
    end = len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            col = at + len(text[at:]) - len(text[at:].lstrip())
            raise ExprError(f"{text[col]!r} has no meaning here", col)
        kind = match.lastgroup or ""
        tokens.append(_Token(kind if kind not in ("single", "double") else "text", match[kind], match.start(kind)))
        at = match.end()
    return [*tokens, _Token("end", "", end)]


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens = _tokens(text)
        self.at = 0
        self.depth = 0

    def whole(self, rule: Any) -> Any:
        """Parses by a rule and makes sure that nothing is left."""
        result = rule()
        if self.peek.kind != "end":
            raise self.unexpected()
        return result

    @property
    def peek(self) -> _Token:
        return self.tokens[self.at]

    def next(self) -> _Token:
        token = self.tokens[self.at]
        self.at += 1
        return token

    def accept(self, *texts: str) -> _Token | None:
        token = self.peek
        return self.next() if token.kind in ("op", "name") and token.text in texts else None

    def expect(self, text: str) -> None:
        if self.accept(text) is None:
            raise self.unexpected(f"{text!r} is missing")

    def unexpected(self, wanted: str = "") -> ExprError:
        token = self.peek
        found = "the end" if token.kind == "end" else repr(token.text)
        return ExprError(f"{wanted} before {found}" if wanted else f"{found} is not expected here", token.col)

    def deeper(self, rule: Any) -> Any:
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise ExprError(f"nested more than {MAX_NESTING} levels deep", self.peek.col)
        result = rule()
        self.depth -= 1
        return result

    # values and conditions, loosest binding first

    def either(self) -> Expr:
        left = self.both()
        while token := self.accept("or"):
            left = Binary("or", left, self.both(), token.col)
        return left

    def both(self) -> Expr:
        left = self.negation()
        while token := self.accept("and"):
            left = Binary("and", left, self.negation(), token.col)
        return left

    def negation(self) -> Expr:
        if token := self.accept("not"):
            return Not(self.deeper(self.negation), token.col)
        return self.comparison()

    def comparison(self) -> Expr:
        left = self.arithmetic(0)
        token = self.accept(*_COMPARISONS)
        op = token.text if token else ""
        if token is None and self.peek.text == "not" and self.tokens[self.at + 1].text == "in":
            token, op = self.next(), "not in"
            self.next()
        if token is None:
            return left
        result = Compare(op, left, self.arithmetic(0), token.col)
        if self.peek.text in _COMPARISONS:
            raise ExprError("comparisons are not chained; join two with 'and'", self.peek.col)
        return result

    def arithmetic(self, level: int) -> Expr:
        if level == len(_ARITHMETIC):
            return self.power()
        left = self.arithmetic(level + 1)
        while token := self.accept(*_ARITHMETIC[level]):
            left = Binary(token.text, left, self.arithmetic(level + 1), token.col)
        return left

    def power(self) -> Expr:
        if token := self.accept("-"):
            return Negative(self.deeper(self.power), token.col)
        base = self.atom()
        token = self.accept("**")
        if token is None:
            return base
        sign = self.accept("-")
        exponent = self.number("an exponent is a number")
        if exponent.value > MAX_EXPONENT:
            raise ExprError(f"exponents go up to {MAX_EXPONENT}", exponent.col)
        right: Expr = Negative(exponent, sign.col) if sign else exponent
        return Binary("**", base, right, token.col)

    def atom(self) -> Expr:
        token = self.peek
        if token.kind == "number":
            return self.number("")
        if token.kind == "text":
            return Text(self.next().text, token.col)
        if token.kind == "name" and token.text not in RESERVED:
            self.next()
            if self.peek.text == "(":
                raise ExprError("a value calls nothing", self.peek.col)
            return Name(token.text, token.col)
        if self.accept("("):
            inner: Expr = self.deeper(self.either)
            self.expect(")")
            return inner
        raise self.unexpected("a value is missing")

    def number(self, wanted: str) -> Number:
        token = self.peek
        if token.kind != "number":
            raise ExprError(wanted, token.col)
        self.next()
        whole = token.text.isdigit()
        value: int | float = int(token.text) if whole and len(token.text) <= 20 else float(token.text)
        if not abs(value) < HUGE:
            raise ExprError(f"the number {token.text[:24]} is too large", token.col)
        return Number(value, token.col)

    # steps of a forward

    def step(self) -> StepExpr:
        parts = [self.part()]
        while self.accept("+"):
            parts.append(self.part())
        return tuple(parts)

    def part(self) -> Part:
        col = self.peek.col
        factor: Number | Name | None = None
        if self.peek.kind == "number":
            factor = self.number("")
            self.expect("*")
        elif self.peek.kind == "name" and self.tokens[self.at + 1].text == "*":
            factor = Name(self.next().text, col)
            self.next()
        token = self.peek
        if token.kind != "name" or token.text in RESERVED:
            raise self.unexpected("'x' or a child is missing")
        self.next()
        if token.text == "x" and self.peek.text != "(":
            return Part(None, (), factor, token.col)
        if not self.accept("("):
            raise ExprError(f"a child is applied to something: {token.text}(x)", token.col)
        argument: StepExpr = self.deeper(self.step)
        self.expect(")")
        return Part(token.text, argument, factor, token.col)
