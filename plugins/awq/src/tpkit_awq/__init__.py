"""AWQ checkpoints for tpkit: the quant method ``awq``.

Four bits packed along the output, a scale and a packed zero point for each group of inputs:

    W[n, k] = scales[k // group_size, n] * (qweight[k, n] - qzeros[k // group_size, n])

Layout and arithmetic of the ``gemm`` version as in AutoAWQ (https://github.com/casper-hansen/AutoAWQ).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import AfterValidator

from tpkit import CheckpointError, PluginError
from tpkit.quant import Fixed, In, LinearSpec, Out, ParamSpec, QuantMethod, QuantOptions, Target
from tpkit.quant.codes import unpack

if TYPE_CHECKING:
    from tpkit.quant import Dim

__all__ = ["Awq", "AwqOptions"]

#: the nibble, lowest first, in which each of the 8 values of a word lies
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)

#: a word of eight 8s as int32: the zero points where none are stored
EIGHTS = float(0x88888888 - (1 << 32))
#: what an unquantised weight is stored in
FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})

#: what quantisers note of how they found the weights or ran a model; the weights do not depend on it any more
NOTES = frozenset({
    "quant_method", "meta", "uri", "provider", "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse",
    "exllama_config", "desc_act", "sym", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential",
    "mse", "act_group_aware", "fallback", "model_name_or_path", "amp", "autoround_version", "batch_size",
    "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "dataset",
    "gradient_accumulate_steps", "iters", "lr", "minmax_lr", "low_gpu_mem_usage", "low_cpu_mem_usage", "nsamples",
    "scale_dtype", "seqlen", "to_quant_block_names",
})  # fmt: skip


def _group_size(value: int) -> int:
    if value < 1 and value != -1:
        raise ValueError(f"{value} is neither a number of inputs nor -1, which means all of them")
    return value


class AwqOptions(QuantOptions):
    """Options of `Awq`, in the words of its config.json.

    Attributes:
        bits: of a value.
        group_size: inputs that share a scale and a zero point; -1: all of them.
        zero_point: zero points are stored. False: where none are, they are 8.
        lm_head: the head is quantised too.
        modules_to_not_convert: texts that occur in the names of modules that are not quantised; None or empty: those
            that the checkpoint does not store so.
    """

    bits: Literal[4] = 4
    group_size: Annotated[int, AfterValidator(_group_size)] = 128
    zero_point: bool = True
    lm_head: bool = False
    modules_to_not_convert: list[str] | None = None


class Awq(QuantMethod):
    """The quant method ``awq``."""

    Options = AwqOptions

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options that a quantization_config or a quant_config.json of AWQ states.

        Raises:
            PluginError: for another layout of the weights.
        """
        options = {key: value for key, value in config.items() if value is not None and key not in NOTES}
        if config.get("backend") == "llm-awq":
            options["version"] = "llm-awq"
        for key in ("version", "format", "checkpoint_format"):
            layout = options.pop(key, "gemm")
            if str(layout).lower() != "gemm":
                raise PluginError(
                    f"AWQ config: {key} is {layout!r}; this plugin reads 'gemm'",
                    hint="gemv, gemv_fast, llm-awq and marlin are other layouts; save the model as gemm",
                )
        for key, only in (("method", "awq"), ("pack_dtype", "int32"), ("data_type", "int")):
            value = options.pop(key, only)
            if value != only:
                raise PluginError(f"AWQ config: {key} is {value!r}; this plugin reads {only!r}")
        for old, new in (("w_bit", "bits"), ("q_group_size", "group_size")):
            if old in options and options.setdefault(new, options[old]) != options.pop(old):
                raise PluginError(f"AWQ config: {new} is {options[new]}, {old} is {config[old]}; they mean one thing")
        return options

    def for_module(self, target: Target) -> QuantMethod | None:
        skipped = self.options.modules_to_not_convert
        if target.kind == "embedding" or (target.kind == "head" and not self.options.lm_head):
            return None
        weight = target.stored.get("weight") if "qweight" not in target.stored else None
        if not skipped:  # not said: the checkpoint knows
            return None if weight is not None else self
        if target.matches(skipped, "substring"):
            return None
        # a list may call routers by other names than the checkpoint does
        return None if weight is not None and weight.dtype in FLOATS else self

    def label(self) -> str:
        return "4 bit all inputs" if self.options.group_size == -1 else f"4 bit g{self.options.group_size}"

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        size = self.options.group_size
        group: Dim = Fixed(1) if size == -1 else In(block=size)
        zero = None if self.options.zero_point else EIGHTS
        return {
            "qweight": ParamSpec("int32", dims=(In(), Out(pack=8))),
            "qzeros": ParamSpec("int32", dims=(group, Out(pack=8)), default=zero),
            "scales": ParamSpec(layer.dtype_of("scales", "float16"), dims=(group, Out())),
        }

    def process_weights_after_loading(self, layer: Any) -> None:
        if not self.options.zero_point and layer.qzeros.numel() and not bool(layer.qzeros.any()):
            count = layer.qzeros.numel()
            raise CheckpointError(
                f"{layer.path or 'a layer'}: zero_point is false, and all {count} words of qzeros are 0: they may be "
                "a placeholder for 8, or the zero points",
                hint="say zero_point: true if the zero points are 0",
            )

    def dequantize(self, layer: Any) -> torch.Tensor:
        values, zeros = (layer.trim(name, _in_order(getattr(layer, name))) for name in ("qweight", "qzeros"))
        weight: torch.Tensor = (values.float() - layer.expand("qzeros", zeros)) * layer.expand("scales").float()
        return weight.t()


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """Unpacks words int32 ``[rows, columns / 8]`` to values uint8 ``[rows, columns]`` in the columns' order."""
    order = torch.tensor(ORDER, device=words.device)
    return unpack(words, 4).reshape(len(words), -1, 8).index_select(2, order).flatten(1)
