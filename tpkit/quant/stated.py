"""What is said of a model's quantisation, and who says it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpkit.errors import SpecError, did_you_mean

__all__ = ["Stated", "stated_beside", "stated_in", "stated_in_folder", "stated_word"]

#: keys of config.json, in the order of their age
KEYS = ("quantization_config", "compression_config")
#: files of quantisers beside config.json, and whose they are where they do not say it
SIDE_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}


@dataclass(frozen=True, kw_only=True)
class Stated:
    """One source's word.

    Attributes:
        source: where it stands, for messages.
        method: registry name of the method; None: it only says how to treat whichever it is.
        options: of the method.
        foreign: they are a quantiser's own words, which `QuantMethod.read_config` translates.
        dequantize: hold dense weights; None: not said.
        accept: options in files that may be left out though the method does not know them.
    """

    source: str
    method: str | None
    options: Mapping[str, Any] = field(default_factory=dict)
    foreign: bool = False
    dequantize: bool | None = None
    accept: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.source} says {self.method or 'nothing of the method'}"


def stated_word(value: Any, source: str) -> Stated:
    """Returns what ``quant:`` of a description, or ``--quant``, says: a name, or a mapping with ``method``.

    Raises:
        SpecError: if it is neither.
    """
    if isinstance(value, str) and value:
        return Stated(source=source, method=value)
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise SpecError(f"{source}: {value!r} is neither the name of a quant method nor a mapping with one")
    rest = dict(value)
    method, dequantize, accept = rest.pop("method", None), rest.pop("dequantize", None), rest.pop("accept", [])
    if method is not None and not isinstance(method, str):
        raise SpecError(f"{source}: method: {method!r} is no name")
    if dequantize is not None and not isinstance(dequantize, bool):
        raise SpecError(f"{source}: dequantize: {dequantize!r} is neither true nor false")
    if not isinstance(accept, list) or not all(isinstance(key, str) for key in accept):
        raise SpecError(f"{source}: accept: {accept!r} is no list of options")
    if method is None and rest:
        near = "".join(did_you_mean(key, ("method", "dequantize", "accept")) for key in sorted(rest))
        raise SpecError(f"{source}: options {sorted(rest)} without a method{near}", hint="say method: NAME beside them")
    return Stated(source=source, method=method, options=rest, dequantize=dequantize, accept=tuple(accept))


def stated_in(config: Mapping[str, Any], source: str, inner: str = "") -> list[Stated]:
    """Returns what a config.json says, at its top and in the language model's part of it.

    Args:
        config: the whole of it.
        source: its path.
        inner: key of the language model's part.

    Raises:
        SpecError: if it says something that names no method.
    """
    found = []
    part = config.get(inner) if inner else None
    for prefix, where in (("", config), (f"{inner}.", part if isinstance(part, Mapping) else {})):
        for key in KEYS:
            value = where.get(key)
            if value:
                found.append(_foreign(value, f"{source} {prefix}{key}", None))
    return found


def stated_in_folder(folder: Path) -> list[Stated]:
    """Returns what the config.json in a folder and the quantisers' own files beside it say.

    Raises:
        SpecError: if one cannot be read.
    """
    file = folder / "config.json"
    found = []
    if file.is_file():
        content = _read(file)
        inner = [key for key, value in content.items() if key.endswith("text_config") and isinstance(value, Mapping)]
        found = stated_in(content, str(file), inner[0] if inner else "")
    return found + stated_beside(folder)


def stated_beside(folder: Path) -> list[Stated]:
    """Returns what the quantisers' own files in a folder say.

    Raises:
        SpecError: if one cannot be read.
    """
    found = []
    for name, method in SIDE_FILES.items():
        file = folder / name
        if not file.is_file():
            continue
        content = _read(file)
        if isinstance(content.get("quantization"), Mapping):
            content = {"producer": content.get("producer"), **content["quantization"]}
        found.append(_foreign(content, str(file), method))
    return found


def _read(file: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as cause:
        raise SpecError(f"{file} cannot be read as JSON: {cause}") from None
    if not isinstance(content, Mapping):
        raise SpecError(f"{file} is no JSON object")
    return content


def _foreign(value: Any, source: str, method: str | None) -> Stated:
    if not isinstance(value, Mapping):
        raise SpecError(f"{source} is no mapping, but {value!r:.80}")
    producer = value.get("producer")
    named = value.get("quant_method") or (producer.get("name") if isinstance(producer, Mapping) else method)
    if not isinstance(named, str) or not named:
        raise SpecError(f"{source} names no quant_method", hint="it must be a mapping with one")
    options = {key: entry for key, entry in value.items() if key not in ("quant_method", "producer")}
    return Stated(source=source, method=named, options=options, foreign=True)
