"""YAML 1.2 scalars with positions, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpkit.errors import SpecError
from tpkit.spec.data import Mark, Table, from_python, locate, to_python
from tpkit.spec.yaml12 import read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1.5", 1.5),
        (".5", 0.5),
        ("6.", 6.0),
        ("-3", -3),
        ("+3", 3),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("2024-01-02", "2024-01-02"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("''", ""),
        ("'<<'", "<<"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    found = to_python(read_yaml(f"key: {text}", "d.yaml"))["key"]
    assert found == value
    assert type(found) is type(value)


@given(st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_comes_back(number: float) -> None:
    found = to_python(read_yaml(f"key: {number!r}", "d.yaml"))["key"]
    assert found == number
    assert type(found) is type(number)


def test_keys_and_values_know_where_they_are() -> None:
    data = read_yaml("a:\n  b: {c: 1, d: [x, y]}\n", "d.yaml")
    assert isinstance(data, Table)
    assert str(locate(data, ["a", "b", "c"])) == "d.yaml:2:10"
    assert str(locate(data, ["a", "b", "c"], key=True)) == "d.yaml:2:7"
    assert str(locate(data, ["a", "b", "d", 1])) == "d.yaml:2:20"
    assert str(locate(data, ["a", "nowhere"])) == "d.yaml:2:3"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3", "d.yaml:3:1: a: the key 'a' is already given in line 1"),
        ("a: &x 1", "d.yaml:1:4: anchors (&) and aliases (*) are not used here; write the value out"),
        ("a: *x", "d.yaml:1:4: anchors (&) and aliases (*) are not used here; write the value out"),
        (
            "a: !!python/object:os.system 1",
            "d.yaml:1:4: tags are not used here: tag:yaml.org,2002:python/object:os.system",
        ),
        ("a: !x 1", "d.yaml:1:4: tags are not used here: !x"),
        ("a:\n  <<: {b: 1}", "d.yaml:2:3: a: merge keys (<<) are not used here; write the entries out"),
        ("1: a", "d.yaml:1:1: a key must be a word, not 1"),
        ("true: a", "d.yaml:1:1: a key must be a word, not True"),
        ("[a]: b", "d.yaml:1:1: a key must be a word"),
        ("a: .inf", "d.yaml:1:4: a: .inf is not a finite number"),
        ("a: .nan", "d.yaml:1:4: a: .nan is not a finite number"),
        ("a: 1e999", "d.yaml:1:4: a: the number 1e999 is too large"),
        ("a: " + "9" * 5000, f"d.yaml:1:4: a: the number {'9' * 24}... is too large"),
        ("a: b: c", "d.yaml:1:5: mapping values are not allowed here"),
        ("a: [1", "d.yaml:1:6: while parsing a flow sequence expected ',' or ']', but got '<stream end>'"),
        ("a: 1\n---\nb: 2", "d.yaml:2:1: expected a single document in the stream but found another document"),
    ],
)
def test_refused_with_its_position(text: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_yaml(text, "d.yaml")
    assert caught.value.problems == (problem,)


def test_all_bad_keys_are_found_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        read_yaml("a: 1\na: 2\nb: {c: 1, c: 2}\n<<: 3", "d.yaml")
    assert [line.split(": ")[0] for line in caught.value.problems] == ["d.yaml:2:1", "d.yaml:3:11", "d.yaml:4:1"]


@pytest.mark.parametrize("text", ["[" * 20_000, "a: " + "{a: " * 5000, "a: " + "x" * 2_000_000, "\x00", ""])
def test_hostile_text_ends_in_an_error(text: str) -> None:
    with pytest.raises(SpecError):
        read_yaml(text, "d.yaml")


def test_python_data_has_no_positions() -> None:
    data = from_python({"a": [1, {"b": None}]}, Mark("here"))
    assert to_python(data) == {"a": [1, {"b": None}]}
    assert str(locate(data, ["a", 1, "b"])) == "here"


@pytest.mark.parametrize("value", [{1: 2}, {"a": object()}, {"a": {1, 2}}, {"a": b"x"}])
def test_only_plain_data_is_taken(value: Any) -> None:
    with pytest.raises(SpecError):
        from_python(value, Mark("here"))
