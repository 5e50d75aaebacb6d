"""Writes the repeated block: what is in it, and a guess of how its norms are placed, always with a question."""

from __future__ import annotations

import re
from typing import Any

from tpkit.drafting.experts import is_moe
from tpkit.drafting.fields import Fields
from tpkit.drafting.layers import experts_node
from tpkit.drafting.mlp import mlp_node
from tpkit.drafting.names import Group, ask_differing, merged
from tpkit.drafting.parts import Tree, attention_node, is_attention, is_mlp, is_norm, norm_node, take

__all__ = ["block_node"]

_PARALLEL = ("use_parallel_residual", "parallel_attn", "parallel_residual", "parallel_block")
_POST = re.compile(r"post", re.IGNORECASE)
_OF_MLP = re.compile(r"ffn|mlp|feed|ff_|post_attention|post_attn|2$", re.IGNORECASE)
_OF_MLP_AFTER = re.compile(r"ffn|mlp|feed|ff_|2$", re.IGNORECASE)


def block_node(group: Group, path: str, fields: Fields, hidden: int | None, rope: bool) -> Tree:
    """Returns the node of a repeated block, whose path questions tell."""
    block = Group(group.name, dict(group.children))
    parts, attention, mlp = _parts(block, group.copies, path, fields, hidden, rope)
    if not attention and is_attention(block):
        attention = "attention"
        parts[attention] = attention_node(take(block, attention=True), fields, hidden, rope, inline=True)
    if not mlp and is_mlp(block):
        mlp = "feed_forward"
        parts[mlp] = mlp_node(take(block, attention=False), fields, hidden, inline=True)
    norms = [name for name, child in block.children.items() if is_norm(child)]
    steps, used = _forward(attention, mlp, norms, fields)
    rest = [name for name in block.children if name not in parts and name not in used]
    if rest:
        fields.ask(f"in each block, not understood and left out: {', '.join(sorted(rest))}")
    node: Tree = {"repeat": "num_hidden_layers"}
    if steps:
        node["forward"] = f"[{', '.join(steps)}]  # guessed, see above"
    for name in [*used, *sorted(parts, key=lambda name: name != attention)]:
        node[name] = parts[name] if name in parts else norm_node(block.children[name], fields)
    return node


def _parts(
    block: Group, copies: list[Group], path: str, fields: Fields, hidden: int | None, rope: bool
) -> tuple[Tree, str, str]:
    """Returns the nodes of what lies in modules of their own, and which of them are attention and feed-forward."""
    parts: Tree = {}
    attention = mlp = chosen = ""
    for name, child in block.children.items():
        inner, place = _inside(child)
        if inner is None:
            continue
        if not mlp and is_moe(inner):
            mlp = chosen = name
            layers = _by_layer(copies, [name, *place])
            node: Any = experts_node(layers, ".".join([path, "*", name, *place]), fields, hidden)
            parts[name] = _wrapped(node, place)
        elif is_attention(inner) and not attention:
            attention = name
            parts[name] = _wrapped(attention_node(inner, fields, hidden, rope), place)
        elif is_mlp(inner) and not mlp:
            mlp = name
            parts[name] = _wrapped(mlp_node(inner, fields, hidden), place)
    # what differs within the module that has experts is a choice already
    alike = [Group(copy.name, {k: v for k, v in copy.children.items() if k != chosen}) for copy in copies]
    ask_differing(merged(alike), alike, path, fields.ask)
    return parts, attention, mlp


def _by_layer(copies: list[Group], place: list[str]) -> dict[int, Group]:
    """Returns the module at a place in each copy that has it."""
    found = {}
    for copy in copies:
        at: Group | None = copy
        for name in place:
            at = at.children.get(name) if at else None
        if at is not None:
            found[int(copy.name)] = at
    return found


def _inside(group: Group) -> tuple[Group | None, list[str]]:
    """Looks through modules that only hold one other: the way down to what holds projections."""
    place: list[str] = []
    while len(group.children) == 1 and not is_moe(group) and not any(c.is_leaf for c in group.children.values()):
        (below,) = group.children.values()
        if below.repeat or group.repeat:
            return None, []
        place.append(below.name)
        group = below
    return (group if group.children and not group.repeat else None), place


def _wrapped(node: Any, place: list[str]) -> Any:
    for name in reversed(place):
        node = {name: node}
    return node


def _forward(attention: str, mlp: str, norms: list[str], fields: Fields) -> tuple[list[str], list[str]]:
    """Returns the steps, and the norms they use in order."""
    if not attention or not mlp:
        missing = [what for what, name in (("attention", attention), ("feed-forward", mlp)) if not name]
        fields.ask(f"no {' and no '.join(missing)} was recognised in the block")
    whole = {"attention": attention, "mlp": mlp}
    wrapped = _placed(norms)
    used = [name for name in norms if name in wrapped.values()]
    terms = []
    for part, name in whole.items():
        if name:
            before, after = wrapped.get(f"{part} before", ""), wrapped.get(f"{part} after", "")
            inner = f"{before}(x)" if before else "x"
            terms.append(f"{after}({name}({inner}))" if after else f"{name}({inner})")
    if not terms:
        return [], []
    parallel = len(terms) == 2 and (
        (len(norms) == 1 and wrapped.get("attention before") == wrapped.get("mlp before"))
        or any(fields.require(key) for key in _PARALLEL)
    )
    told = f"{len(norms)} norm{'s' * (len(norms) != 1)} ({', '.join(norms) or 'none'})"
    how = "in parallel" if parallel else "one after the other"
    fields.ask(f"forward: guessed from {told}: attention and feed-forward {how}. Where do the norms go?")
    used = [name for name in used if any(f"{name}(" in term for term in terms)]
    if factor := fields.multiplier("residual_multiplier", "what attention and feed-forward add to x"):
        terms = [f"{factor} * {term}" for term in terms]
    return ([f"x + {' + '.join(terms)}"] if parallel else [f"x + {term}" for term in terms]), used


def _placed(norms: list[str]) -> dict[str, str]:
    """Returns which norm goes before or after what, by number and names."""
    if len(norms) == 1:
        return {"attention before": norms[0], "mlp before": norms[0]}
    if len(norms) == 2:
        if all(_POST.search(name) for name in norms):
            second = next((name for name in norms if _OF_MLP_AFTER.search(name)), norms[1])
            first = next(name for name in norms if name != second)
            return {"attention after": first, "mlp after": second}
        second = next((name for name in sorted(norms, reverse=True) if _OF_MLP.search(name)), norms[1])
        first = next(name for name in norms if name != second)
        return {"attention before": first, "mlp before": second}
    if len(norms) == 4:
        of_mlp = [name for name in norms if _OF_MLP_AFTER.search(name)]
        of_attention = [name for name in norms if name not in of_mlp]
        if len(of_mlp) == 2:
            found: dict[str, str] = {}
            for part, pair in (("attention", of_attention), ("mlp", of_mlp)):
                after = next((name for name in pair if _POST.search(name)), pair[1])
                before = next(name for name in pair if name != after)
                found |= {f"{part} before": before, f"{part} after": after}
            return found
    return {}
