"""What can be known to be wrong with a tree as a whole, in all its branches: roles, forwards, ties, ignored tensors."""

from __future__ import annotations

from collections.abc import Iterator

from tpkit.errors import did_you_mean
from tpkit.spec.draft import Draft, children_in
from tpkit.spec.expr import StepExpr
from tpkit.spec.parts import check_style
from tpkit.spec.problems import Problems
from tpkit.spec.roles import check_roles
from tpkit.spec.words import Tied
from tpkit.tables import Embedding

__all__ = ["check_tree"]


def check_tree(root: Draft, problems: Problems) -> None:
    """Notes what is wrong with a tree, whichever branches a config.json will take."""
    embeddings = dict(_embeddings(root, ""))
    _check_places(root, None, problems)
    for draft in root.walk():
        if draft.kind == "container":
            _check_container(draft, problems)
        elif draft.kind == "module" and draft.plugin is not None:
            check_roles(draft, problems)
            if draft.repeat is not None and issubclass(draft.plugin, Embedding):
                problems.add(draft.mark, f"{draft.where}.repeat", "a table of tokens is looked up once")
        elif draft.kind == "projection":
            check_style(draft, problems)
            _check_tie(draft, embeddings, problems)


def _check_places(draft: Draft, module: Draft | None, problems: Problems) -> None:
    """Projections get their sizes from the module around them, but for a head and those that are given sizes."""
    module = draft if draft.kind == "module" else module if draft.kind in ("container", "projection") else None
    for child in children_in(draft):
        _check_places(child, module, problems)
        if module is not None:
            _check_copies(child, draft is module, problems)
            continue
        if child.stacked is not None:
            problems.add(child.mark, f"{child.where}.stacked", "only a module has parts that are stacked: experts")
        placed = child.word == "vocab" or {"in_features", "out_features"} <= set(child.table.entries)
        if child.kind == "projection" and child.plugin is not None and not placed:
            message = (
                f"style {child.word!r} needs a module around it that says how large it is, or in_features and "
                "out_features"
            )
            problems.add(child.mark, child.where, message)
        if child.kind == "norm" and "over" in child.table:
            mark = child.table.entries["over"].mark
            problems.add(mark, f"{child.where}.over", "only a norm in a module goes over something of the module's")
        if child.role is not None:
            mark = child.table.entries["role"].mark
            problems.add(mark, f"{child.where}.role", "only children of a module have roles")


def _check_copies(child: Draft, outer: bool, problems: Problems) -> None:
    """Copies in a module, experts, are bound once: they are alike, and there is one count of them."""
    twice = child.repeat is not None and child.stacked is not None
    misplaced = child.repeat is not None and child.kind != "container"
    if twice or misplaced or (not outer and (child.repeat or child.stacked)):
        message = "say once how many there are: repeat or stacked, on the container or on a projection"
        problems.add(child.mark, child.where, message)
    if child.kind == "container" and child.steps is not None:
        problems.add(child.mark, f"{child.where}.forward", "the module around it says what happens here")


def _check_container(draft: Draft, problems: Problems) -> None:
    if not draft.children and set(draft.table.entries) <= {"when", "role", "inline", "repeat", "forward", "stacked"}:
        message = "has nothing in it: it needs children, or module, parameter, style or norm"
        problems.add(draft.mark, draft.where, message)
    if draft.steps is None:
        return
    used: set[str] = set()
    for step in draft.steps:
        for child, col in _calls(step.parts):
            used.add(child)
            if child not in draft.children:
                guess = did_you_mean(child, draft.children)
                problems.add(step.mark.moved(col), step.path, f"there is no child {child!r}{guess}")
    if not draft.steps:
        return
    for child in draft.children:
        if child not in used:
            message = "no step of forward uses it" + did_you_mean(child, used - set(draft.children))
            problems.add(draft.table.key_mark(child), f"{draft.where}.{child}", message)


def _calls(parts: StepExpr) -> Iterator[tuple[str, int]]:
    for part in parts:
        if part.child is not None:
            yield part.child, part.col
        yield from _calls(part.argument)


def _embeddings(draft: Draft, path: str) -> Iterator[tuple[str, Draft]]:
    for child in children_in(draft):
        below = path if child.inline else f"{path}.{child.name}".lstrip(".")
        if isinstance(child.plugin, type) and issubclass(child.plugin, Embedding):
            yield below, child
        yield from _embeddings(child, below)


def _check_tie(draft: Draft, embeddings: dict[str, Draft], problems: Problems) -> None:
    slot = draft.words.get("tied")
    if slot is None or "tied" not in draft.table:
        return
    mark, where = draft.table.entries["tied"].mark, f"{draft.where}.tied"
    if draft.word != "vocab":
        problems.add(mark, where, f"only a head (style 'vocab') is tied to an embedding, not style {draft.word!r}")
        return
    for target in _targets(slot):
        if target not in embeddings:
            known = ", ".join(embeddings) or "none"
            message = f"no embedding {target!r}{did_you_mean(target, embeddings)}; there is: {known}"
            problems.add(mark, f"{where}.to", message)


def _targets(slot: object) -> Iterator[str]:
    """Yields what a ``tied:`` may name, in all its cases."""
    for _, case in getattr(slot, "cases", ()):
        yield from _targets(case)
    literal = getattr(getattr(slot, "words", {}).get("to"), "literal", None)
    if isinstance(literal, str) and getattr(slot, "model", None) is Tied:
        yield literal
