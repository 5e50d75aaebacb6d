"""Decides between descriptions by the names of a checkpoint's tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpkit.errors import TpkitError
from tpkit.registry import Registry
from tpkit.spec import load_spec

if TYPE_CHECKING:
    from tpkit.checkpoint.stored import Checkpoint
    from tpkit.spec.match import Claim

__all__ = ["by_names"]


def by_names(
    matched: list[Claim], config: str | os.PathLike[str] | Mapping[str, Any], folder: Path | None, registry: Registry
) -> list[Claim]:
    """Keeps the descriptions whose tensors are all found, and of these the ones that leave no module unread.

    Args:
        matched: what to choose from.
        config: what they are bound to.
        folder: where the weights or their index may lie.
        registry: for what their trees name.

    Returns:
        The ones that fit best; all of them where there are no names, or none fits.
    """
    from tpkit.checkpoint.names import names_in

    stored = names_in(folder) if folder is not None else None
    if stored is None:
        return matched
    whole: list[Claim] = []
    complete: list[Claim] = []
    for claim in matched:
        found, unread = _fit(claim, config, stored, registry)
        whole += [claim] if found else []
        complete += [claim] if found and not unread else []
    return complete or whole or matched


def _fit(
    claim: Claim, config: str | os.PathLike[str] | Mapping[str, Any], stored: Checkpoint, registry: Registry
) -> tuple[bool, bool]:
    """Tells whether all modules of a description are stored, and whether some that are stored are not in it."""
    from tpkit.checkpoint.stored import matcher
    from tpkit.planning import prepare

    try:
        spec = load_spec(claim.path, config=config, registry=registry)
        prepared = prepare(spec, registry=registry)
    except TpkitError:  # a description that does not even bind is not the one
        return False, True
    forms = [layer.spec.forms for layer in prepared.planned]
    found = all(any(all(stored.has(source) for source in form) for form in each) for each in forms)
    forms += [tie.forms for tie in prepared.ties]
    read = {source.stem() for each in forms for form in each for source in form}
    rules = [matcher(rule) for rule in spec.ignore]
    rest = [name for name in stored.tensors if not read & _above(name)]
    return found, any(not any(rule.fullmatch(name) for rule in rules) for name in rest)


def _above(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
