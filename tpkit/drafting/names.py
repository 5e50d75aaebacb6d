"""Names of tensors as a tree of modules: numbered children become one repeated template."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["Group", "Shape", "grouped"]

#: None: only the name is known
Shape = tuple[int, ...] | None

#: last components that stand for the weight of a quantised module: its shape is not the weight's
_QUANTISED = frozenset(
    [
        "qweight",
        "qzeros",
        "scales",
        "g_idx",
        "weight_packed",
        "weight_scale",
        "weight_scale_inv",
        "weight_scale_2",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "input_scale",
        "absmax",
        "quant_map",
        "SCB",
    ]
)
_PLAIN = ("weight", "bias")
_DIGITS = re.compile(r"[0-9]+")


@dataclass
class Group:
    """A module by its name: tensors of its own, and what lies below.

    Attributes:
        name: its last component; "" for the root.
        children: by name; of a repeat, those of its template.
        tensors: its own, by last component.
        repeat: how many copies of the template there are; 0: it is no repeat.
    """

    name: str
    children: dict[str, Group] = field(default_factory=dict)
    tensors: dict[str, Shape] = field(default_factory=dict)
    repeat: int = 0

    @property
    def is_leaf(self) -> bool:
        """Tells whether it is a weight's module."""
        return "weight" in self.tensors and not self.children and not self.repeat

    @property
    def weight(self) -> Shape:
        """The shape of its weight, if it is known."""
        return self.tensors.get("weight")

    @property
    def has_bias(self) -> bool:
        """Tells whether it has a bias."""
        return "bias" in self.tensors

    def walk(self, path: str = "") -> Iterator[tuple[str, Group]]:
        """Yields everything below with its path; ``*`` stands for the number of a repeat."""
        for child in self.children.values():
            below = ".".join(part for part in (path, "*" if self.repeat else "", child.name) if part)
            yield below, child
            yield from child.walk(below)


def grouped(tensors: Mapping[str, Shape], ask: Callable[[str], None]) -> Group:
    """Returns the tree of modules that names of tensors make.

    Args:
        tensors: shapes by name.
        ask: takes what is not as expected.
    """
    root = Group("")
    for name, shape in tensors.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            at = at.children.setdefault(part, Group(part))
        if last in _QUANTISED:
            at.tensors["weight"] = None
        elif last in _PLAIN:
            at.tensors.setdefault(last, shape)
        else:
            at.tensors[last] = shape
    _fold(root, "", ask)
    return root


def _fold(group: Group, path: str, ask: Callable[[str], None]) -> None:
    for child in group.children.values():
        _fold(child, f"{path}.{child.name}" if path else child.name, ask)
    names = list(group.children)
    if not names or not all(_DIGITS.fullmatch(name) for name in names):
        return
    numbers = sorted(map(int, names))
    if numbers != list(range(len(numbers))):
        ask(f"{path} has numbers {numbers[0]} to {numbers[-1]}, but {len(numbers)} of them: a repeat counts from 0")
    copies = [group.children[str(number)] for number in numbers if str(number) in group.children]
    template = Group("*")
    for copy in copies:
        _merge(template, copy)
    _ask_differing(template, copies, path, ask)
    group.children, group.repeat = template.children, len(names)
    group.tensors |= template.tensors


def _merge(into: Group, other: Group) -> None:
    for last, shape in other.tensors.items():
        into.tensors.setdefault(last, shape)
    into.repeat = max(into.repeat, other.repeat)
    for name, child in other.children.items():
        _merge(into.children.setdefault(name, Group(name)), child)


def _ask_differing(template: Group, copies: list[Group], path: str, ask: Callable[[str], None]) -> None:
    """Asks about modules that some copies have and others have not, or of which shapes differ."""
    seen = [{below: child.weight for below, child in copy.walk()} for copy in copies]
    for below, child in template.walk():
        have = [number for number, found in enumerate(seen) if below in found]
        if len(have) < len(copies):
            where = ", ".join(map(str, have[:6])) + (", ..." if len(have) > 6 else "")
            ask(f"only {len(have)} of {len(copies)} copies of {path} have {below} ({where}): say `when:` it is there")
        elif len({found[below] for found in seen}) > 1:
            ask(f"{path}.*.{below} differs in shape from copy to copy, e.g. {list(child.weight or ())}")
