"""Writes a dense feed-forward, or what one of several experts is made of, from the names and shapes of projections."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tpkit.drafting.fields import Fields, text_of
from tpkit.drafting.names import Group
from tpkit.drafting.parts import Tree, first, flow, leaves_of, left_out, max_but
from tpkit.drafting.vocabulary import ACTIVATIONS, DOWN, GATE, GATE_UP, UP

__all__ = ["Kind", "activation_of", "mlp_node"]

_USUAL = "intermediate_size"


@dataclass(frozen=True)
class Kind:
    """What a feed-forward is in the block.

    Attributes:
        what: what a question calls it.
        widths: fields that may say how wide it is, the likeliest first; a name that no field has may be a product.
        stacked: it is one of several experts in one tensor.
        also: further words of each projection.
    """

    what: str = "feed-forward"
    widths: tuple[str, ...] = (_USUAL,)
    stacked: bool = False
    also: str = ""


def mlp_node(group: Group, fields: Fields, hidden: int | None, kind: Kind | None = None, inline: bool = False) -> Tree:
    """Returns a feed-forward, gated where there is more than one projection upwards."""
    kind = kind or Kind()
    leaves = leaves_of(group)
    down = first(leaves, DOWN)
    gate, up, both = (first(leaves, known) for known in (GATE, UP, GATE_UP))
    if gate == "w1" and up is None and down == "w2" and "c_proj" in leaves:
        up, down = "w2", "c_proj"
    ups = list(dict.fromkeys(name for name in (gate, up) if name and name != down))
    width = max_but(leaves[down].weight, hidden) if down else None
    above = both or ups[0]
    rows = max_but(leaves[above].weight, hidden)
    # where both differ from the hidden size they tell; a fused one as wide as that would be the same number twice
    plain = rows is not None and rows == width and rows != hidden
    fused = not plain if both else len(ups) == 1 and rows is not None and rows == 2 * (width or 0)
    said = _width(fields, width, hidden, kind)
    node: Tree = {**({"inline": "true"} if inline else {}), "module": "mlp", **({"width": said} if said else {})}
    node["activation"] = activation_of(fields)
    bias = fields.bias(leaves[above].has_bias, ("mlp_bias", "use_bias"))
    turned = _turned(leaves, above, down, (hidden, width, 2 * width if fused and width else width), fields, kind)
    if fused:
        fields.ask(
            f"{above}: is the gate stored before the up projection (`fused: [gate, up]`), after it, or do both take "
            "turns (`{per: channel, order: [gate, up]}`)?"
        )
        node[above] = flow("style: merged_column", "fused: [gate, up]", kind.also, bias, turned)
    elif len(ups) == 2:
        fields.ask(f"{' and '.join(ups)}: which of them goes through the activation? The first of `packs` does")
        packs = f"packs: [{', '.join(ups)}]"
        node["gate_up_proj"] = flow("style: merged_column", packs, kind.also, bias, turned)
    else:
        node[above] = flow("style: column", kind.also, bias, turned)
    if down:
        flags = ("mlp_bias", "use_bias") if leaves[down].has_bias == leaves[above].has_bias else ()
        node[down] = flow("style: row", kind.also, fields.bias(leaves[down].has_bias, flags), turned)
    left_out(group, node, [*ups, both], fields)
    return node


def activation_of(fields: Fields) -> str:
    """Returns the word for the activation, and declares its field."""
    said = fields.value("hidden_act")
    if said in ACTIVATIONS:
        fields.number("hidden_act", "silu")
        return "hidden_act"
    fields.ask(f"activation: config.json says {text_of(said)}, which is no known word; silu is guessed")
    return "silu"


def _width(fields: Fields, seen: int | None, hidden: int | None, kind: Kind) -> str:
    """Returns ``width:``, "" for the usual field, which is declared."""
    if kind.widths == (_USUAL,):
        fields.size(_USUAL, seen, "4 * hidden_size", 4 * hidden if hidden else None)
        return ""
    for name in kind.widths:
        parts = name.split(" * ")
        counts = [fields.count(part, seen if len(parts) == 1 else None) for part in parts]
        known = [count for count in counts if count is not None]
        product = math.prod(known)
        if len(known) < len(parts) or seen not in (None, product) or fields.shown.get(name, product) != product:
            continue
        for part, count in zip(parts, known, strict=True):
            fields.size(part, count)
        if seen is None:
            fields.ask(f"width of {kind.what}: {name} is guessed, shapes are unknown")
        return "" if name == _USUAL else name
    fields.ask(f"width of {kind.what}: no field of config.json says {seen or 1}; it stands as a number")
    return str(seen or 1)


def _turned(
    leaves: dict[str, Group], above: str, down: str | None, sizes: tuple[int | None, ...], fields: Fields, kind: Kind
) -> str:
    """Returns the word for weights stored [in, out]: the one upwards tells, or the other where it is square."""
    hidden, width, rows = sizes
    sides = [(above, rows, hidden), *([(down, hidden, width)] if down else [])]
    for name, out, in_ in sides:
        shape = leaves[name].weight
        if shape is not None and len(shape) == 2 and out != in_:
            return "transposed: true" if tuple(shape) == (in_, out) else ""
    known = all(leaves[name].weight is not None for name, _, _ in sides)
    if known and width:
        fields.ask(f"{above} is square: [out, in], or [in, out] (then `transposed: true`)?")
    elif kind.stacked:
        fields.ask(f"{above}: is each expert's weight [out, in], or [in, out] (`transposed: true`)? Shapes are unknown")
    return ""
