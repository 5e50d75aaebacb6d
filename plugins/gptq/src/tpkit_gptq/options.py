"""What a GPTQ checkpoint's configuration says, and what of it matters for computing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from tpkit import PluginError
from tpkit.quant import QuantOptions

__all__ = ["NOTES", "GptqOptions", "Rule", "flattened", "read_gptq"]

#: what quantisers note of how they found the weights or ran a model; the weights do not depend on it any more
NOTES = frozenset({
    "quant_method", "meta", "uri", "provider", "damp_percent", "damp_auto_increment", "static_groups",
    "true_sequential", "mse", "act_group_aware", "gptaq", "foem", "fallback", "failsafe", "hessian",
    "model_name_or_path", "model_file_base_name", "tokenizer", "dataset", "batch_size", "model_seqlen",
    "pad_token_id", "max_input_length", "cache_block_outputs", "module_name_preceding_first_block", "use_cuda_fp16",
    "exllama_config", "use_exllama", "disable_exllama", "backend", "amp", "autoround_version",
    "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "gradient_accumulate_steps", "iters",
    "lr", "minmax_lr", "low_gpu_mem_usage", "low_cpu_mem_usage", "nsamples", "scale_dtype", "seqlen",
})  # fmt: skip


def _group_size(value: int) -> int:
    if value < 1 and value != -1:
        raise ValueError(f"{value} is neither a number of inputs nor -1, which means all of them")
    return value


GroupSize = Annotated[int, AfterValidator(_group_size)]
Bits = Literal[2, 3, 4, 8]


class Rule(QuantOptions):
    """What a module has otherwise than the rest."""

    bits: Bits | None = None
    group_size: GroupSize | None = None
    sym: bool | None = None
    desc_act: bool | None = None


class GptqOptions(QuantOptions):
    """Options of `Gptq`, in the words of its config.json.

    Attributes:
        bits: of a value.
        group_size: inputs that share a scale and a zero point; -1: all of them.
        sym: the zero point is in the middle. Only said: zero points are stored and read in either case.
        desc_act: inputs are assigned to groups by the stored g_idx, in any order.
        checkpoint_format: "gptq" stores zero points less one, "gptq_v2" as they are.
        borrowed: the one was subtracted from whole words, so that a field below zero borrowed from the next.
        lm_head: the head is quantised too.
        dynamic: rules by ``+:regex`` or ``-:regex`` (not quantised) on the module's name; the first match counts.
        block_name_to_quantize: beginnings of the names of quantised modules, with commas between; None: any.
        modules_in_block_to_quantize: the quantised modules of a block; None: those that the checkpoint stores so.
    """

    bits: Bits = 4
    group_size: GroupSize = 128
    sym: bool = True
    desc_act: bool = False
    checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq"
    borrowed: bool = False
    lm_head: bool = False
    dynamic: dict[str, Rule] = Field(default_factory=dict)
    block_name_to_quantize: str | None = None
    modules_in_block_to_quantize: list[str] | None = None


def flattened(value: Any) -> list[Any]:
    """Returns the leaves of nested lists."""
    return [leaf for item in value for leaf in flattened(item)] if isinstance(value, list) else [value]


def expect(options: dict[str, Any], key: str, only: tuple[Any, ...], hint: str | None = None) -> None:
    """Takes a key off that may have one value only.

    Raises:
        PluginError: if it has another.
    """
    value = options.pop(key, only[0])
    if value not in only:
        wanted = " or ".join(map(repr, only))
        raise PluginError(f"GPTQ config: {key} is {value!r}; this plugin reads {wanted}", hint=hint)


def read_gptq(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that a quantization_config or a quantize_config.json of GPTQ states.

    Raises:
        PluginError: for another layout of the weights.
    """
    options = {key: value for key, value in config.items() if value is not None and key not in NOTES}
    expect(options, "method", ("gptq",))
    expect(options, "pack_dtype", ("int32",))
    expect(options, "data_type", ("int",))
    expect(options, "is_marlin_format", (False,), "Marlin files are laid out for one kernel; take the original ones")
    stated = [options.pop(key) for key in ("checkpoint_format", "format") if key in options]
    if any(each not in ("gptq", "gptq_v2") for each in stated) or len(set(stated)) > 1:
        raise PluginError(
            f"GPTQ config: the weights' format is {' and '.join(map(repr, stated))}; this plugin reads 'gptq' and "
            "'gptq_v2'",
            hint="marlin, bitblas and gptq_p (planar) are other layouts; save the model as gptq or gptq_v2",
        )
    if stated:
        options["checkpoint_format"] = stated[0]
    if stated == [] or stated[0] == "gptq":
        quantizers = flattened((config.get("meta") or {}).get("quantizer") or [])
        if any(str(name).lower().startswith("gptqmodel") for name in quantizers):
            options["borrowed"] = True
    if "block_name_to_quantize" in options:
        options["block_name_to_quantize"] = ",".join(map(str, flattened(options["block_name_to_quantize"])))
    if "modules_in_block_to_quantize" in options:
        options["modules_in_block_to_quantize"] = flattened(options["modules_in_block_to_quantize"])
    return options
