"""Which child of a module fills which of its roles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tpkit.errors import did_you_mean
from tpkit.modules import Role
from tpkit.spec.draft import Draft, Member, members_in
from tpkit.spec.problems import Problems

__all__ = ["active_roles", "check_roles", "role_of"]


def role_of(draft: Draft, roles: Sequence[Role]) -> Role | None:
    """Returns the role of a child: by its ``role:``, else its name, else its style if one role alone takes that."""
    by_name = {role.name: role for role in roles}
    if draft.role is not None:
        return by_name.get(draft.role)
    if draft.name in by_name:
        return by_name[draft.name]
    takers = [role for role in roles if draft.kind == "projection" and draft.word in role.styles]
    return takers[0] if len(takers) == 1 else None


def check_roles(draft: Draft, problems: Problems) -> None:
    """Notes children of a module that have no role or the wrong style for it, and roles that nobody fills."""
    roles: tuple[Role, ...] = tuple(draft.plugin.roles)
    taken: dict[str, list[Draft]] = {}
    alone: dict[str, list[str]] = {}
    for name, child, _ in members_in(draft):
        role = role_of(child, roles)
        if role is None:
            _no_role(draft, child, roles, problems)
            continue
        taken.setdefault(role.name, []).append(child)
        if child.when is None:
            alone.setdefault(role.name, []).append(name)
        _check_fit(draft, child, role, problems)
    for role in roles:
        if role.required and role.name not in taken:
            styles = f" of style {' or '.join(role.styles)}" if role.styles else ""
            message = f"module {draft.word!r} needs a child for its role {role.name!r}{styles}"
            problems.add(draft.mark, draft.where, message)
        names = [member.name for member in members_in(draft)]
        _doubled(draft, role.name, [n for n in alone.get(role.name, ()) if names.count(n) == 1], problems)


def _no_role(draft: Draft, child: Draft, roles: Sequence[Role], problems: Problems) -> None:
    names = [role.name for role in roles]
    if child.role is not None:
        mark, word = child.table.entries["role"].mark, child.role
    else:
        mark = draft.table.key_mark(child.name) if child.name in draft.children else child.mark
        word = child.name
    offered = ", ".join(names) or "it takes no children"
    message = f"module {draft.word!r} has no role for {word!r}{did_you_mean(word, names)}; its roles: {offered}"
    problems.add(mark, child.where, message)


def _check_fit(draft: Draft, child: Draft, role: Role, problems: Problems) -> None:
    if child.kind in ("projection", "module") and child.plugin is None:
        return  # an unknown word has been noted already
    if child.kind == "container" and not child.children:
        return  # so has a node that is nothing
    if role.module and child.kind == "module":
        if role.styles and child.word not in role.styles:
            message = f"the role {role.name!r} of module {draft.word!r} takes module {' or '.join(role.styles)}"
            problems.add(child.mark, child.where, f"{message}, not {child.word!r}")
    elif role.styles and not role.module and child.word not in role.styles:
        found = f"style {child.word!r}" if child.kind == "projection" else f"a {child.kind}"
        message = f"the role {role.name!r} of module {draft.word!r} takes style {' or '.join(role.styles)}, not {found}"
        problems.add(child.mark, child.where, message)
    elif (role.module or not role.styles) and child.kind not in (("module",) if role.module else ("norm", "parameter")):
        needed = "a module" if role.module else "a norm or a parameter"
        message = f"the role {role.name!r} of module {draft.word!r} takes {needed}, not a {child.kind}"
        problems.add(child.mark, child.where, message)


def _doubled(draft: Draft, role: str, names: Iterable[str], problems: Problems) -> None:
    found = sorted(names)
    if len(found) > 1:
        message = f"the role {role!r} of module {draft.word!r} is filled {len(found)} times: {', '.join(found)}"
        problems.add(draft.mark, draft.where, message)


def active_roles(draft: Draft, active: Sequence[Member], problems: Problems) -> dict[str, str]:
    """Returns dotted name -> role for the members that are there, and notes roles missing or filled twice."""
    roles: tuple[Role, ...] = tuple(draft.plugin.roles) if draft.plugin is not None else ()
    found = {name: role.name for name, child, _ in active if (role := role_of(child, roles)) is not None}
    for role in roles:
        names = [name for name, filled in found.items() if filled == role.name]
        _doubled(draft, role.name, names, problems)
        if role.required and not names:
            message = f"module {draft.word!r} has no child in its role {role.name!r} for this config.json"
            problems.add(draft.mark, draft.where, message)
    return found
