"""GPTQ: integers packed along the input, a scale and a packed zero point for each group of inputs.

    W[n, k] = scales[g, n] * (qweight[k, n] - zero[g, n])        g = k // group_size, or g_idx[k] with desc_act

Layout and arithmetic as in GPTQModel (https://github.com/ModelCloud/GPTQModel) and AutoGPTQ
(https://github.com/AutoGPTQ/AutoGPTQ).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import TYPE_CHECKING, Any

import torch

from tpkit import CheckpointError
from tpkit.quant import Fixed, In, LinearSpec, Out, ParamSpec, QuantMethod, Segment, Target
from tpkit.quant.codes import unpack
from tpkit_gptq.options import GptqOptions, Rule, read_gptq

if TYPE_CHECKING:
    from tpkit.quant import Dim

__all__ = ["Gptq"]

#: a word with a one in every field
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
INDICES = frozenset({"int32", "int64"})


class Gptq(QuantMethod):
    """The quant method ``gptq``."""

    Options = GptqOptions

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return read_gptq(config)

    def rule(self, target: Target) -> tuple[bool, Rule] | None:
        """Returns the first rule that matches a module, and whether the module is quantised at all."""
        for key, rule in self.options.dynamic.items():
            if target.matches([f"re:{key[2:] if key[:2] in ('+:', '-:') else key}"]):
                return not key.startswith("-:"), rule
        return None

    def for_module(self, target: Target) -> QuantMethod | None:
        options = self.options
        if target.kind == "embedding" or (target.kind == "head" and not options.lm_head):
            return None
        quantised, rule = self.rule(target) or (True, Rule())
        if not quantised:
            return None
        blocks, modules = options.block_name_to_quantize, options.modules_in_block_to_quantize
        if target.kind == "linear":
            if blocks is not None and not target.matches([name.strip() for name in blocks.split(",")], "prefix"):
                return None
            if modules is not None and not target.matches(modules, "component"):
                return None
        if modules is None and "weight" in target.stored and "qweight" not in target.stored:
            return None  # quantisers leave routers and the like as they are, and say so nowhere
        own = rule.model_dump(exclude_none=True)
        return type(self)(options.model_copy(update=own)) if own else self

    def label(self) -> str:
        options = self.options
        group = "all inputs" if options.group_size == -1 else f"g{options.group_size}"
        return f"{options.bits} bit {group}{' act-order' if options.desc_act else ''}"

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        options, size = self.options, layer.in_features
        bits = options.bits
        per, cells = 32 // gcd(32, bits), bits // gcd(32, bits)  # 3 bits: 32 values in 3 words
        groups = 1 if options.group_size == -1 else -(-size // options.group_size)
        ordered = options.desc_act and groups > 1
        # in activation order any input may be of any group: every rank holds all of them
        group: Dim = Fixed(groups) if ordered or groups == 1 else In(block=options.group_size)
        found = {
            "qweight": ParamSpec("int32", dims=(In(per=per, cells=cells), Out())),
            "qzeros": ParamSpec("int32", dims=(group, Out(per=per, cells=cells))),
            "scales": ParamSpec(layer.dtype_of("scales", "float16"), dims=(group, Out())),
        }
        index = layer.dtype_of("g_idx", "int32", INDICES)
        if ordered:
            found["g_idx"] = ParamSpec(index, dims=(Segment(), In()))
        elif layer.header("g_idx"):
            found["g_idx"] = ParamSpec(index, dims=(Segment(), Fixed(size)))  # whole, to be checked, then dropped
        return found

    def process_weights_after_loading(self, layer: Any) -> None:
        """Checks g_idx; drops it where it says no more than the size of a group.

        Raises:
            CheckpointError: if it names a group that there is not, or another order than the config says.
        """
        g_idx, groups = getattr(layer, "g_idx", None), layer.scales.shape[0]
        if g_idx is None:
            return
        name = layer.path or "a layer"
        if self.options.desc_act and groups > 1:
            if g_idx.shape[1] > self.options.group_size > 0 and not bool(g_idx.any()):
                raise CheckpointError(
                    f"{name}: g_idx puts all {g_idx.shape[1]} inputs of this rank into group 0 of {groups}; it was "
                    "never filled in",
                    hint="say desc_act: false if the inputs are in order of their groups",
                )
            if g_idx.numel() and not 0 <= int(g_idx.min()) <= int(g_idx.max()) < groups:
                raise CheckpointError(
                    f"{name}: g_idx has values {int(g_idx.min())} to {int(g_idx.max())}, there are {groups} groups"
                )
            return
        size = self.options.group_size
        inputs = torch.arange(g_idx.shape[1], device=g_idx.device)
        plain = inputs // size if size != -1 else inputs * 0
        wrong = (g_idx != plain).nonzero()
        if wrong.numel() and g_idx.count_nonzero():  # all zero: never filled in, as ExLlamaV2 takes it too
            row, k = wrong[0].tolist()
            raise CheckpointError(
                f"{name}: g_idx puts input {k} into group {int(g_idx[row, k])}, by group_size {size} it is in "
                f"{int(plain[k])}: its inputs are in activation order",
                hint="the config says desc_act: false; say desc_act: true to use g_idx",
            )
        layer.drop("g_idx")

    def _zeros(self, layer: Any) -> torch.Tensor:
        """Returns zero points uint8 ``[groups, out]``."""
        bits, words, less = self.options.bits, layer.qzeros, self.options.checkpoint_format == "gptq"
        borrowed = less and self.options.borrowed and bits in ONES
        if borrowed:
            words = words + ONES[bits]  # over the whole word: the carries undo the borrows
        zeros: torch.Tensor = layer.trim("qzeros", unpack(words, bits, 1))
        return (zeros + 1) & ((1 << bits) - 1) if less and not borrowed else zeros

    def dequantize(self, layer: Any) -> torch.Tensor:
        values: torch.Tensor = layer.trim("qweight", unpack(layer.qweight, self.options.bits, 0)).float()
        zeros, scales = self._zeros(layer), layer.scales.float()
        g_idx = getattr(layer, "g_idx", None)
        if g_idx is None:
            weight: torch.Tensor = (values - layer.expand("qzeros", zeros)) * layer.expand("scales", scales)
            return weight.t()
        rows = torch.bincount(layer.segment_of_row(), minlength=len(g_idx)).tolist()
        parts = zip(*(torch.split(each, rows, 1) for each in (values, zeros, scales)), g_idx.long(), strict=True)
        return torch.cat([(v - z[order]) * s[order] for v, z, s, order in parts], 1).t()
