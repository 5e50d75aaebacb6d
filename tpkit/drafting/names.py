"""Names of tensors as a tree of modules: numbered children become one repeated template."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["Group", "Shape", "ask_differing", "grouped", "merged"]

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
#: a bare tensor stored as blocks of codes and their scales
_PACKED = re.compile(r"(.+)_(?:blocks|scales)")
_DIGITS = re.compile(r"[0-9]+")


@dataclass
class Group:
    """A module by its name: tensors of its own, and what lies below.

    Attributes:
        name: its last component; "" for the root.
        children: by name; of a repeat, those of its template.
        tensors: its own, by last component.
        repeat: how many copies of the template there are; 0: it is no repeat.
        copies: the copies of a repeat, each called by its number.
        beyond: numbers of further copies that are something else, so no part of the repeat.
    """

    name: str
    children: dict[str, Group] = field(default_factory=dict)
    tensors: dict[str, Shape] = field(default_factory=dict)
    repeat: int = 0
    copies: list[Group] = field(default_factory=list, repr=False)
    beyond: list[int] = field(default_factory=list)

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


def grouped(tensors: Mapping[str, Shape], layers: int | None, ask: Callable[[str], None]) -> Group:
    """Returns the tree of modules that names of tensors make.

    Args:
        tensors: shapes by name.
        layers: how many layers config.json says there are.
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
        elif packed := _PACKED.fullmatch(last):
            at.tensors[packed[1]] = None
        else:
            at.tensors[last] = shape
    _fold(root, "", layers, ask)
    return root


def _fold(group: Group, path: str, layers: int | None, ask: Callable[[str], None]) -> None:
    for child in group.children.values():
        _fold(child, f"{path}.{child.name}" if path else child.name, layers, ask)
    names = list(group.children)
    if not names or not all(_DIGITS.fullmatch(name) for name in names):
        return
    numbers = sorted(map(int, names))
    if numbers != list(range(len(numbers))):
        ask(f"{path} has numbers {numbers[0]} to {numbers[-1]}, but {len(numbers)} of them: a repeat counts from 0")
    copies = [group.children[str(number)] for number in numbers if str(number) in group.children]
    outermost = not any(_DIGITS.fullmatch(part) for part in path.split("."))
    group.beyond = _beyond(copies, layers) if outermost else []
    if group.beyond:
        ask(f"{path}.{group.beyond[0]} and later have parts that the {layers} layers of config.json have not: ignored")
    group.copies = copies[: len(copies) - len(group.beyond)]
    template = merged(group.copies)
    if not outermost:
        # of the outermost repeat they are asked about where it is written, without those that a choice covers
        ask_differing(template, group.copies, path, ask)
    group.children, group.repeat = template.children, len(names) - len(group.beyond)
    group.tensors |= template.tensors


def _beyond(copies: list[Group], layers: int | None) -> list[int]:
    """Returns the numbers of copies after the last layer that hold what no layer does: they predict further tokens."""
    if layers is None or not 0 < layers < len(copies):
        return []
    within = {path for copy in copies[:layers] for path, _ in copy.walk()}
    other = all(any(path not in within for path, _ in copy.walk()) for copy in copies[layers:])
    return list(range(layers, len(copies))) if other else []


def merged(copies: list[Group]) -> Group:
    """Returns the template of copies: what any of them has."""
    template = Group("*")
    for copy in copies:
        _merge(template, copy)
    return template


def _merge(into: Group, other: Group) -> None:
    for last, shape in other.tensors.items():
        into.tensors.setdefault(last, shape)
    into.copies = into.copies or other.copies
    into.repeat = max(into.repeat, other.repeat)
    for name, child in other.children.items():
        _merge(into.children.setdefault(name, Group(name)), child)


def ask_differing(template: Group, copies: list[Group], path: str, ask: Callable[[str], None]) -> None:
    """Asks about modules that some copies have and others have not, or of which shapes differ."""
    seen = [{below: (child.weight, child.repeat) for below, child in copy.walk()} for copy in copies]
    told: dict[str, list[str]] = {}
    for below, child in template.walk():
        have = [copy.name for copy, found in zip(copies, seen, strict=True) if below in found]
        if len(have) < len(copies):
            told[below] = have
            if told.get(below.rpartition(".")[0]) == have:  # with the module around it, which was asked about
                continue
            where = ", ".join(have[:6]) + (", ..." if len(have) > 6 else "")
            ask(f"only {len(have)} of {len(copies)} copies of {path} have {below} ({where}): say `when:` it is there")
        elif len({found[below] for found in seen}) > 1:
            example = f"{child.repeat} of them" if child.repeat else list(child.weight or ())
            ask(
                f"{path}.*.{below} differs in {'number' if child.repeat else 'shape'} from copy to copy, e.g. {example}"
            )
