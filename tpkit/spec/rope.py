"""Which ways of scaling rotary frequencies are known, and what each of them needs in config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tpkit.errors import SpecError, did_you_mean
from tpkit.spec.problems import shown

__all__ = ["SCALINGS", "check_scaling"]

#: kind -> the numbers it needs; a new kind is a new row here and its formula in the rotary layer
SCALINGS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
#: written beside the scaling in newer configs, read as fields of their own
_SIBLINGS = ("rope_theta", "partial_rotary_factor")


def check_scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns a scaling in one spelling, ``{"rope_type": kind, ...numbers}``; None where nothing is scaled.

    Args:
        scaling: ``rope_scaling`` or ``rope_parameters`` of config.json, in the old spelling (``type``) or the new one
            (``rope_type``).

    Raises:
        SpecError: for a kind that is not known, two kinds at once, or numbers missing or senseless. Never a warning:
            a model with the wrong frequencies still speaks, only worse.
    """
    if scaling is None:
        return None
    kind = _kind(scaling)
    numbers = {key: value for key, value in scaling.items() if key not in ("type", "rope_type", *_SIBLINGS)}
    if kind is None or kind == "default":
        if any(value is not None for value in numbers.values()):
            raise SpecError(
                f"rope scaling {shown(dict(scaling))} gives numbers but no kind to use them",
                hint="add rope_type, or remove the numbers",
            )
        return None
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise SpecError(
            f"rope scaling of kind {kind!r} is not known{did_you_mean(str(kind), SCALINGS)}; "
            f"supported: default, {', '.join(SCALINGS)}"
        )
    needed = SCALINGS[kind]
    missing = [key for key in needed if numbers.get(key) is None]
    if missing:
        raise SpecError(f"rope scaling {kind!r} needs {', '.join(needed)}; missing: {', '.join(missing)}")
    unknown = [key for key, value in numbers.items() if key not in needed and value is not None]
    if unknown:
        raise SpecError(f"rope scaling {kind!r} has no {', '.join(unknown)}; it knows: {', '.join(needed)}")
    _check_numbers(kind, {key: numbers[key] for key in needed})
    return {"rope_type": kind, **{key: numbers[key] for key in needed}}


def _kind(scaling: Mapping[str, Any]) -> Any:
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise SpecError("rope scaling that differs by layer type is not supported")
    old, new = scaling.get("type"), scaling.get("rope_type")
    if old is not None and new is not None and old != new:
        raise SpecError(f"rope scaling says type {old!r} and rope_type {new!r}", hint="keep the one that is meant")
    return new if new is not None else old


def _check_numbers(kind: str, numbers: Mapping[str, Any]) -> None:
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise SpecError(f"rope scaling {kind!r}: {key} must be a positive number, not {shown(value)}")
    if numbers["factor"] < 1:
        raise SpecError(f"rope scaling {kind!r}: factor must be at least 1, not {numbers['factor']}")
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
        raise SpecError(f"rope scaling 'llama3': low_freq_factor {low} must be less than high_freq_factor {high}")
