"""Finds the installed description that a config.json means, by what both say of themselves.

Only the identity of each description is read (who it serves); the trees are compiled of those few alone between which
the names in a checkpoint must decide.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tpkit.errors import SpecError, TpkitError
from tpkit.registry import Registry
from tpkit.spec import load_spec
from tpkit.spec.bound import BoundSpec
from tpkit.spec.data import Items, Scalar, Table, to_python
from tpkit.spec.find import SUFFIXES, description_folders, read_config
from tpkit.spec.reading import text_part
from tpkit.spec.yaml12 import read_yaml

__all__ = ["Claim", "Identity", "claims", "find_description", "find_spec", "identity_of", "matching", "one_of"]

#: top-level keys that say which models a description is of
_IDENTITY = ("architectures", "model_types", "stored_as")
_TOP_LEVEL = re.compile(r"^(?=[A-Za-z_]+:)", re.MULTILINE)
#: known names that an error quotes
NEAREST = 5


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What one installed description says it is of.

    Attributes:
        name: as ``tpkit build NAME`` takes it.
        path: its file.
        architectures: of its own, and those of larger models that hold the same tree.
        model_types: the kinds it serves.
        keys: keys of config.json under which it finds the language model's part.
    """

    name: str
    path: Path
    architectures: frozenset[str]
    model_types: frozenset[str]
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a config.json says it is.

    Attributes:
        architectures: its own, then those of the language model's part.
        model_types: of that part first: it is what the tree is of.
    """

    architectures: tuple[str, ...]
    model_types: tuple[str, ...]

    def __str__(self) -> str:
        kinds = ", ".join(self.model_types) or "not given"
        return f"architectures {', '.join(self.architectures) or 'not given'}; model_type {kinds}"


def find_spec(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | None = None,
    quant: str | Mapping[str, Any] | None = None,
    registry: Registry | None = None,
) -> BoundSpec:
    """Picks the installed description that a model's config.json means, and binds it.

    Architectures decide, then the model_type (that of the language model's part, if there is one), then, where a folder
    holds weights or their index, the names of the tensors.

    Args:
        config: a checkpoint folder, the path of a config.json, or its content.
        overrides: as `load_spec` takes them.
        quant: as `load_spec` takes it.
        registry: offers the folders of installed descriptions; None: what is installed.

    Returns:
        What `load_spec` returns for the description that was picked; ``source`` says which.

    Raises:
        SpecError: if no description, or more than one, is of this model; or for what `load_spec` refuses.

    Example:
        >>> tpkit.find_spec("checkpoint/").values["hidden_size"]
        576
    """
    found = find_description(config, registry=registry)
    return load_spec(found.path, config=config, overrides=overrides, quant=quant, registry=registry)


def find_description(config: str | os.PathLike[str] | Mapping[str, Any], *, registry: Registry | None = None) -> Claim:
    """Returns the one installed description that a config.json means; see `find_spec`."""
    registry = registry or Registry.default()
    source, whole, folder = read_config(config, registry)
    found, broken = claims(registry)
    matched = matching(whole, found)
    if not matched:
        raise _none(found, whole, source, broken)
    return one_of(matched, config, registry, whole=whole, source=source, folder=folder)


def one_of(
    matched: list[Claim],
    config: str | os.PathLike[str] | Mapping[str, Any],
    registry: Registry,
    *,
    whole: Mapping[str, Any],
    source: str,
    folder: Path | None,
) -> Claim:
    """Returns the one of some matching descriptions that a checkpoint's tensors are of.

    Args:
        matched: what `matching` returned, at least one.
        config: as `find_spec` takes it.
        registry: for what their trees name.
        whole, source, folder: what `read_config` made of `config`.

    Raises:
        SpecError: if several are left.
    """
    if len(matched) > 1:
        from tpkit.spec.names import by_names

        matched = by_names(matched, config, folder, registry)
    if len(matched) > 1:
        raise _several(matched, whole, source)
    return matched[0]


def claims(registry: Registry) -> tuple[list[Claim], list[str]]:
    """Returns what the installed descriptions say they are of, and what is wrong with those that cannot be read."""
    found: list[Claim] = []
    broken: list[str] = []
    for name, path in _files(registry):
        try:
            found.append(_claim(name, path))
        except (TpkitError, OSError, UnicodeDecodeError) as error:  # of a third party, perhaps: the others still serve
            broken.append(f"{path}: {str(error).splitlines()[0].removeprefix(f'{path} ')}")
    return found, broken


def matching(whole: Mapping[str, Any], found: Iterable[Claim]) -> list[Claim]:
    """Returns the descriptions that a config.json may mean: by architecture, else by model_type."""
    found = list(found)
    by_class = [claim for claim in found if claim.architectures & set(identity_of(whole, claim.keys).architectures)]
    if by_class:
        return _by_kind(by_class, whole) or by_class
    # a class that nobody claims may compute something else for the same model_type: a reward model, an encoder
    return [] if identity_of(whole).architectures else _by_kind(found, whole)


def _by_kind(found: list[Claim], whole: Mapping[str, Any]) -> list[Claim]:
    """Returns those that serve the innermost model_type that any of them serves."""
    for depth in range(2):
        kinds = [(claim, identity_of(whole, claim.keys).model_types[depth : depth + 1]) for claim in found]
        kept = [claim for claim, kind in kinds if claim.model_types & set(kind)]
        if kept:
            return kept
    return []


def identity_of(whole: Mapping[str, Any], keys: Iterable[str] = ()) -> Identity:
    """Returns what a config.json says it is; `keys` are further places of the language model's part."""
    _, part = text_part(whole, list(keys))
    classes = [*_texts(whole.get("architectures")), *_texts(part.get("architectures"))]
    kinds = [kind for kind in (part.get("model_type"), whole.get("model_type")) if isinstance(kind, str)]
    return Identity(architectures=tuple(dict.fromkeys(classes)), model_types=tuple(dict.fromkeys(kinds)))


def _texts(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, (list, tuple)) else []


def _files(registry: Registry) -> Iterator[tuple[str, Path]]:
    """Yields every installed description once, the one that its name means."""
    seen: set[str] = set()
    for folder in description_folders(registry):
        for suffix in SUFFIXES:
            for path in sorted(folder.glob(f"*{suffix}")):
                if path.stem not in seen:
                    seen.add(path.stem)
                    yield path.stem, path


def _claim(name: str, path: Path) -> Claim:
    table = _identity(path.read_text(encoding="utf-8"), str(path))
    stored = table.get("stored_as")
    entries = [entry for entry in (stored.items if isinstance(stored, Items) else ()) if isinstance(entry, Table)]
    wrapped = [to_python(entry.entries["architectures"]) for entry in entries if "architectures" in entry]
    keys = [entry.get("config") for entry in entries]
    own = _texts(to_python(table.entries["architectures"])) if "architectures" in table else []
    kinds = _texts(to_python(table.entries["model_types"])) if "model_types" in table else []
    if not own:
        raise SpecError(f"{path} names no architectures")
    return Claim(
        name=name,
        path=path,
        architectures=frozenset([*own, *(each for names in wrapped for each in _texts(names))]),
        model_types=frozenset(kinds),
        keys=tuple(str(key.value) for key in keys if isinstance(key, Scalar) and key.value is not None),
    )


def _identity(text: str, source: str) -> Table:
    """Returns the top-level keys that say what a description is of.

    Parsing whole files takes far longer than these few lines do; a file that is not written key by key is parsed whole.
    """
    parts = [part for part in _TOP_LEVEL.split(text) if part.startswith(tuple(f"{key}:" for key in _IDENTITY))]
    if parts:
        try:
            found = read_yaml("".join(parts), source)
            if isinstance(found, Table) and "architectures" in found:
                return found
        except SpecError:
            pass  # the lines are not what they look like alone; told with the right positions below
    whole = read_yaml(text, source)
    if not isinstance(whole, Table):
        raise SpecError(f"{source} is no description")
    return whole


def _several(matched: list[Claim], whole: Mapping[str, Any], source: str) -> SpecError:
    rows = [f"{c.name}: {c.path} ({', '.join(sorted(c.model_types)) or 'no model_types'})" for c in matched]
    return SpecError(
        f"{source or 'config.json'} ({identity_of(whole)}) is claimed by {len(matched)} descriptions:",
        problems=rows,
        hint=f"name the one that is meant instead of auto: {matched[0].name}, or its path",
    )


def _none(found: list[Claim], whole: Mapping[str, Any], source: str, broken: list[str]) -> SpecError:
    said = identity_of(whole, [key for claim in found for key in claim.keys])
    known = {name for claim in found for name in claim.architectures | claim.model_types}
    close = {
        name: None
        for word in (*said.architectures, *said.model_types)
        for name in get_close_matches(word, sorted(known), n=NEAREST, cutoff=0.6)
    }
    kin = [claim.name for claim in found if claim.model_types & set(said.model_types)]
    lines = [f"nearest known names: {', '.join(list(close)[:NEAREST]) or 'none'}"]
    lines += [f"{name} is of the same model_type, but not of this architecture" for name in kin]
    lines += [f"cannot be read, so it was not looked at: {line}" for line in broken]
    return SpecError(
        f"no installed description is of {source or 'this config.json'}: it says {said}",
        problems=lines,
        hint=f"`tpkit init {source or 'CONFIG'}` drafts a description; or name one that computes the same",
    )
