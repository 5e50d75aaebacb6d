"""Reads YAML with the scalars of the YAML 1.2 core schema, and nothing that could surprise.

PyYAML follows YAML 1.1, in which ``no`` is false, ``1e-6`` is text and ``1:30`` is ninety. Here only its parser is
used; what a plain word means is decided below. Anchors, aliases, tags and merge keys are refused: a description
needs none, and they are what makes reading YAML from strangers dangerous.
"""

from __future__ import annotations

import math
import re
from typing import Any

from yaml import AliasEvent, MappingNode, MarkedYAMLError, Node, ScalarNode, YAMLError
from yaml.composer import Composer
from yaml.nodes import SequenceNode
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from tpkit.errors import SpecError
from tpkit.spec.data import MAX_DEPTH, Data, Items, Mark, Scalar, Table
from tpkit.spec.expr import HUGE
from tpkit.spec.problems import Problems

__all__ = ["read_yaml", "scalar"]

MAX_BYTES = 1_000_000

_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class _Refused(YAMLError):
    def __init__(self, mark: Mark, message: str) -> None:
        super().__init__(message)
        self.mark, self.message = mark, message


class _Loader(Reader, Scanner, Parser, Composer, BaseResolver):
    """PyYAML's parser without its constructors and without any meaning of words."""

    # an instance variable to PyYAML's stubs, a class variable in fact
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, text: str, source: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)
        self.source, self.depth = source, 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event = self.peek_event()
        mark = _mark(self.source, event.start_mark)
        if isinstance(event, AliasEvent) or event.anchor is not None:
            raise _Refused(mark, "anchors (&) and aliases (*) are not used here; write the value out")
        if event.tag is not None:
            raise _Refused(mark, f"tags are not used here: {event.tag}")
        if self.depth > MAX_DEPTH:
            raise _Refused(mark, f"nested more than {MAX_DEPTH} levels deep")
        self.depth += 1
        node: Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


def read_yaml(text: str, source: str) -> Data:
    """Parses one YAML document.

    Args:
        text: the document.
        source: the file's name, for positions.

    Raises:
        SpecError: for what is not YAML, or is YAML that is refused here, with its position.
    """
    if len(text) > MAX_BYTES:
        raise SpecError(f"{source}: {len(text)} characters; a description has at most {MAX_BYTES}")
    try:
        node = _Loader(text, source).get_single_node()
    except _Refused as refused:
        raise SpecError(f"{source} cannot be read", problems=[f"{refused.mark}: {refused.message}"]) from None
    except MarkedYAMLError as error:
        mark = _mark(source, error.problem_mark or error.context_mark)
        text = " ".join(part for part in (error.context, error.problem) if part)
        raise SpecError(f"{source} is not valid YAML", problems=[f"{mark}: {text}"]) from None
    except YAMLError as error:
        raise SpecError(f"{source} is not valid YAML", problems=[f"{source}: {error}".splitlines()[0]]) from None
    if node is None:
        raise SpecError(f"{source} is empty")
    problems = Problems()
    data = _data(node, source, "", problems)
    problems.raise_if_any(f"{source} cannot be read")
    return data


def _mark(source: str, mark: object) -> Mark:
    return Mark(source, mark.line + 1, mark.column + 1) if mark is not None else Mark(source)  # type: ignore[attr-defined]


def _data(node: Node, source: str, path: str, problems: Problems) -> Data:
    mark = _mark(source, node.start_mark)
    if isinstance(node, ScalarNode):
        if node.style is not None:
            return Scalar(node.value, mark, shift=1)
        try:
            return Scalar(scalar(node.value), mark)
        except ValueError as error:
            problems.add(mark, path, str(error))
            return Scalar(None, mark)
    if isinstance(node, SequenceNode):
        return Items(tuple(_data(n, source, f"{path}[{i}]", problems) for i, n in enumerate(node.value)), mark)
    if isinstance(node, MappingNode):
        return _table(node, source, path, problems)
    raise TypeError(f"unexpected {node!r}")


def _table(node: MappingNode, source: str, path: str, problems: Problems) -> Table:
    entries: dict[str, Data] = {}
    keys: dict[str, Mark] = {}
    for key_node, value_node in node.value:
        mark = _mark(source, key_node.start_mark)
        key = _key(key_node)
        below = f"{path}.{key}" if path else str(key)
        if not isinstance(key, str):
            problems.add(mark, path, "a key must be a word" + (f", not {key!r}" if key is not None else ""))
        elif key == "<<" and key_node.style is None:
            problems.add(mark, path, "merge keys (<<) are not used here; write the entries out")
        elif key in entries:
            problems.add(mark, below, f"the key {key!r} is already given in line {keys[key].line}")
        else:
            entries[key], keys[key] = _data(value_node, source, below, problems), mark
    return Table(entries, _mark(source, node.start_mark), keys)


def _key(node: Node) -> object:
    if not isinstance(node, ScalarNode):
        return None
    try:
        return node.value if node.style is not None else scalar(node.value)
    except ValueError:
        return None


def scalar(word: str) -> bool | int | float | str | None:
    """Returns what a plain word means in the YAML 1.2 core schema."""
    if word in _WORDS:
        return _WORDS[word]
    if _INT.fullmatch(word):
        # a long number is not converted: that alone can be slow, and newer Pythons refuse it
        number = int(word, 0 if word[:2] in ("0o", "0x") else 10) if len(word) <= 40 else HUGE
        if abs(number) >= HUGE:
            raise ValueError(f"the number {word[:24]}{'...' * (len(word) > 24)} is too large")
        return number
    if _FLOAT.fullmatch(word):
        value = float(word)
        if not math.isfinite(value):
            raise ValueError(f"the number {word[:24]} is too large")
        return value
    if _NOT_FINITE.fullmatch(word):
        raise ValueError(f"{word} is not a finite number")
    return word
