"""``tpkit check``: everything that is wrong with a description, and how it fits a config.json and weights."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from tpkit.cli.common import add_description_arguments, config_of, overrides_of, pick, quant_of

if TYPE_CHECKING:
    from tpkit.checking import Stage

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_description_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints what was checked and every problem; ends as building would with the first of them."""
    from tpkit.checking import check

    config = config_of(args)
    pick(args, config)
    stages = check(
        args.description,
        config=config,
        checkpoint=args.checkpoint,
        overrides=overrides_of(args.overrides),
        quant=quant_of(args.quant),
    )
    sys.stdout.write(_as_json(str(args.description), stages) if args.json else _as_text(stages, config is None))
    return max(stage.exit_code for stage in stages)


def _as_json(description: str, stages: list[Stage]) -> str:
    rows = [
        {
            "stage": stage.name,
            "ok": not stage.exit_code,
            "facts": stage.facts,
            "problems": stage.problems,
            **({"hint": stage.hint} if stage.hint else {}),
        }
        for stage in stages
    ]
    fine = not any(stage.exit_code for stage in stages)
    answer = {"schema": 1, "description": description, "ok": fine, "stages": rows}
    return json.dumps(answer, indent=2) + "\n"


def _as_text(stages: list[Stage], alone: bool) -> str:
    lines = []
    for stage in stages:
        count = len(stage.problems)
        verdict = f"{count} problem{'s' * (count != 1)}" if count else "fine"
        lines.append(f"{stage.name:12} {verdict}")
        lines += [f"  {fact}" for fact in stage.facts]
        lines += [f"  {problem}" for problem in stage.problems]
        lines += [f"  hint: {stage.hint}"] if stage.hint else []
    if alone and not stages[-1].exit_code:
        lines.append("checked alone, in all branches; --config and --checkpoint check it against a model")
    return "\n".join(lines) + "\n"
