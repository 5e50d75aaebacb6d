"""Recognises attention, feed-forward and norms by the names of their tensors, and writes them as nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tpkit.drafting.fields import Fields, text_of
from tpkit.drafting.names import Group
from tpkit.drafting.vocabulary import (
    ACTIVATIONS,
    DOWN,
    GATE,
    GATE_UP,
    HEAD_NORM,
    NORM,
    OUT,
    QKV,
    UP,
    K,
    Q,
    V,
)

__all__ = ["attention_node", "is_attention", "is_mlp", "is_norm", "mlp_node", "norm_node", "take"]

Tree = dict[str, Any]


def is_norm(group: Group) -> bool:
    """Tells whether a module is a norm: a weight of one dimension, or a name like one where shapes are unknown."""
    if not group.is_leaf:
        return False
    return len(group.weight) == 1 if group.weight is not None else bool(NORM.search(group.name))


def _leaves(group: Group) -> dict[str, Group]:
    return {name: child for name, child in group.children.items() if child.is_leaf}


def _first(names: Mapping[str, Group], known: Any) -> str | None:
    lower = {name.lower(): name for name in names}
    order = [lower[name] for name in known if name in lower]
    return order[0] if order else None


def is_attention(group: Group) -> bool:
    """Tells whether projections of an attention lie directly below."""
    leaves = _leaves(group)
    apart = all(_first(leaves, known) for known in (Q, K, V))
    return (apart or _first(leaves, QKV) is not None) and _first(leaves, OUT) is not None


def is_mlp(group: Group) -> bool:
    """Tells whether projections of a dense feed-forward lie directly below."""
    leaves = _leaves(group)
    ups = any(_first(leaves, known) for known in (GATE, UP, GATE_UP))
    return ups and _first(leaves, DOWN) is not None and not any(child.repeat for child in group.children.values())


def take(group: Group, attention: bool) -> Group:
    """Moves the loose projections of an attention or a feed-forward out of a block into a group of their own."""
    known = (Q, K, V, QKV, OUT) if attention else (GATE, UP, GATE_UP, DOWN)
    names = {found for words in known if (found := _first(_leaves(group), words)) is not None}
    if attention:
        names |= {name for name in _leaves(group) if any(p.fullmatch(name) for p in HEAD_NORM.values())}
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


def _transposed(shape: Any, out: int | None, in_: int | None, fields: Fields, name: str) -> str:
    """Returns the word for weights stored [in, out], as far as the shape tells."""
    if shape is None or out is None or in_ is None or len(shape) != 2:
        return ""
    if tuple(shape) == (in_, out) and out != in_:
        return "transposed: true"
    if out == in_:
        fields.ask(f"{name} is square: [out, in], or [in, out] (then `transposed: true`)?")
    return ""


def _node(*words: str) -> str:
    return f"{{{', '.join(word for word in words if word)}}}"


def attention_node(group: Group, fields: Fields, hidden: int | None, rope: bool, inline: bool = False) -> Tree:
    """Returns an attention with its projections and the norms on its heads."""
    leaves = _leaves(group)
    parts = [_first(leaves, known) for known in (Q, K, V)]
    fused, out = _first(leaves, QKV), _first(leaves, OUT)
    heads = fields.value("num_attention_heads")
    head_dim = _attention_sizes(leaves, parts, fused, out, heads, hidden, fields)
    node: Tree = {**({"inline": "true"} if inline else {}), "module": "attention"}
    if rope:
        node["rope"] = _rope(fields)
    node |= _window(fields)
    fields.ask("attention: are scores multiplied by head_dim ** -0.5? (`scale: ...` where not)")
    flags = ("attention_bias", "qkv_bias", "use_bias", "bias")
    if fused is not None:
        bias = fields.bias(leaves[fused].has_bias, flags)
        turned = _turned(leaves[fused], hidden)
        node[fused] = _node("style: qkv", _order(fused, fields), bias, turned)
    else:
        named = [name for name in parts if name]
        biased = [leaves[name].has_bias for name in named]
        if any(biased) and not all(biased):
            fields.ask(f"biases: only some of {', '.join(named)} have one; a packed projection has all or none")
        turned = _transposed(leaves[named[1]].weight, _rows_of(fields, head_dim), hidden, fields, named[1])
        node["qkv_proj"] = _node("style: qkv", f"packs: [{', '.join(named)}]", fields.bias(any(biased), flags), turned)
    for role, pattern in HEAD_NORM.items():
        for name, leaf in leaves.items():
            if pattern.fullmatch(name):
                node[name] = _head_norm(leaf, role, fields, head_dim)
    if out is not None:
        turned = "transposed: true" if "transposed" in str(node[fused or "qkv_proj"]) else ""
        alike = leaves[out].has_bias == leaves[fused or str(parts[0])].has_bias
        node[out] = _node("style: row", fields.bias(leaves[out].has_bias, flags if alike else ()), turned)
    _left_out(group, node, parts, fields)
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
    return _node(*words)


def _window(fields: Fields) -> Tree:
    size = fields.config.get("sliding_window")
    types = fields.config.get("layer_types")
    if not isinstance(size, int) or isinstance(size, bool):
        return {}
    fields.declare("sliding_window", "sliding_window", size)
    fields.ask("window: which layers see only sliding_window keys, and do flags of config.json switch it off?")
    if not isinstance(types, list):
        return {"window": "sliding_window"}
    fields.declare("layer_type", "layer_types", None)
    fields.declared["layer_type"] = "{per_layer: layer_types, default: full_attention}"
    return {"window": "{when: layer_type == 'sliding_attention', is: sliding_window}"}


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


def mlp_node(group: Group, fields: Fields, hidden: int | None, inline: bool = False) -> Tree:
    """Returns a feed-forward, gated where there is more than one projection upwards."""
    leaves = _leaves(group)
    down = _first(leaves, DOWN)
    gate, up, both = (_first(leaves, known) for known in (GATE, UP, GATE_UP))
    if gate == "w1" and up is None and down == "w2" and "c_proj" in leaves:
        up, down = "w2", "c_proj"
    ups = list(dict.fromkeys(name for name in (gate, up) if name and name != down))
    width = max_but(leaves[down].weight, hidden) if down else None
    rows = max_but(leaves[both or ups[0]].weight, hidden)
    fused = both is not None or (len(ups) == 1 and rows is not None and rows == 2 * (width or 0))
    fields.size("intermediate_size", width, "4 * hidden_size", 4 * hidden if hidden else None)
    node: Tree = {**({"inline": "true"} if inline else {}), "module": "mlp", "activation": _activation(fields)}
    first = both or ups[0]
    bias = fields.bias(leaves[first].has_bias, ("mlp_bias", "use_bias"))
    turned = _transposed(leaves[first].weight, 2 * width if fused and width else width, hidden, fields, first)
    if fused:
        fields.ask(f"{first}: is the gate stored before the up projection (`fused: [gate, up]`), or after it?")
        node[first] = _node("style: merged_column", "fused: [gate, up]", bias, turned)
    elif len(ups) == 2:
        fields.ask(f"{' and '.join(ups)}: which of them goes through the activation? The first of `packs` does")
        node["gate_up_proj"] = _node("style: merged_column", f"packs: [{', '.join(ups)}]", bias, turned)
    else:
        node[first] = _node("style: column", bias, turned)
    if down:
        flags = ("mlp_bias", "use_bias") if leaves[down].has_bias == leaves[first].has_bias else ()
        node[down] = _node("style: row", fields.bias(leaves[down].has_bias, flags), turned)
    _left_out(group, node, [*ups, both], fields)
    return node


def _activation(fields: Fields) -> str:
    said = fields.value("hidden_act")
    if said in ACTIVATIONS:
        fields.number("hidden_act", "silu")
        return "hidden_act"
    fields.ask(f"activation: config.json says {text_of(said)}, which is no known word; silu is guessed")
    return "silu"


def _left_out(group: Group, node: Tree, used: list[str | None], fields: Fields) -> None:
    rest = [name for name in group.children if name not in node and name not in used]
    if rest:
        fields.ask(f"{group.name}: not understood and left out: {', '.join(sorted(rest))}")
