"""Expands drafts into bound nodes: choices taken, repeats written out, every word evaluated and validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from tpkit.errors import TpkitError
from tpkit.modules import Child, Declared
from tpkit.spec.bound import Call, Node, Step, Term
from tpkit.spec.draft import Draft, Member, StepDraft, members_in
from tpkit.spec.expr import Name, Number, StepExpr
from tpkit.spec.parts import check_parts, norm_width
from tpkit.spec.problems import told
from tpkit.spec.roles import active_roles
from tpkit.spec.scope import Values
from tpkit.spec.slots import Failed, Slot, values_of

__all__ = ["Expander"]

#: no model has as many layers or experts; a mistyped number would fill the memory
MAX_COPIES = 10_000


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a node stands in a module.

    Attributes:
        declared: what the module declared; None if it could not.
        roles: dotted name below the module -> role.
        prefix: dotted name of the container or projection around the node, below the module.
        copies: that is one of this many alike ones.
    """

    declared: Declared | None
    roles: Mapping[str, str]
    prefix: str = ""
    copies: int | None = None

    def role(self, name: str) -> str:
        return self.roles.get(_below(self.prefix, name), "")


class Expander:
    """Binds one tree. What does not depend on the layer is bound once.

    Args:
        values: of the declared names.
        layered: the names that differ by layer.
    """

    def __init__(self, values: Values, layered: frozenset[str]) -> None:
        self.values, self.layered = values, layered
        self.problems = values.problems
        self._options: dict[int, Any] = {}
        self._checked: set[Any] = set()

    def tree(self, root: Draft) -> Node:
        """Returns the bound root."""
        return self._single(root, "", "", None)

    def _node(self, draft: Draft, name: str, path: str, place: _Place | None) -> Node:
        if draft.repeat is not None and place is None:
            return self._repeated(draft, name, path)
        return self._single(draft, name, path, place)

    def _repeated(self, draft: Draft, name: str, path: str) -> Node:
        outermost = self.values.layer is None
        copies = []
        for index in range(self._count(draft.repeat, f"{draft.where}.repeat", draft) or 0):
            if outermost:
                self.values.enter(index)
            copies.append(self._single(draft, str(index), _below(path, str(index)), None))
        if outermost:
            self.values.enter(None)
        return Node(name=name, path=path, kind="repeat", children=tuple(copies), where=str(draft.mark))

    def _count(self, slot: Slot | None, where: str, draft: Draft) -> int | None:
        if slot is None:
            return None
        try:
            count: int = slot.value(self.values)
        except Failed:
            return 0
        if count > MAX_COPIES:
            self.problems.add(draft.mark, where, f"{count} copies; more than {MAX_COPIES} are taken for a mistake")
            return 0
        return count

    def _copies(self, draft: Draft, place: _Place | None) -> int | None:
        """Returns of how many alike ones a node in a module is one: experts are not written out."""
        if place is None:
            return None
        word = "stacked" if draft.stacked is not None else "repeat"
        return self._count(draft.stacked or draft.repeat, f"{draft.where}.{word}", draft)

    def _single(self, draft: Draft, name: str, path: str, place: _Place | None) -> Node:
        role = place.role(draft.name) if place is not None else ""
        copies = self._copies(draft, place)
        options = self._bound_options(draft, role, place.declared if place else None)
        active = self._active(draft)
        if draft.kind == "module":
            inner = self._place(draft, options)
        elif place is not None:
            inner = replace(place, prefix=_below(place.prefix, draft.name))
        else:
            inner = None
        children = []
        for child in active:
            below = path if child.inline else _below(path, child.name)
            children.append(self._node(child, child.name, below, inner))
        return Node(
            name=name,
            path=path,
            kind=draft.kind,
            word=draft.word,
            role=role,
            options=options,
            children=tuple(children),
            forward=self._forward(draft, active),
            where=str(draft.mark),
            copies=copies,
            stacked=draft.stacked is not None,
        )

    def _place(self, draft: Draft, options: Any) -> _Place:
        members = list(members_in(draft, self._active))
        roles = active_roles(draft, members, self.problems)
        return _Place(declared=self._declared(draft, options, members, roles), roles=roles)

    def _active(self, draft: Draft) -> list[Draft]:
        found = []
        for branches in draft.children.values():
            for branch in branches:
                try:
                    holds = branch.when is None or branch.when.holds(self.values)
                except Failed:
                    holds = False
                if holds:
                    found.append(branch)
                    break
        return found

    def _bound_options(self, draft: Draft, role: str, declared: Declared | None) -> Any:
        if draft.options is None:
            return None
        names = frozenset().union(*(slot.names for slot in draft.words.values()))
        fixed = not names & self.layered and (draft.kind != "norm" or declared is None)
        if fixed and id(draft) in self._options:
            return self._options[id(draft)]
        options = self._evaluate(draft, role, declared)
        if fixed:
            self._options[id(draft)] = options
        return options

    def _evaluate(self, draft: Draft, role: str, declared: Declared | None) -> Any:
        try:
            found = values_of(draft.words, self.values)
        except Failed:
            return None
        if draft.kind == "norm" and found.get("size") is None:
            found["size"] = norm_width(draft, role, found.get("over"), self.values, declared)
        try:
            return draft.options.model_validate(found) if draft.options else None
        except ValidationError as error:
            self.problems.add_validation(error, draft.table, draft.where, draft.options)  # type: ignore[arg-type]
            return None

    def _declared(self, draft: Draft, options: Any, members: list[Member], roles: Mapping[str, str]) -> Declared | None:
        """Asks a module type what it declares for these options, and checks the projections against it."""
        if options is None or draft.plugin is None:
            return None
        projections = [m for m in members if m.draft.kind == "projection" and m.name in roles]
        needed = {role.name for role in draft.plugin.roles if role.required}
        if not needed <= set(roles.values()):
            return None
        copies = {member.name: member.number(self.values) for member in projections}
        children = {roles[name]: Child(style=child.word, copies=copies[name]) for name, child, _ in projections}
        try:
            declared: Declared = draft.plugin.declare(options, self.values.value("hidden_size"), children)
        except (TpkitError, ArithmeticError) as error:
            self.problems.add(draft.mark, draft.where, told(error))
            return None
        several = {role.name for role in draft.plugin.roles if role.several}
        for name, child, _ in projections:
            if copies[name] is not None and roles[name] not in several:
                message = f"the role {roles[name]!r} of module {draft.word!r} takes a single one, not {copies[name]}"
                self.problems.add(child.mark, child.where, message)
            sides = declared.sides.get(roles[name])
            if sides is not None:
                check_parts(child, sides.out, declared.counts, self.problems)
        return declared

    def _forward(self, draft: Draft, active: list[Draft]) -> tuple[Step, ...] | None:
        if draft.steps is None:
            return None
        steps, there = [], {child.name for child in active}
        for step in draft.steps:
            try:
                taken = step.when is None or step.when.holds(self.values)
            except Failed:
                continue
            if taken:
                self._check_calls(step, step.parts, there)
                steps.append(self._step(step.parts))
        unused = sorted(there - {name for step in steps for name in _called(step)})
        for name in unused:
            layer = "" if self.values.layer is None else f" (layer {self.values.layer})"
            self.problems.add(draft.mark, draft.where, f"no step that is taken uses the child {name!r}{layer}")
        return tuple(steps)

    def _check_calls(self, step: StepDraft, parts: StepExpr, there: set[str]) -> None:
        for part in parts:
            if part.child is not None and part.child not in there:
                layer = "" if self.values.layer is None else f" in layer {self.values.layer}"
                self.problems.add(step.mark.moved(part.col), step.path, f"there is no child {part.child!r}{layer}")
            self._check_calls(step, part.argument, there)

    def _step(self, parts: StepExpr) -> Step:
        terms = []
        for part in parts:
            call = Call(child=part.child, argument=self._step(part.argument)) if part.child is not None else None
            terms.append(Term(call=call, factor=self._factor(part.factor)))
        return tuple(terms)

    def _factor(self, factor: Number | Name | None) -> float:
        if factor is None:
            return 1.0
        value = factor.value if isinstance(factor, Number) else self.values.value(factor.name)
        return float(value) if isinstance(value, (int, float)) else 1.0


def _called(step: Step) -> set[str]:
    found = set()
    for term in step:
        if term.call is not None:
            found |= {term.call.child} | _called(term.call.argument)
    return found


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
