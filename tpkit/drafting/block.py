"""Writes the repeated block: what is in it, and a guess of how its norms are placed, always with a question."""

from __future__ import annotations

import re

from tpkit.drafting.fields import Fields
from tpkit.drafting.names import Group
from tpkit.drafting.parts import Tree, attention_node, is_attention, is_mlp, is_norm, mlp_node, norm_node, take

__all__ = ["block_node"]

_PARALLEL = ("use_parallel_residual", "parallel_attn", "parallel_residual", "parallel_block")
_POST = re.compile(r"post", re.IGNORECASE)
_OF_MLP = re.compile(r"ffn|mlp|feed|ff_|post_attention|post_attn|2$", re.IGNORECASE)
_OF_MLP_AFTER = re.compile(r"ffn|mlp|feed|ff_|2$", re.IGNORECASE)


def block_node(group: Group, fields: Fields, hidden: int | None, rope: bool) -> Tree:
    """Returns the node of a repeated block."""
    block = Group(group.name, dict(group.children))
    parts: dict[str, Tree] = {}
    attention = mlp = ""
    for name, child in list(block.children.items()):
        inner, place = _inside(child, name)
        if inner is not None and is_attention(inner) and not attention:
            attention = name
            parts[name] = _wrapped(attention_node(inner, fields, hidden, rope), place)
        elif inner is not None and is_mlp(inner) and not mlp:
            mlp = name
            parts[name] = _wrapped(mlp_node(inner, fields, hidden), place)
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


def _inside(group: Group, name: str) -> tuple[Group | None, list[str]]:
    """Looks through modules that only hold one other: the way down to what holds projections."""
    place: list[str] = []
    while group.children and not any(child.is_leaf for child in group.children.values()) and len(group.children) == 1:
        (below,) = group.children.values()
        if below.repeat or group.repeat:
            return None, []
        place.append(below.name)
        group = below
    return (group if group.children and not group.repeat else None), place


def _wrapped(node: Tree, place: list[str]) -> Tree:
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
