"""Expands drafts into bound nodes: choices taken, repeats written out, every word evaluated and validated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from tpkit.errors import TpkitError
from tpkit.modules import Declared
from tpkit.spec.bound import Call, Node, Step, Term
from tpkit.spec.draft import Draft, StepDraft
from tpkit.spec.expr import Name, Number, StepExpr
from tpkit.spec.parts import check_parts, norm_width
from tpkit.spec.problems import told
from tpkit.spec.roles import active_roles
from tpkit.spec.scope import Values
from tpkit.spec.slots import Failed, values_of

__all__ = ["Expander"]

#: no model has as many layers or experts; a mistyped number would fill the memory
MAX_COPIES = 10_000


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
        return self._node(root, "", "", "", None)

    def _node(self, draft: Draft, name: str, path: str, role: str, declared: Declared | None) -> Node:
        if draft.repeat is not None:
            return self._repeated(draft, name, path, role, declared)
        return self._single(draft, name, path, role, declared)

    def _repeated(self, draft: Draft, name: str, path: str, role: str, declared: Declared | None) -> Node:
        try:
            count = draft.repeat.value(self.values) if draft.repeat else 0
        except Failed:
            count = 0
        if count > MAX_COPIES:
            message = f"{count} copies; more than {MAX_COPIES} are taken for a mistake"
            self.problems.add(draft.mark, f"{draft.where}.repeat", message)
            count = 0
        outermost = self.values.layer is None
        copies = []
        for index in range(count):
            if outermost:
                self.values.enter(index)
            copies.append(self._single(draft, str(index), _below(path, str(index)), "", declared))
        if outermost:
            self.values.enter(None)
        return Node(name=name, path=path, kind="repeat", role=role, children=tuple(copies), where=str(draft.mark))

    def _single(self, draft: Draft, name: str, path: str, role: str, declared: Declared | None) -> Node:
        options = self._bound_options(draft, role, declared)
        active = self._active(draft)
        roles = active_roles(draft, active, self.problems) if draft.kind == "module" else {}
        inner = self._declared(draft, options, active, roles)
        children = []
        for child in active:
            below = path if child.inline else _below(path, child.name)
            children.append(self._node(child, child.name, below, roles.get(child.name, ""), inner))
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
        )

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

    def _declared(self, draft: Draft, options: Any, active: list[Draft], roles: Mapping[str, str]) -> Declared | None:
        """Asks a module type what it declares for these options, and checks the projections against it."""
        if draft.kind != "module" or options is None or draft.plugin is None:
            return None
        projections = [child for child in active if child.kind == "projection" and child.name in roles]
        styles = {roles[child.name]: child.word for child in projections}
        needed = {role.name for role in draft.plugin.roles if role.required}
        if not needed <= set(roles.values()):
            return None
        try:
            declared: Declared = draft.plugin.declare(options, self.values.value("hidden_size"), styles)
        except (TpkitError, ArithmeticError) as error:
            self.problems.add(draft.mark, draft.where, told(error))
            return None
        for child in projections:
            sides = declared.sides.get(roles[child.name])
            if sides is not None:
                check_parts(child, sides.out, self.problems)
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
