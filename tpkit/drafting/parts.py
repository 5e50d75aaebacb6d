"""Recognises attention, feed-forward and norms by the names of their tensors, and writes them as nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tpkit.drafting.fields import Fields, text_of
from tpkit.drafting.names import Group
from tpkit.drafting.vocabulary import (
    BUFFERS,
    DOWN,
    GATE,
    GATE_UP,
    HEAD_NORM,
    NORM,
    OUT,
    PER_HEAD,
    QKV,
    SINKS,
    UP,
    K,
    Q,
    V,
)

__all__ = [
    "Tree",
    "attention_node",
    "first",
    "flow",
    "is_attention",
    "is_mlp",
    "is_norm",
    "leaves_of",
    "left_out",
    "max_but",
    "norm_node",
    "take",
    "transposed",
]

Tree = dict[str, Any]


def is_norm(group: Group) -> bool:
    """Tells whether a module is a norm: a weight of one dimension, or a name like one where shapes are unknown."""
    if not group.is_leaf:
        return False
    return len(group.weight) == 1 if group.weight is not None else bool(NORM.search(group.name))


def leaves_of(group: Group) -> dict[str, Group]:
    """Returns the weights' modules directly below."""
    return {name: child for name, child in group.children.items() if child.is_leaf}


def first(names: Mapping[str, Group], known: Any) -> str | None:
    """Returns the name that is among known ones, the likeliest if there are several."""
    lower = {name.lower(): name for name in names}
    order = [lower[name] for name in known if name in lower]
    return order[0] if order else None


def is_attention(group: Group) -> bool:
    """Tells whether projections of an attention lie directly below."""
    leaves = leaves_of(group)
    apart = all(first(leaves, known) for known in (Q, K, V))
    return (apart or first(leaves, QKV) is not None) and first(leaves, OUT) is not None


def is_mlp(group: Group) -> bool:
    """Tells whether projections of a dense feed-forward lie directly below."""
    leaves = leaves_of(group)
    ups = any(first(leaves, known) for known in (GATE, UP, GATE_UP))
    return ups and first(leaves, DOWN) is not None and not any(child.repeat for child in group.children.values())


def take(group: Group, attention: bool) -> Group:
    """Moves the loose projections of an attention or a feed-forward out of a block into a group of their own."""
    known = (Q, K, V, QKV, OUT) if attention else (GATE, UP, GATE_UP, DOWN)
    names = {found for words in known if (found := first(leaves_of(group), words)) is not None}
    if attention:
        names |= {name for name in leaves_of(group) if any(p.fullmatch(name) for p in HEAD_NORM.values())}
    inner = Group("attention" if attention else "feed_forward")
    inner.children = {name: group.children.pop(name) for name in list(group.children) if name in names}
    return inner


def norm_node(group: Group, fields: Fields, over: str = "") -> str:
    """Returns a norm, and declares its eps."""
    words = ["norm: layer" if group.has_bias else "norm: rms"]
    if not group.has_bias and not any("rms" in key for key in fields.config):
        fields.ask("norms have no bias and config.json does not say rms: `norm: rms`, or `{norm: layer, bias: false}`?")
    fields.number("layer_norm_eps" if group.has_bias else "rms_norm_eps", 1e-5)
    fields.ask("norms: does the code multiply by `weight`, or by `1 + weight` (then `zero_centered: true`)?")
    return f"{{{', '.join([*words, *([over] if over else [])])}}}"


def transposed(shape: Any, out: int | None, in_: int | None, fields: Fields, name: str) -> str:
    """Returns the word for weights stored [in, out], as far as the shape tells."""
    if shape is None or out is None or in_ is None or len(shape) != 2:
        return ""
    if tuple(shape) == (in_, out) and out != in_:
        return "transposed: true"
    if out == in_:
        fields.ask(f"{name} is square: [out, in], or [in, out] (then `transposed: true`)?")
    return ""


def flow(*each: str) -> str:
    """Returns words of a node in one line, without the empty ones."""
    return f"{{{', '.join(word for word in each if word)}}}"


