"""Arguments that several commands take, and the description they mean. Imports nothing heavy."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpkit.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from tpkit.spec.bound import BoundSpec

__all__ = [
    "add_description_arguments",
    "add_model_arguments",
    "check_ep",
    "config_of",
    "overrides_of",
    "pick",
    "quant_of",
    "spec_of",
    "split_of",
]

#: in the place of a description: the one that config.json means
AUTO = "auto"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say which model is meant."""
    add_description_arguments(parser)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"],
                        help="of the model; auto: the checkpoint's")  # fmt: skip
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="expert-parallel groups that the ranks form: "
                        "groups share the experts, ranks of a group divide each one's width (default 1)")  # fmt: skip
    parser.add_argument("--tp-split", metavar="W,W,...", help="a weight per rank, for unequal devices")


def add_description_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say which description is meant, and what it is bound to."""
    parser.add_argument("description", help="a description: a path, the name of an installed one (qwen3.yaml), or "
                        "auto: the installed one that config.json means")  # fmt: skip
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help="folder or file with the weights")
    parser.add_argument("--config", metavar="PATH", type=Path, help="config.json or its folder")
    parser.add_argument("--quant", metavar="METHOD", help="quant method, or YAML such as '{method: gptq, bits: 4}' or "
                        "'{dequantize: true}'; it must agree with what the checkpoint says")  # fmt: skip
    parser.add_argument("--set", metavar="PATH=VALUE", action="append", default=[], dest="overrides",
                        help="override, e.g. config.num_hidden_layers=2 or tree.lm_head.disable_tp=true")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else")


def check_ep(args: argparse.Namespace) -> None:
    """Checks ``--ep`` by itself, before it may stand for the number of ranks.

    Raises:
        UsageError: if it is no number of groups.
    """
    if args.ep < 1:
        raise UsageError(f"--ep {args.ep}: at least one group is needed")


def split_of(args: argparse.Namespace) -> list[float] | None:
    """Returns the weights of ``--tp-split``."""
    if args.tp_split is None:
        return None
    try:
        return [float(word) for word in args.tp_split.split(",")]
    except ValueError:
        raise UsageError(f"--tp-split {args.tp_split}: numbers separated by commas are needed") from None


def config_of(args: argparse.Namespace) -> Path | None:
    """Returns where config.json is looked for; None: the description's defaults are meant."""
    if args.config is not None:
        return Path(args.config)
    if args.checkpoint is None:
        return None
    checkpoint = Path(args.checkpoint)
    if not checkpoint.exists():
        raise CheckpointError(f"no checkpoint at {checkpoint}: there is no such file or folder")
    return checkpoint


def spec_of(args: argparse.Namespace, config: Path | None) -> BoundSpec:
    """Returns the bound description that the arguments mean; `args.description` is no longer ``auto`` afterwards."""
    from tpkit.spec import load_spec

    pick(args, config)
    return load_spec(
        args.description, config=config, overrides=overrides_of(args.overrides), quant=quant_of(args.quant)
    )


def pick(args: argparse.Namespace, config: Path | None) -> None:
    """Puts the path of the installed description that config.json means in the place of ``auto``, and says which.

    A file of that name is meant by a path: ``./auto``.
    """
    if args.description != AUTO:
        return
    from tpkit.spec.match import find_description

    if config is None:
        raise UsageError("auto picks a description by config.json", hint="give --checkpoint or --config")
    found = find_description(config)
    args.description = str(found.path)
    if os.environ.get("RANK", "0") == "0":  # the ranks of a launcher all pick; one of them says so
        sys.stderr.write(f"auto: {found.name} ({found.path})\n")


def quant_of(text: str | None) -> Any:
    """Returns what ``--quant`` says, as a description would."""
    from tpkit.spec.data import to_python
    from tpkit.spec.yaml12 import read_yaml

    return None if text is None else to_python(read_yaml(text, "--quant"))


def overrides_of(words: Sequence[str]) -> dict[str, Any]:
    """Returns what ``--set`` gives, by path."""
    from tpkit.spec.yaml12 import scalar

    found: dict[str, Any] = {}
    for word in words:
        path, equals, value = word.partition("=")
        if not equals or not path:
            raise UsageError(f"--set {word}: PATH=VALUE is needed")
        found[path.strip()] = scalar(value.strip())
    return found
