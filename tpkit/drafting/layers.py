"""Layers that differ: a choice between experts and a dense feed-forward, by a field of config.json where one tells."""

from __future__ import annotations

from typing import Any

from tpkit.drafting.experts import DENSE, is_moe, moe_node
from tpkit.drafting.fields import Fields, text_of
from tpkit.drafting.mlp import mlp_node
from tpkit.drafting.names import Group, ask_differing, merged
from tpkit.drafting.parts import Tree, is_mlp

__all__ = ["experts_node"]

#: so many first layers are dense
_FIRST = ("first_k_dense_replace", "num_dense_layers", "n_dense_layers", "moe_layer_start_index", "dense_layers_num")
#: every so many layers one has experts
_EVERY = (
    "decoder_sparse_step",
    "interleave_moe_layer_step",
    "moe_layer_freq",
    "moe_layer_interval",
    "moe_every_n_layers",
)


def experts_node(parts: dict[int, Group], path: str, fields: Fields, hidden: int | None) -> Tree | list[Tree] | None:
    """Returns the node of a feed-forward that has experts in some layers or in all; None where it has them in none.

    Args:
        parts: the module in each layer that has it, by the number of the layer.
        path: of the module, for questions.
        fields: takes what is read, and the questions.
        hidden: the hidden size.
    """
    sparse = {number: part for number, part in parts.items() if is_moe(part)}
    dense = {number: part for number, part in parts.items() if number not in sparse and is_mlp(part)}
    if not sparse:
        return None
    for layers in (sparse, dense):
        copies = [Group(str(number), part.children, part.tensors) for number, part in layers.items()]
        ask_differing(merged(copies), copies, path, fields.ask)
    moe = moe_node(_whole(sparse), fields, hidden)
    if not dense:
        return moe
    if len(sparse) + len(dense) < len(parts):
        fields.ask(f"{path}: in some layers it is neither experts nor a feed-forward that is understood")
    condition = _condition(set(sparse), set(parts), fields, path)
    return [{"when": condition, **moe}, mlp_node(_whole(dense), fields, hidden, DENSE)]


def _whole(layers: dict[int, Group]) -> Group:
    whole = merged(list(layers.values()))
    whole.name = next(iter(layers.values())).name
    return whole


def _condition(sparse: set[int], layers: set[int], fields: Fields, path: str) -> str:
    """Returns when a layer has experts: by fields that tell just what the names do, else with a question."""
    config = fields.config
    if (found := _listed(sparse, layers, fields)) is not None:
        return found
    for key in _FIRST:
        if _count(config.get(key)) and {layer for layer in layers if layer >= config[key]} == sparse:
            fields.declare(key, key, config[key])
            return f"layer >= {key}"
    for key in _EVERY:
        step = config.get(key)
        for listed in ("", *_lists(config, layers)):
            without = set(config[listed]) if listed else set()
            if (
                isinstance(step, int)
                and step > 0
                and {at for at in layers if (at + 1) % step == 0 and at not in without} == sparse
            ):
                fields.declare(key, key, step)
                fields.derived["nth_layer"] = f"{{every: {key}}}"
                if not listed and key == "decoder_sparse_step":
                    listed = next((name for name in _lists(config, layers) if not config[name]), "")
                if listed:
                    fields.declare(listed, listed, config[listed])
                return f"nth_layer and layer not in {listed}" if listed else "nth_layer"
    least = min(sparse)
    seen = text_of(sorted(layers - sparse))
    fields.ask(f"{path}: no field of config.json tells that layers {seen} are dense and the others have experts")
    if {layer for layer in layers if layer >= least} == sparse:
        return f"layer >= {least}"
    fields.declared["dense_layers"] = seen
    return "layer not in dense_layers"


def _listed(sparse: set[int], layers: set[int], fields: Fields) -> str | None:
    """Returns a condition by a list that has an entry for each layer, or the numbers of layers of one kind."""
    for key, value in fields.config.items():
        if not isinstance(value, list) or not value or not all(isinstance(each, (int, bool)) for each in value):
            continue
        if len(value) > max(layers) and set(value) == {0, 1} and {at for at in layers if value[at]} == sparse:
            fields.declare(key, key, None)
            fields.declared["has_experts"] = f"{{per_layer: {key}, default: 1}}"
            del fields.declared[key]
            return "has_experts"
    for key in _lists(fields.config, layers):
        numbers = set(fields.config[key])
        if numbers and numbers in (sparse, layers - sparse):
            fields.declare(key, key, fields.config[key])
            return f"layer in {key}" if numbers == sparse else f"layer not in {key}"
    return None


def _lists(config: Any, layers: set[int]) -> list[str]:
    """Returns the fields that list numbers of layers."""
    return [
        key
        for key, value in config.items()
        if isinstance(value, list) and ("layer" in key or "moe" in key or "mlp" in key)
        and all(isinstance(each, int) and not isinstance(each, bool) and each in layers for each in value)
    ]  # fmt: skip


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