def attention_node(group: Group, fields: Fields, hidden: int | None, rope: bool, inline: bool = False) -> Tree:
    """Returns an attention with its projections and the norms on its heads."""
    leaves = leaves_of(group)
    parts = [first(leaves, known) for known in (Q, K, V)]
    fused, out = first(leaves, QKV), first(leaves, OUT)
    heads = fields.value("num_attention_heads")
    head_dim = _attention_sizes(leaves, parts, fused, out, heads, hidden, fields)
    node: Tree = {**({"inline": "true"} if inline else {}), "module": "attention"}
    if rope:
        node["rope"] = _rope(fields)
    node |= _window(fields)
    if (scale := fields.multiplier("attention_multiplier", "scores of attention, in place of head_dim ** -0.5,")) != "":
        node["scale"] = scale
    else:
        fields.ask("attention: are scores multiplied by head_dim ** -0.5? (`scale: ...` where not)")
    flags = ("attention_bias", "qkv_bias", "use_bias", "bias")
    if fused is not None:
        bias = fields.bias(leaves[fused].has_bias, flags)
        turned = _turned(leaves[fused], hidden)
        node[fused] = flow("style: qkv", _order(fused, fields), bias, turned)
    else:
        named = [name for name in parts if name]
        biased = [leaves[name].has_bias for name in named]
        if any(biased) and not all(biased):
            fields.ask(f"biases: only some of {', '.join(named)} have one; a packed projection has all or none")
        turned = transposed(leaves[named[1]].weight, _rows_of(fields, head_dim), hidden, fields, named[1])
        node["qkv_proj"] = flow("style: qkv", f"packs: [{', '.join(named)}]", fields.bias(any(biased), flags), turned)
    for role, pattern in HEAD_NORM.items():
        for name, leaf in leaves.items():
            if pattern.fullmatch(name):
                node[name] = _head_norm(leaf, role, fields, head_dim)
    if out is not None:
        turned = "transposed: true" if "transposed" in str(node[fused or "qkv_proj"]) else ""
        alike = leaves[out].has_bias == leaves[fused or str(parts[0])].has_bias
        node[out] = flow("style: row", fields.bias(leaves[out].has_bias, flags if alike else ()), turned)
    for last, shape in group.tensors.items():
        if SINKS.search(last) and shape in (None, (heads,)):
            fields.ask(f"{last}: taken for sinks, a logit of each head that attends to nothing")
            node[last] = flow("" if last == "sinks" else "role: sinks", "parameter: [num_attention_heads]", PER_HEAD)
    left_out(group, node, parts, fields)
    return node


def _rows_of(fields: Fields, head_dim: int | None) -> int | None:
    kv = fields.declared.get("num_key_value_heads", "")
    count = re.search(r"\d+(?=\}?$)", kv)
    kv_heads = int(count[0]) if count else fields.value("num_attention_heads")
    return kv_heads * head_dim if kv_heads and head_dim else None


def _turned(leaf: Group, hidden: int | None) -> str:
    """A fused projection has more rows than columns."""
    shape = leaf.weight
    turned = shape is not None and len(shape) == 2 and shape[0] == hidden and shape[1] > shape[0]
    return "transposed: true" if turned else ""


