"""Changes to a description made from outside, by dotted path, before it is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tpkit.errors import SpecError, did_you_mean
from tpkit.spec.data import Data, Items, Mark, Table, from_python
from tpkit.spec.header import Header

__all__ = ["apply_overrides", "split_overrides"]


def split_overrides(overrides: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits overrides into values of config fields (``config.<field>``) and changes to the description."""
    fields, changes = {}, {}
    for path, value in (overrides or {}).items():
        if path.startswith("config.") and path.count(".") == 1:
            fields[path.partition(".")[2]] = value
        else:
            changes[path] = value
    return fields, changes


def apply_overrides(data: Data, changes: Mapping[str, Any], fields: Mapping[str, Any]) -> Data:
    """Returns the description with values replaced.

    Args:
        data: the description.
        changes: new values by dotted path, e.g. ``tree.lm_head.disable_tp``.
        fields: values of config fields; only checked here to be declared.

    Raises:
        SpecError: for a path that leads nowhere.
    """
    config = data.get("config") if isinstance(data, Table) else None
    for name in fields:
        if isinstance(config, Table) and name not in config:
            raise SpecError(
                f"override config.{name}: the description declares no field {name!r}{did_you_mean(name, config)}",
                hint=f"its fields: {', '.join(config)}",
            )
    for path, value in changes.items():
        data = _replaced(data, path.split("."), path, from_python(value, Mark(f"override {path}")), "")
    return data


def _replaced(data: Data, parts: list[str], path: str, value: Data, above: str) -> Data:
    if not parts:
        return value
    first, rest = parts[0], parts[1:]
    below = f"{above}.{first}" if above else first
    if isinstance(data, Items):
        if not first.isdigit() or int(first) >= len(data.items):
            count = len(data.items)
            raise SpecError(f"override {path}: {above} is a list of {count}; {first!r} is none of its indices")
        items = list(data.items)
        items[int(first)] = _replaced(items[int(first)], rest, path, value, below)
        return replace(data, items=tuple(items))
    if not isinstance(data, Table):
        raise SpecError(f"override {path}: {above} is a value and has no {first!r}")
    known = _known(data, above)
    if first not in data and (rest or (not above and first not in known)):
        raise SpecError(
            f"override {path}: {above or 'the description'} has no {first!r}{did_you_mean(first, known)}",
            hint=f"it has: {', '.join(data)}",
        )
    entries = dict(data.entries)
    entries[first] = _replaced(entries[first], rest, path, value, below) if rest else value
    keys = {**data.keys, first: value.mark} if not rest else data.keys
    return replace(data, entries=entries, keys=keys)


def _known(data: Table, above: str) -> list[str]:
    if above:
        return list(data)
    return [*data, *(field.alias or name for name, field in Header.model_fields.items())]
