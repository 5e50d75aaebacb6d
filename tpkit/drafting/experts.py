"""Recognises a mixture of experts by names and shapes, and writes it; how its router weighs them is asked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tpkit.drafting.fields import Fields
from tpkit.drafting.mlp import Kind, mlp_node
from tpkit.drafting.names import Group, Shape
from tpkit.drafting.parts import Tree, flow, is_mlp
from tpkit.drafting.routing import routing_words
from tpkit.drafting.vocabulary import BUFFERS, CORRECTION, DOWN, GATE, GATE_UP, ROUTER, UP

__all__ = ["DENSE", "is_moe", "moe_node"]

#: a dense feed-forward in a model that has experts too
DENSE = Kind("the dense feed-forward", ("intermediate_size", "dense_intermediate_size"))
_WIDTHS = ("moe_intermediate_size", "intermediate_size")
_SHARED = Kind("shared experts", ("shared_expert_intermediate_size", "n_shared_experts * moe_intermediate_size",
                                  "moe_intermediate_size", "intermediate_size"))  # fmt: skip
#: with a number for each expert this is one that is added, not one that multiplies
_BIAS = re.compile(r"bias|correct", re.IGNORECASE)
_PROJECTIONS = frozenset((*GATE, *UP, *GATE_UP, *DOWN))


@dataclass(frozen=True)
class _Experts:
    """Experts in a module.

    Attributes:
        one: the projections of one of them.
        name: the container around them; "": the module itself.
        count: how many there are; None: it is not known.
        stacked: all are in one tensor.
        bare: whose name has no ``.weight``.
    """

    one: Group
    name: str
    count: int | None
    stacked: bool = False
    bare: bool = False

    def holds(self, path: str) -> bool:
        """Tells whether a module below belongs to the experts."""
        first = path.split(".")[0]
        return first == self.name or (not self.name and first in self.one.children)


def is_moe(group: Group) -> bool:
    """Tells whether experts lie directly below, numbered or stacked."""
    return _experts(group) is not None


def _experts(group: Group) -> _Experts | None:
    for name, child in group.children.items():
        if child.repeat and is_mlp(Group(name, child.children)):
            return _Experts(Group(name, child.children, child.tensors), name, child.repeat)
        if (stack := _stack(child, name)) is not None:
            return stack
    return _stack(group, "")


def _stack(group: Group, name: str) -> _Experts | None:
    """Returns experts whose projections have one dimension more, or are bare where shapes are unknown."""
    bare = {last: shape for last, shape in group.tensors.items() if last.lower() in _PROJECTIONS and _deep(shape, True)}
    modules = {
        below: child.weight
        for below, child in group.children.items()
        if child.is_leaf and _deep(child.weight, "expert" in name or _chooses(group))
    }
    found = bare or modules
    one = Group(name)
    for below, shape in found.items():
        biased = f"{below}_bias" in group.tensors if bare else group.children[below].has_bias
        inner = Group(below, tensors={"weight": shape[1:] if shape else None, **({"bias": None} if biased else {})})
        one.children[below] = inner
    if not is_mlp(one):
        return None
    return _Experts(one, name, next((shape[0] for shape in found.values() if shape), None), True, bool(bare))


def _deep(shape: Shape, else_: bool) -> bool:
    return else_ if shape is None else len(shape) == 3


def _chooses(group: Group) -> bool:
    return any("router" in name.lower() for name in group.children)


def moe_node(group: Group, fields: Fields, hidden: int | None) -> Tree:
    """Returns the node of a module in which `is_moe` found experts."""
    found = _experts(group)
    if found is None:
        raise ValueError(f"{group.name} has no experts")
    fields.size("num_experts", found.count)
    experts = _projections(found, fields, hidden)
    parts = _Parts(group, found, found.count or fields.count("num_experts", None))
    node: Tree = {"module": "moe", **({"width": experts.pop("width")} if "width" in experts else {})}
    node["activation"] = experts.pop("activation")
    node["routing"] = routing_words(fields, correction=next(iter(parts.correction), ""), router=parts.router)
    if not parts.router:
        fields.ask(f"{group.name}: no router was recognised among {', '.join(group.children)}")
    for path, leaf in parts.leaves.items():
        if path == parts.router:
            bias = "bias: true" if leaf.has_bias else ""
            _put(node, path, flow(_role(path, "router"), "style: replicated", bias))
        elif path == parts.shared_gate:
            fields.ask(f"{path}: taken for a gate of the shared experts, which goes through a sigmoid")
            _put(node, path, flow(_role(path, "shared_gate"), "style: replicated"))
    for path in parts.correction:
        words = (_role(path, "correction_bias"), "parameter: [num_experts]", "dtype: float32")
        _put(node, path, flow(*words))
    if found.name:
        node[found.name] = {"stacked" if found.stacked else "repeat": "num_experts", **experts}
    else:
        node |= experts
    if parts.shared:
        shared = mlp_node(group.children[parts.shared], fields, hidden, _SHARED)
        node[parts.shared] = {**({"role": "shared"} if parts.shared != "shared" else {}), **shared}
    if parts.rest:
        fields.ask(f"{group.name}: not understood and left out: {', '.join(parts.rest)}")
    return node


def _projections(found: _Experts, fields: Fields, hidden: int | None) -> Tree:
    """Returns the projections of an expert, with its width and activation."""
    also = ["stacked: num_experts"] if found.stacked and not found.name else []
    also += ["bare: true"] if found.bare else []
    node = mlp_node(found.one, fields, hidden, Kind("an expert", _WIDTHS, found.stacked, ", ".join(also)))
    del node["module"]
    if found.count is None:
        fields.ask("num_experts: how many experts are stacked is known from config.json alone")
    return node


def _role(path: str, role: str) -> str:
    return "" if path.rpartition(".")[2] == role else f"role: {role}"


def _put(node: Tree, path: str, words: str) -> None:
    """Puts a node where its path says; in a node in one line it becomes a child of it."""
    *above, last = path.split(".")
    for name in above:
        at = node.setdefault(name, {})
        if isinstance(at, str):
            at = dict(word.split(": ", 1) for word in at.strip("{}").split(", "))
            node[name] = at
        node = at
    node[last] = words


class _Parts:
    """What lies beside the experts.

    Attributes:
        leaves: weights' modules, by their path in the module.
        router: the path of the one with a row for each expert; "": there is none.
        shared: the name of a feed-forward.
        shared_gate: the path of a weight of one row.
        correction: the path of a number for each expert, alone in a list; empty: there is none.
        rest: what is none of these.
    """

    def __init__(self, group: Group, experts: _Experts, count: int | None) -> None:
        outside = [(path, child) for path, child in group.walk() if not experts.holds(path) and "*" not in path]
        mlps = [name for name, child in group.children.items() if not experts.holds(name) and is_mlp(child)]
        self.shared = next(iter(mlps), "")
        outside = [(path, child) for path, child in outside if path.split(".")[0] != self.shared or not self.shared]
        self.leaves = {path: child for path, child in outside if child.is_leaf}
        gates = [path for path, leaf in self.leaves.items() if _rows(leaf) in (None, 1) and "shared" in path.lower()]
        self.shared_gate = next((path for path in gates if ROUTER.search(path)), "") if self.shared else ""
        routers = [p for p, leaf in self.leaves.items() if p != self.shared_gate and _rows(leaf) in (None, count)]
        self.router = next((path for path in routers if ROUTER.search(path)), next(iter(routers), ""))
        loose = list(_loose(group, outside, experts))
        self.correction = [path for path, shape in loose if _corrects(path, shape, count)][:1]
        kept = {self.router, self.shared_gate, *self.correction}
        self.rest = [path for path in (*self.leaves, *(path for path, _ in loose)) if path not in kept]


def _rows(leaf: Group) -> int | None:
    shape = leaf.weight
    return None if shape is None else shape[0] if len(shape) == 2 else 0


def _loose(group: Group, outside: list[tuple[str, Group]], experts: _Experts) -> Iterator[tuple[str, Shape]]:
    """Yields the tensors beside and below the experts' siblings that are no weight and no bias of one."""
    for path, each in [("", group), *outside]:
        for last, shape in each.tensors.items():
            of_stack = path == "" and experts.holds(last.removesuffix("_bias"))
            if not of_stack and last not in BUFFERS and (last not in ("weight", "bias") or not each.is_leaf):
                yield f"{path}.{last}".lstrip("."), shape


def _corrects(path: str, shape: Shape, count: int | None) -> bool:
    return bool(CORRECTION.search(path)) if shape is None else shape == (count,) and bool(_BIAS.search(path))
