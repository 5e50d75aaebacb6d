"""Asks module types what they declare for a description's own defaults, to check parts and norms in all branches.

Which segments a projection has is known to its module type alone, and only for given sizes. The defaults are sizes.
Where they do not suffice nothing is said here: the same is checked again when the description is bound.
"""

from __future__ import annotations

from dataclasses import replace

from tpkit.errors import TpkitError, did_you_mean
from tpkit.modules import Child, Declared
from tpkit.spec.draft import Draft, members_in
from tpkit.spec.fields import Declarations
from tpkit.spec.parts import check_parts
from tpkit.spec.problems import Problems
from tpkit.spec.reading import ConfigReader
from tpkit.spec.roles import role_of
from tpkit.spec.scope import Values
from tpkit.spec.slots import Failed, values_of

__all__ = ["check_declared"]


def check_declared(root: Draft, declarations: Declarations, problems: Problems) -> None:
    """Notes parts and norm widths that a module type does not know, in all branches."""
    reader = ConfigReader({}, source="the defaults", prefix="", overrides={}, problems=Problems())
    values = Values(declarations, reader)
    values.enter(0)
    for draft in root.walk():
        if draft.kind != "module" or draft.plugin is None or not draft.plugin.roles:
            continue
        for _, child, _ in members_in(draft):
            role = role_of(child, draft.plugin.roles)
            if role is None:
                continue
            declared = _declared(draft, role.name, child, values)
            if declared is not None:
                _check(child, role.name, declared, problems)


def _declared(draft: Draft, role: str, child: Draft, values: Values) -> Declared | None:
    roles = draft.plugin.roles
    children = {
        found.name: Child(style=member.draft.word, copies=member.number(values))
        for member in members_in(draft)
        if member.draft.kind == "projection" and (found := role_of(member.draft, roles))
    }
    if child.kind == "projection":
        children[role] = replace(children[role], style=child.word)
    try:
        options = draft.options.model_validate(values_of(draft.words, values)) if draft.options else None
        declared: Declared = draft.plugin.declare(options, values.value("hidden_size"), children)
    except (Failed, TpkitError, ArithmeticError, LookupError, ValueError):
        return None
    return declared


def _check(child: Draft, role: str, declared: Declared, problems: Problems) -> None:
    sides = declared.sides.get(role)
    if child.kind == "projection" and sides is not None:
        check_parts(child, sides.out, declared.counts, problems)
    over = child.literal("over") if child.kind == "norm" else None
    if over is not None and declared.width(role, over) is None:
        known = ", ".join(declared.over) or "no width that a norm can go over"
        message = f"{over!r} is not known{did_you_mean(over, declared.over)}; the module around it offers: {known}"
        problems.add(child.table.entries["over"].mark, f"{child.where}.over", message)
