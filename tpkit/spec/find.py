"""Finds descriptions by path or by name, and reads config.json files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tpkit.errors import CheckpointError, SpecError, did_you_mean
from tpkit.registry import Registry
from tpkit.spec.data import Data, Mark, from_python
from tpkit.spec.yaml12 import read_yaml

__all__ = ["description_folders", "description_names", "read_config", "read_source"]

SUFFIXES = (".yaml", ".yml")


def read_source(source: str | os.PathLike[str] | Mapping[str, Any], registry: Registry) -> tuple[str, Data]:
    """Returns a description's name for messages and its data.

    Args:
        source: a path, the name of a description that is installed (with or without .yaml), or a mapping.
        registry: offers the folders of installed descriptions.

    Raises:
        SpecError: if there is no such description, or it is no YAML.
    """
    if isinstance(source, Mapping):
        return "description", from_python(source, Mark("description"))
    path = _find(os.fspath(source), registry)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {error}") from None
    return str(path), read_yaml(text, str(path))


def _find(source: str, registry: Registry) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    folders = list(description_folders(registry))
    if path.name == source:
        names = [source] if path.suffix in SUFFIXES else [f"{source}{suffix}" for suffix in SUFFIXES]
        for folder in folders:
            for name in names:
                if (folder / name).is_file():
                    return folder / name
    known = description_names(registry)
    looked = "".join(f"\n  {where}" for where in [path.absolute(), *folders])
    guess = did_you_mean(path.stem, known)
    raise SpecError(
        f"no description {source!r}{guess}; looked for\n  a file or one of the installed folders:{looked}",
        hint=f"installed descriptions: {', '.join(known) or 'none'}",
    )


def description_folders(registry: Registry) -> Iterator[Path]:
    """Yields the folders of all installed descriptions, the built-in ones last."""
    builtin = Path(__file__).parents[2] / "model_configs"
    seen = set()
    for plugin in registry.listing():
        if plugin.kind == "model configs":
            try:
                found = find_spec(plugin.value)
            except (Exception, SystemExit):  # its parent package is imported: whatever that does is no reason to stop
                found = None
            for place in (found.submodule_search_locations or ()) if found else ():
                if place not in seen and Path(place).is_dir():
                    seen.add(place)
                    yield Path(place)
    if str(builtin) not in seen and builtin.is_dir():
        yield builtin


def description_names(registry: Registry) -> list[str]:
    """Returns the names of all installed descriptions, sorted."""
    return sorted(
        {p.stem for folder in description_folders(registry) for p in folder.iterdir() if p.suffix in SUFFIXES}
    )


def read_config(
    config: str | os.PathLike[str] | Mapping[str, Any] | None, registry: Registry
) -> tuple[str, dict[str, Any], Path | None]:
    """Returns where a config.json was read from, its content, and the folder it lies in; nothing for None.

    A checkpoint of a format that carries its own metadata (a GGUF file) is asked for them.

    Raises:
        SpecError: if there is no such file, or it is no JSON object.
        CheckpointError: if the checkpoint is damaged.
    """
    if config is None:
        return "", {}, None
    if isinstance(config, Mapping):
        return "config", dict(config), None
    path = Path(config)
    own = _own_config(path, registry)
    if own is not None:
        return str(path), dict(own), None
    path = path.parent if path.is_file() and path.suffix != ".json" else path
    path = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except FileNotFoundError:
        raise SpecError(f"there is no {path}", hint="config is a checkpoint folder, or a config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise SpecError(f"{path} is no JSON object")
    return str(path), found, path.parent


def _own_config(path: Path, registry: Registry) -> Mapping[str, Any] | None:
    """Returns what a checkpoint says of itself: it goes before a config.json that happens to lie beside it."""
    if path.suffix == ".json" or not path.exists():
        return None
    if path.is_dir() and (any(path.glob("*.safetensors")) or not any(path.iterdir())):
        return None  # safetensors carry no config
    from tpkit.checkpoint.open import open_checkpoint

    try:
        return open_checkpoint(path, registry).config
    except CheckpointError:
        if path.is_dir() and (path / "config.json").is_file():
            return None  # a folder with a config.json and no weights serves too
        raise


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return found
