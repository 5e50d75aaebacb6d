"""``tpkit init``: a description to begin with, drafted from config.json and the names of a checkpoint's tensors."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tpkit.errors import UsageError

if TYPE_CHECKING:
    from tpkit.checkpoint.stored import Checkpoint
    from tpkit.drafting.names import Shape

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("model", metavar="FOLDER", type=Path, help="folder with config.json, or a config.json")
    parser.add_argument("--out", metavar="FILE", type=Path, help="where to write it (default: MODEL_TYPE.yaml here)")


def run(args: argparse.Namespace) -> int:
    """Names the installed description that serves the model, or drafts one."""
    from tpkit.registry import Registry
    from tpkit.spec.find import read_config
    from tpkit.spec.match import claims, matching, one_of

    registry = Registry.default()
    source, config, folder = read_config(args.model, registry)
    found, broken = claims(registry)
    for line in broken:
        sys.stderr.write(f"not looked at: {line}\n")
    place = folder or args.model
    if matched := matching(config, found):
        claim = one_of(matched, args.model, registry, whole=config, source=source, folder=folder)
        sys.stdout.write(
            f"{claim.name} describes this model ({claim.path}); nothing is drafted\n\n{_next('auto', place)}"
        )
        return 0
    return _draft(args, config, source, place)


def _draft(args: argparse.Namespace, config: dict[str, object], source: str, place: Path) -> int:
    from tpkit.checkpoint.names import names_in
    from tpkit.drafting import draft

    stored = names_in(place)
    made = draft(config, _shapes(stored), source)
    out: Path = args.out if args.out is not None else Path(f"{made.family}.yaml")
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(made.text)
    except FileExistsError:
        raise UsageError(f"{out} exists", hint="nothing is overwritten: choose another file with --out") from None
    except OSError as cause:
        raise UsageError(f"{out} cannot be written: {cause}") from cause
    what = f"{len(stored.tensors)} tensors" if stored is not None else "no tensors: their names are unknown"
    questions = "\n".join(f"  {number}. {text}" for number, text in enumerate(made.questions, 1))
    sys.stdout.write(
        f"drafted {out} from {source} and {what}\n\n"
        f"open questions, to be answered from the model's own code (they are in the file too):\n{questions}\n\n"
        f"{_next(str(out), place, checked=False, weights=stored is not None)}"
    )
    return 0


def _shapes(stored: Checkpoint | None) -> dict[str, Shape] | None:
    from tpkit.checkpoint.names import has_names_only

    if stored is None:
        return None
    bare = has_names_only(stored)
    return {name: None if bare else each.shape for name, each in stored.tensors.items()}


def _next(description: str, place: Path, checked: bool = True, weights: bool = True) -> str:
    option = "--checkpoint" if weights else "--config"
    first = f"  tpkit check {description} {option} {place}\n"
    then = f'  tpkit build {description} --checkpoint {place} --prompt "..."\n'
    return "next:\n" + (then if checked else first + then)