def _attention_sizes(
    leaves: Mapping[str, Group], parts: list[str | None], fused: str | None, out: str | None, heads: Any,
    hidden: int | None, fields: Fields,
) -> int | None:  # fmt: skip
    """Declares heads, kv heads and head_dim, as shapes show them; returns head_dim."""
    fields.size("num_attention_heads", None)
    rows = [max_but(leaves[name].weight, hidden) if name else None for name in (parts[0], parts[1], fused, out)]
    width = rows[0] if fused is None else rows[3]
    usual = hidden // heads if hidden and heads else None
    dim = width // heads if width and heads and width % heads == 0 else fields.value("head_dim") or usual
    fields.size("head_dim", dim, "hidden_size // num_attention_heads", usual)
    kv = None
    if dim and fused is None and rows[1]:
        kv = rows[1] // dim
    elif dim and heads and rows[2] and rows[2] % dim == 0:
        kv = (rows[2] // dim - heads) // 2
    if kv == 0 or (kv is None and fields.value("multi_query") is True):
        fields.ask("kv heads: the shapes do not come out; see num_key_value_heads")
        kv = None
    fields.size("num_key_value_heads", kv, "num_attention_heads", heads)
    return dim if isinstance(dim, int) else None


def max_but(shape: Any, hidden: int | None) -> int | None:
    """Returns the side of a weight that is not the hidden size; of a square one, any."""
    if shape is None or len(shape) != 2:
        return None
    return next((int(n) for n in shape if n != hidden), int(shape[0]))


def _rope(fields: Fields) -> str:
    fields.spelled("rope_theta", 10000.0)
    scaling = fields.spelled("rope_scaling", None)
    fields.ask("rope: do features turn in `half` pairs (i, i + d/2) or `interleaved` ones (2i, 2i + 1)?")
    if isinstance(scaling, Mapping) and scaling.get("rope_type", scaling.get("type")) not in (None, "default"):
        fields.ask(f"rope scaling: config.json asks for {text_of(dict(scaling))}; is this kind supported, and meant?")
    words = ["pairs: half", "theta: rope_theta", "scaling: rope_scaling"]
    had = set(fields.declared)
    if fields.spelled("partial_rotary_factor", 1.0) is not None:
        words.append("partial: partial_rotary_factor")
        fields.ask("rope turns a part of each head (partial_rotary_factor): the first features?")
    elif "partial_rotary_factor" not in had:
        del fields.declared["partial_rotary_factor"]
    return flow(*words)


def _window(fields: Fields) -> Tree:
    size = fields.config.get("sliding_window")
    types = fields.config.get("layer_types")
    if not isinstance(size, int) or isinstance(size, bool):
        return {}
    fields.ask("window: which layers see only sliding_window keys, and do flags of config.json switch it off?")
    if isinstance(types, list) and "sliding_attention" not in types:
        return {}
    fields.declare("sliding_window", "sliding_window", size)
    if not isinstance(types, list):
        return {"window": "sliding_window"}
    fields.declare("layer_type", "layer_types", None)
    fields.declared["layer_type"] = (
        f"{{per_layer: layer_types, {_without_list([t == 'full_attention' for t in types])}}}"
    )
    return {"window": "{when: layer_type == 'sliding_attention', is: sliding_window}"}


def _without_list(full: list[bool]) -> str:
    """Returns which layers see all keys in a config.json without a list: every n-th, if that is so in this one."""
    if any(full):
        every = full.index(True) + 1
        if full == [(number + 1) % every == 0 for number in range(len(full))]:
            return f"every: {every}, is: full_attention, otherwise: sliding_attention"
    first, other = ("full_attention", "sliding_attention") if full[0] else ("sliding_attention", "full_attention")
    until = full.index(not full[0]) if not all(full) and any(full) else len(full)
    return f"default: [{{when: layer < {until}, is: {first}}}, {{is: {other}}}]"


def _order(name: str, fields: Fields) -> str:
    fields.ask(
        f"{name}: are its rows three blocks (`fused: [q, k, v]`), or repeated per kv head (`{{per: kv_head, order:"
        " [q, k, v]}`) or per head (`per: head`)? Shapes cannot tell; blocks are guessed"
    )
    return "fused: [q, k, v]"


def _head_norm(leaf: Group, role: str, fields: Fields, head_dim: int | None) -> str:
    over = "over: head"
    if leaf.weight is None:
        fields.ask(f"{leaf.name}: over each head, or `over: all_heads`? Without shapes head is guessed")
    elif len(leaf.weight) != 1 or leaf.weight[0] != head_dim:
        over = "over: all_heads"
    return norm_node(leaf, fields, over if leaf.name == role else f"role: {role}, {over}")


def left_out(group: Group, node: Tree, used: list[str | None], fields: Fields) -> None:
    """Asks about what is in a group and not in its node."""
    rest = [name for name in (*group.children, *group.tensors) if name not in node and name not in used]
    rest = [name for name in rest if name not in ("weight", "bias", *BUFFERS)]
    if rest:
        fields.ask(f"{group.name}: not understood and left out: {', '.join(sorted(rest))}")
