"""What a word of a description takes, read off the annotation of the field in its `Options` class."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tpkit.modules import Plain
from tpkit.spec.evaluate import Type, type_of

__all__ = ["ANYTHING", "CONDITION", "SlotType", "slot_type"]


@dataclass(frozen=True)
class SlotType:
    """What a word takes.

    Attributes:
        kinds: of int, float, flag, text, list, mapping, null.
        words: the only texts allowed, if there is such a list.
        nested: options of a nested mapping.
        element: type of the entries of a list.
        positive: numbers must be greater than 0.
        plain: data as it stands.
    """

    kinds: frozenset[str]
    words: tuple[str, ...] = ()
    nested: type[BaseModel] | None = None
    element: SlotType | None = None
    positive: bool = False
    plain: bool = False

    def __str__(self) -> str:
        if self.words:
            return f"one of: {', '.join(self.words)}"
        number = "positive " if self.positive else ""
        names = {
            "int": f"a {number}integer" if number else "an integer",
            "float": f"a {number}number",
            "flag": "true or false",
            "text": "text",
            "list": "a list",
            "mapping": "a mapping",
            "null": "null",
        }
        shown_kinds = [kind for kind in names if kind in self.kinds and (kind, "float" in self.kinds) != ("int", True)]
        return " or ".join(names[kind] for kind in shown_kinds) or "a mapping of its words"

    def refuses(self, value: Any) -> bool:
        """Tells whether a value is not of this type."""
        kind = type_of(value).kind
        if kind == "int" and "int" not in self.kinds:
            kind = "float"
        if kind not in self.kinds:
            return True
        if kind == "text":
            return bool(self.words) and value not in self.words
        return kind in ("int", "float") and self.positive and value <= 0

    def cannot_be(self, found: Type) -> bool:
        """Tells whether a value of which this much is known cannot be of this type."""
        if found.kind == "any" or (found.kind == "int" and "float" in self.kinds):
            return False
        if found.kind not in self.kinds:
            return True
        return bool(self.words and found.words) and not set(self.words) & set(found.words or ())


_SIMPLE = {
    int: "int",
    float: "float",
    bool: "flag",
    str: "text",
    dict: "mapping",
    list: "list",
    tuple: "list",
    Mapping: "mapping",
    Sequence: "list",
    type(None): "null",
}
ANYTHING = SlotType(frozenset(_SIMPLE.values()))
CONDITION = SlotType(frozenset({"flag", "int", "float", "null"}))


@lru_cache(maxsize=512)
def slot_type(model: type[BaseModel], word: str) -> SlotType:
    """Returns what a field of an `Options` class takes."""
    info: FieldInfo = model.model_fields[word]
    found = _of_annotation(info.annotation)
    above_0 = any(getattr(extra, "gt", None) == 0 for extra in info.metadata)
    bounded = any(hasattr(extra, bound) for extra in info.metadata for bound in ("gt", "ge"))
    return replace(
        found,
        positive=above_0 or ("int" in found.kinds and not bounded),
        plain=found.plain or any(isinstance(extra, Plain) for extra in info.metadata),
    )


def _of_annotation(annotation: Any) -> SlotType:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return replace(_of_annotation(arguments[0]), plain=any(isinstance(a, Plain) for a in arguments[1:]))
    if origin in (Union, types.UnionType):
        parts = [_of_annotation(argument) for argument in arguments]
        return SlotType(
            kinds=frozenset().union(*(part.kinds for part in parts)),
            words=tuple(word for part in parts for word in part.words),
            nested=next((part.nested for part in parts if part.nested), None),
            element=next((part.element for part in parts if part.element), None),
            plain=any(part.plain for part in parts),
        )
    if origin is Literal:
        return SlotType(frozenset({"text"}), words=tuple(str(argument) for argument in arguments))
    if origin is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return SlotType(frozenset(), nested=annotation)
    kind = _SIMPLE.get(origin or annotation)
    if kind is None:
        return ANYTHING
    inner = _of_annotation(arguments[0]) if kind == "list" and arguments else None
    element = replace(inner, positive="int" in inner.kinds) if inner else None
    return SlotType(frozenset({kind}), element=element)
