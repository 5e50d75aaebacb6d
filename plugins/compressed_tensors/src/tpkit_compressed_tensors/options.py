"""What a compressed-tensors configuration says that matters for computing. Pure.

Names and meanings: https://github.com/vllm-project/compressed-tensors, quantization/quant_config.py, quant_args.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from tpkit import PluginError
from tpkit.quant import QuantOptions

__all__ = ["Format", "Group", "Options", "Scheme", "Weights", "translate"]

Format = Literal[
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "dense",
]

#: for each format, the kinds of values it holds: type and bits, and the group size it is defined for
_HOLDS: dict[str, tuple[set[tuple[str, int]], int | None]] = {
    "pack-quantized": ({("int", bits) for bits in range(1, 9)}, None),
    "int-quantized": ({("int", bits) for bits in range(1, 9)}, None),
    "float-quantized": ({("float", 8)}, None),
    "naive-quantized": ({("float", 8), *(("int", bits) for bits in range(1, 9))}, None),
    "nvfp4-pack-quantized": ({("float", 4)}, 16),
    "mxfp4-pack-quantized": ({("float", 4)}, 32),
    "mxfp8-quantized": ({("float", 8)}, 32),
}

_NOTES = {"version", "global_compression_ratio", "kv_cache_scheme", "run_compressed", "dequantize"}
_NOTES |= {"use_optimized_inference", "quant_method"}
_WEIGHT_NOTES = {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}
_ORDERS = {"group": "group", "dynamic": "group", True: "group", "weight": "weight", "static": "weight"}


class Weights(QuantOptions):
    """How the weights of a group are quantised.

    Attributes:
        num_bits: of a value.
        type: "int" or "float".
        symmetric: there are no zero points.
        strategy: what shares a scale: the tensor, an output channel, a group of inputs, a block. "tensor_group" has
            groups and a scale of the tensor.
        group_size: inputs in a group.
        block_structure: outputs and inputs of a block.
        actorder: "group": the groups are not runs of inputs, and an index tells each input's.
    """

    num_bits: int = Field(default=8, ge=1, le=8)
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "group", "block", "tensor_group"] = "tensor"
    group_size: int | None = Field(default=None, ge=1)
    block_structure: list[int] | None = Field(default=None, min_length=2, max_length=2)
    actorder: Literal["group", "weight"] | None = None


class Scheme(QuantOptions):
    """What one linear gets: a format and how its weights are quantised."""

    format: Format
    weights: Weights

    def __str__(self) -> str:
        w = self.weights
        if self.format.startswith(("nvfp4", "mxfp")):
            return self.format.partition("-")[0]
        shared = {"group": f"g{w.group_size}", "block": "x".join(map(str, w.block_structure or ()))}
        words = [f"{'fp' if w.type == 'float' else 'int'}{w.num_bits}", shared.get(w.strategy, w.strategy)]
        return " ".join([*words, *([] if w.symmetric else ["asym"]), *(["g_idx"] if w.actorder == "group" else [])])


class Group(QuantOptions):
    """One of ``config_groups``; without weights its modules are not quantised."""

    targets: list[str]
    format: str | None = None
    weights: Weights | None = None


class Options(QuantOptions):
    """Options of the method.

    Attributes:
        config_groups: what is quantised how, by the group's name.
        ignore: modules that are not quantised.
        format: how it is stored, where a group does not say.
        quantization_status: what the writer noted; for messages.
    """

    config_groups: dict[str, Group] = Field(default_factory=dict)
    ignore: list[str] = Field(default_factory=list)
    format: str | None = None
    quantization_status: str | None = None

    def scheme(self, name: str) -> Scheme | None:
        """Returns what the modules of a group get; None: they are not quantised.

        Raises:
            PluginError: for a format that is not read, or that does not go with the weights.
        """
        group = self.config_groups[name]
        stored = group.format or self.format
        if group.weights is None or stored == "dense":
            return None
        if stored not in _HOLDS:
            raise PluginError(
                f"compressed-tensors: {name} is stored as {stored!r}; read are {', '.join(_HOLDS)}, dense",
                hint="other formats, sparse ones too, have to be decompressed with compressed-tensors first",
            )
        w, (values, size) = group.weights, _HOLDS[stored]
        if (
            (w.type, w.num_bits) not in values
            or (size and w.group_size != size)
            or (w.type == "float" and not w.symmetric)
        ):
            said = f"{w.type} of {w.num_bits} bits, {'' if w.symmetric else 'a'}symmetric, groups of {w.group_size}"
            raise PluginError(f"compressed-tensors: {name} is {stored!r}, which does not hold {said}")
        needed = {"group": w.group_size, "tensor_group": w.group_size, "block": w.block_structure}
        if needed.get(w.strategy, 1) is None or (w.actorder == "group" and w.strategy != "group"):
            raise PluginError(f"compressed-tensors: {name}: strategy {w.strategy!r} does not go with {w!r}")
        return Scheme.model_validate({"format": stored, "weights": w})


def translate(config: Mapping[str, Any]) -> dict[str, Any]:
    """Translates a quantization_config into what `Options` takes.

    Raises:
        PluginError: for sparsity and transforms, which change what has to be computed.
    """
    config = {**config, **(config.get("quantization_config") or {})}  # one within the other, by older transformers
    config.pop("quantization_config", None)
    for key in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        said = config.pop(key, None) or {}
        if key == "sparsity_config" and said.get("format") == "dense":
            continue  # the values may be sparse, the tensors are not
        if any(said.values()):
            raise PluginError(
                f"compressed-tensors: {key} {dict(said)!r} is not supported",
                hint="quantise the model without it, or fold it into the weights before quantising",
            )
    options = {key: value for key, value in config.items() if key not in _NOTES}
    groups = options.get("config_groups")
    if isinstance(groups, Mapping):
        options["config_groups"] = {name: _group(group) for name, group in groups.items()}
    return {**options, "ignore": options.get("ignore") or []}


def _group(group: Any) -> Any:
    if not isinstance(group, Mapping):
        return group  # a preset's name and targets: the writer puts the preset's content here; Options says so
    kept = {k: v for k, v in group.items() if k not in ("input_activations", "output_activations")}
    if isinstance(kept.get("weights"), Mapping):
        kept["weights"] = _weights(kept["weights"])
    return kept


def _weights(said: Mapping[str, Any]) -> dict[str, Any]:
    """Spells what older and newer versions write alike."""
    kept = {k: v for k, v in said.items() if k not in _WEIGHT_NOTES and v is not None}
    if kept.get("dynamic") is False:
        del kept["dynamic"]
    size = kept.get("group_size")
    kept.setdefault("strategy", "tensor" if size is None else "channel" if size == -1 else "group")
    if kept["strategy"] in ("group", "channel") and size == -1:
        kept["strategy"] = "channel"
        del kept["group_size"]
    if isinstance(kept.get("block_structure"), str):
        kept["block_structure"] = [int(part) if part.isdigit() else part for part in kept["block_structure"].split("x")]
    order = kept.pop("actorder", None)
    return {**kept, "actorder": _ORDERS.get(order, order)} if order else kept
