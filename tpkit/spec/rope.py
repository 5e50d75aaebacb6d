"""Which ways of scaling rotary frequencies are known, and what each of them needs in config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpkit.errors import SpecError, did_you_mean
from tpkit.spec.problems import shown

__all__ = ["SCALINGS", "Kind", "check_scaling", "with_lengths"]

_ORIGINAL = "original_max_position_embeddings"
_RAMP = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a kind of scaling reads.

    Attributes:
        needs: keys that it cannot be without.
        takes: keys that it may have.
        ignores: keys that config.json files write beside it and that mean nothing for it.
    """

    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()


#: kind -> what it reads; a new kind is a new row here and its formula in the rotary layer
SCALINGS: dict[str, Kind] = {
    "linear": Kind(needs=("factor",), ignores=(_ORIGINAL,)),
    # a fixed base ("alpha") is written under the same name as the one that follows the length, with leftovers of yarn
    "dynamic": Kind(takes=("factor", "alpha"), ignores=(_ORIGINAL, *_RAMP)),
    "llama3": Kind(needs=("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)),
    # the temperature of queries (llama_4_scaling_beta) is written here and read by attention
    "yarn": Kind(
        takes=("factor", _ORIGINAL, "attention_factor", *_RAMP, "truncate"),
        ignores=("finetuned", "llama_4_scaling_beta", "max_position_embeddings"),
    ),
    "longrope": Kind(
        needs=("short_factor", "long_factor"),
        takes=("factor", "attention_factor", "short_mscale", "long_mscale", _ORIGINAL),
    ),
    "proportional": Kind(takes=("factor",)),
}
#: older names; positions of text are the same in every section of "mrope", which is no scaling then
_ALIASES = {"su": "longrope", "mrope": "default"}
#: written beside the scaling, whatever its kind: fields of their own, and which sections the positions of images have
_SIBLINGS = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
_LISTS = ("short_factor", "long_factor")
_MAY_BE_ZERO = ("mscale", "mscale_all_dim")


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
    numbers = {
        key: value
        for key, value in scaling.items()
        if key not in ("type", "rope_type", *_SIBLINGS) and value is not None
    }
    if kind is None or kind == "default":
        if numbers:
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
    known = SCALINGS[kind]
    missing = [key for key in known.needs if key not in numbers]
    if missing:
        raise SpecError(f"rope scaling {kind!r} needs {', '.join(known.needs)}; missing: {', '.join(missing)}")
    unknown = [key for key in numbers if key not in (*known.needs, *known.takes, *known.ignores)]
    if unknown:
        raise SpecError(
            f"rope scaling {kind!r} has no {', '.join(unknown)}; it knows: {', '.join((*known.needs, *known.takes))}"
        )
    used = {key: numbers[key] for key in (*known.needs, *known.takes) if key in numbers}
    for key, value in used.items():
        _check_value(kind, key, value)
    _check_together(kind, numbers, used)
    return {"rope_type": kind, **used}


def with_lengths(
    scaling: Mapping[str, Any] | None, *, original_length: int | None = None, max_length: int | None = None
) -> dict[str, Any] | None:
    """Returns a checked scaling with the lengths and the factor that config.json gives outside of it.

    Args:
        scaling: what `check_scaling` returned.
        original_length: tokens that the model was trained on before it was extended.
        max_length: tokens that it takes now, or before its frequencies change with the length ("dynamic").

    Raises:
        SpecError: for a length that is needed and given nowhere, or given twice and not the same.
    """
    if scaling is None:
        return None
    kind, found = scaling.get("rope_type"), dict(scaling)
    if kind == "dynamic" and "alpha" not in found:
        found["max_position_embeddings"] = _length(kind, "max_length", max_length)
    if kind not in ("yarn", "longrope"):
        return found
    within = found.get(_ORIGINAL)
    if within is not None and original_length is not None and within != original_length:
        raise SpecError(
            f"rope scaling {kind!r} says {_ORIGINAL} {within}, but original_length is {original_length}",
            hint="keep the one that is meant",
        )
    original = found[_ORIGINAL] = _length(kind, "original_length", within if within is not None else original_length)
    # longrope reads its factor only to know what to multiply cosine and sine with
    free = kind == "longrope" and ("attention_factor" in found or "short_mscale" in found)
    if "factor" not in found and not free:
        found["factor"] = _length(kind, "max_length", max_length) / original
        if kind == "yarn" and found["factor"] < 1:
            raise SpecError(f"rope scaling 'yarn': max_length {max_length} is less than {_ORIGINAL} {original}")
    if kind == "longrope" and not free and original <= 1:
        raise SpecError(f"rope scaling 'longrope': {_ORIGINAL} must be more than 1, not {original}")
    return found


def _length(kind: Any, word: str, value: Any) -> Any:
    if value is None:
        other = f" and no {_ORIGINAL} of its own" if word == "original_length" else ""
        unless = " and no factor" if word == "max_length" and kind != "dynamic" else ""
        raise SpecError(
            f"rope scaling {kind!r} has no {word}{other}{unless}", hint=f"let the description's rope say {word}"
        )
    return value


def _kind(scaling: Mapping[str, Any]) -> Any:
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise SpecError("rope scaling that differs by layer type is not supported")
    old, new = (_named(scaling.get(key)) for key in ("type", "rope_type"))
    if old is not None and new is not None and old != new:
        raise SpecError(f"rope scaling says type {old!r} and rope_type {new!r}", hint="keep the one that is meant")
    return new if new is not None else old


def _named(kind: Any) -> Any:
    return _ALIASES.get(kind, kind) if isinstance(kind, str) else kind


def _check_value(kind: str, key: str, value: Any) -> None:
    if key == "truncate":
        if not isinstance(value, bool):
            raise SpecError(f"rope scaling {kind!r}: {key} must be true or false, not {shown(value)}")
        return
    if key in _LISTS:
        if not isinstance(value, (list, tuple)) or not value or not all(_number(entry) for entry in value):
            raise SpecError(f"rope scaling {kind!r}: {key} must be a list of positive numbers, not {shown(value)}")
        return
    if not _number(value, zero=key in _MAY_BE_ZERO):
        positive = "number from 0" if key in _MAY_BE_ZERO else "positive number"
        raise SpecError(f"rope scaling {kind!r}: {key} must be a {positive}, not {shown(value)}")


def _number(value: Any, *, zero: bool = False) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    return value > 0 or (zero and value == 0)


def _check_together(kind: str, numbers: Mapping[str, Any], used: dict[str, Any]) -> None:
    """Checks numbers against each other, and drops the factor that a fixed base leaves without a meaning."""
    if kind == "dynamic":
        if "alpha" in used:
            used.pop("factor", None)
        elif "factor" not in used:
            raise SpecError("rope scaling 'dynamic' needs factor or alpha")
        elif leftover := [key for key in numbers if key not in ("factor", _ORIGINAL)]:
            raise SpecError(f"rope scaling 'dynamic' with a factor has no {', '.join(leftover)}; it knows: factor")
    if used.get("factor", 1) < 1:
        raise SpecError(f"rope scaling {kind!r}: factor must be at least 1, not {used['factor']}")
    low, high = used.get("low_freq_factor", 1), used.get("high_freq_factor", 4)
    if low >= high:
        raise SpecError(f"rope scaling {kind!r}: low_freq_factor {low} must be less than high_freq_factor {high}")
    fast, slow = used.get("beta_fast", 32), used.get("beta_slow", 1)
    if fast < slow:
        raise SpecError(f"rope scaling {kind!r}: beta_fast {fast} must not be less than beta_slow {slow}")
    if len(used.get("short_factor", ())) != len(used.get("long_factor", ())):
        short, long = len(used["short_factor"]), len(used["long_factor"])
        raise SpecError(f"rope scaling {kind!r}: {short} numbers in short_factor, but {long} in long_factor")
    mscales = [key for key in ("short_mscale", "long_mscale") if key in used]
    if len(mscales) == 1 or (mscales and "attention_factor" in used):
        raise SpecError(
            f"rope scaling {kind!r} needs short_mscale and long_mscale, or attention_factor, or none of them; "
            f"it has {', '.join(key for key in used if key in ('attention_factor', *mscales))}"
        )
