"""AutoRound's own configuration (``quant_method: auto-round``) of weights that are laid out as GPTQ's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tpkit import PluginError
from tpkit.quant import QuantMethod, Target
from tpkit_gptq.method import Gptq
from tpkit_gptq.options import expect, read_gptq

__all__ = ["AutoRound"]

#: packing formats -> how zero points are stored, see auto_round/inference/backend.py
FORMATS = {
    "auto": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:auto_gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
}


class AutoRound(Gptq):
    """Weights of AutoRound in one of its GPTQ packings. Its scales may be negative."""

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options that a quantization_config of AutoRound states.

        Raises:
            PluginError: for another packing, or quantised activations.
        """
        rest = dict(config)
        packing = rest.pop("packing_format", None)
        if packing is None and rest.get("backend") not in (None, "auto", "auto_gptq", "auto_round:auto_gptq"):
            # early exports stored zero points as they are, and said so by this word alone
            raise PluginError(
                f"AutoRound config: there is no packing_format, and backend is {rest['backend']!r}",
                hint="name the method gptq and its checkpoint_format: gptq_v2 if zero points are stored as they are",
            )
        packing = packing or "auto_round:auto_gptq"
        if packing not in FORMATS:
            hint = "AWQ's layout is read by the quant method awq" if "awq" in str(packing) else None
            raise PluginError(f"AutoRound packing_format {packing!r} is not one of {', '.join(FORMATS)}", hint=hint)
        extra = rest.pop("extra_config", None) or {}
        blocks = rest.pop("to_quant_block_names", None)
        rest["block_name_to_quantize"] = rest.get("block_name_to_quantize") or blocks
        weights_only(rest)
        options = read_gptq({**rest, "checkpoint_format": FORMATS[packing]})
        if extra:
            # an entry by name goes before one by pattern, wherever it stands
            rules = sorted(extra.items(), key=lambda rule: _is_regex(rule[0]))
            options["dynamic"] = dict(_rule(*rule) for rule in rules)
        return {**options, "lm_head": True}  # if a rule says so, see `for_module`

    def for_module(self, target: Target) -> QuantMethod | None:
        if target.kind == "head" and self.rule(target) is None:
            return None
        return super().for_module(target)


def weights_only(config: dict[str, Any]) -> None:
    """Takes off what is said of activations.

    Raises:
        PluginError: if they are quantised.
    """
    if (config.get("act_bits") or 16) < 16:
        raise PluginError(
            f"AutoRound config: activations have {config['act_bits']} bits; this plugin reads quantised weights"
        )
    for key in ("act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym"):
        config.pop(key, None)


def _is_regex(name: str) -> bool:
    return re.search(r"[^\w.-]", name) is not None


def _rule(name: str, said: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Translates an entry of extra_config: its name is searched for as a pattern if it is no plain name."""
    pattern = f".*?(?:{name})" if _is_regex(name) else f"{re.escape(name)}$"
    if (said.get("bits") or 4) > 8:
        return f"-:{pattern}", {}
    rule = {key: value for key, value in said.items() if value is not None}
    weights_only(rule)
    expect(rule, "data_type", ("int",))
    return f"+:{pattern}", rule
