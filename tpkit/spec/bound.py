"""A description bound to one model's config.json: the module tree with every size known. Pure data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from tpkit.quant.stated import Stated

__all__ = ["BoundSpec", "Call", "Member", "Node", "Step", "Term"]

Kind = Literal["container", "repeat", "module", "projection", "norm", "parameter"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """``child(argument)`` in a forward step."""

    child: str
    argument: Step


@dataclass(frozen=True, kw_only=True)
class Term:
    """``factor * call``, or ``factor * x`` where `call` is None."""

    call: Call | None = None
    factor: float = 1.0


#: one step of a container's forward: ``x`` becomes the sum of the terms
Step = tuple[Term, ...]


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of the module tree.

    Attributes:
        name: its last component.
        path: its dotted path, which is also the stem of its tensors' names in the checkpoint.
        kind: what it is. A repeat has its copies "0", "1", ... as children.
        word: module type, style or norm word; "" for containers, repeats and parameters.
        role: its role in the module above; "" if that is no module.
        options: validated words (an `Options` model), None for containers and repeats.
        children: in written order.
        forward: a container's steps; None: its children run in order.
        where: position in the file, for messages.
        copies: a container or projection in a module stands for this many alike ones; None: for itself.
        stacked: the copies are one tensor on disk, of one dimension more; else each has its number in its name.
    """

    name: str
    path: str
    kind: Kind
    word: str = ""
    role: str = ""
    options: Any = None
    children: tuple[Node, ...] = ()
    forward: tuple[Step, ...] | None = None
    where: str = ""
    copies: int | None = None
    stacked: bool = False

    def members(self, prefix: str = "", copies: int | None = None) -> Iterator[Member]:
        """Yields what fills the roles of a module: its children, through containers, and parameters in projections.

        Args:
            prefix: dotted name of this node below the module.
            copies: of how many alike ones this node is one.
        """
        for child in self.children:
            name = f"{prefix}.{child.name}".lstrip(".")
            count = child.copies if copies is None else copies
            if child.kind != "container":
                yield Member(name=name, node=child, copies=count)
            if child.kind in ("container", "projection"):
                yield from child.members(name, count)

    def walk(self) -> Iterator[Node]:
        """Yields this node and all below it, in written order."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, kw_only=True)
class Member:
    """A node that fills a role of a module.

    Attributes:
        name: its dotted name below the module.
        node: the node.
        copies: of how many alike ones it is one, by its own word or a container's; None: it is a single one.
    """

    name: str
    node: Node
    copies: int | None


@dataclass(frozen=True, kw_only=True)
class BoundSpec:
    """A model description whose sizes are those of one config.json.

    Attributes:
        family: the description's name for the family.
        source: where the description came from, for messages.
        values: bound fields and derived names that do not depend on the layer.
        config: the raw config.json that was bound (the text model's part of it).
        root: the module tree; its path is "".
        ignore: patterns of tensors that may be there and are not used, numbers filled in.
        checkpoint: hub id of the description's example weights, if it names one.
        prefixes: ways the tree's paths may be found in a checkpoint: path -> path, identity first.
        quantization: everything that is said of the weights' quantisation, and who says it.
        folder: where config.json lies, if it was read from a file.
    """

    family: str
    source: str
    values: Mapping[str, Any]
    config: Mapping[str, Any]
    root: Node
    ignore: tuple[str, ...] = ()
    checkpoint: str | None = None
    prefixes: tuple[Mapping[str, str], ...] = field(default=({},))
    quantization: tuple[Stated, ...] = ()
    folder: Path | None = None

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that decides the model, equal wherever and whenever it is computed.

        Positions, file names and the hub id are no part of it; neither is what config.json says and nothing reads.
        """
        decides = {
            "family": self.family,
            "values": dict(self.values),
            "tree": _canonical(self.root),
            "ignore": self.ignore,
            "prefixes": [dict(prefix) for prefix in self.prefixes],
        }
        return sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def _canonical(node: Node) -> Any:
    options = node.options.model_dump(mode="json") if node.options is not None else None
    words = [node.name, node.path, node.kind, node.word, node.role, options, node.copies, node.stacked]
    return [*words, _steps(node.forward), [_canonical(child) for child in node.children]]


def _steps(forward: tuple[Step, ...] | None) -> Any:
    return None if forward is None else [_terms(step) for step in forward]


def _terms(step: Step) -> Any:
    return [[term.factor, term.call and [term.call.child, _terms(term.call.argument)]] for term in step]
