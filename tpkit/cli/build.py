"""``tpkit build``: a model from its description and a checkpoint, on any number of ranks; with a prompt, text.

With ``--tp N`` the command plans first, so that what does not fit is told before a process is started; then it runs
itself as N ranks. Under ``torchrun`` it is one of the ranks that exist.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tpkit.cli.common import add_model_arguments, check_ep, config_of, pick, spec_of, split_of
from tpkit.distributed.rank import in_launcher
from tpkit.errors import UsageError

if TYPE_CHECKING:
    from tpkit.chat import TextCodec
    from tpkit.model import Model
    from tpkit.spec.bound import BoundSpec

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_model_arguments(parser)
    parser.add_argument(
        "--tp", type=int, metavar="N", help="number of ranks (default: those of torchrun, else N of --ep)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one, else cpu")
    parser.add_argument("--dummy-weights", action="store_true", help="seeded random weights, no checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="of random weights and of sampling (default 0)")
    parser.add_argument("--prompt", help="generate text after this")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the checkpoint's chat template")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="(default 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (the default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this sum")


def run(args: argparse.Namespace) -> int:
    """Builds, as the one rank, as one of several, or by starting them."""
    joined = _world_size() if in_launcher() else None
    if not 0 <= args.seed < 2**63:
        raise UsageError(f"--seed {args.seed}: from 0 to 2**63 - 1")
    if args.tp is not None and args.tp < 1:
        raise UsageError(f"--tp {args.tp}: at least one rank is needed")
    check_ep(args)
    if joined is None and args.tp is None:
        args.tp = args.ep
    if joined is not None and args.tp not in (None, joined):
        raise UsageError(f"--tp {args.tp}, but the launcher started {joined} ranks", hint="leave --tp out")
    if args.chat and args.prompt is None:
        raise UsageError("--chat needs a --prompt")
    if joined is None and args.tp > 1:
        return _launch(args)
    return _rank(args, several=joined is not None and joined > 1)


def _world_size() -> int:
    size, rank = os.environ["WORLD_SIZE"], os.environ["RANK"]
    if not (size.isdecimal() and rank.isdecimal() and int(rank) < int(size)):
        raise UsageError(f"RANK={rank} WORLD_SIZE={size} in the environment: a launcher sets numbers, rank below size")
    return int(size)


def _launch(args: argparse.Namespace) -> int:
    """Checks everything that needs no rank, then starts the ranks with the same arguments."""
    from tpkit.checkpoint.open import open_checkpoint
    from tpkit.distributed.launch import launch
    from tpkit.planning import plan_model

    spec = _prepare(args)
    checkpoint = None if args.dummy_weights else open_checkpoint(args.checkpoint)
    plan_model(spec, ranks=args.tp, checkpoint=checkpoint, dtype=args.dtype, split=split_of(args), ep=args.ep)
    return launch(_argv(args), args.tp)


def _prepare(args: argparse.Namespace) -> BoundSpec:
    """Finds the weights and returns the bound description; `args.checkpoint` is a path afterwards."""
    from tpkit.checkpoint.hub import locate
    from tpkit.generation import check_request

    if args.dummy_weights and args.checkpoint is not None:
        raise UsageError("--dummy-weights and --checkpoint exclude each other")
    pick(args, config_of(args))
    if not args.dummy_weights and args.checkpoint is None:
        args.checkpoint = locate(None, spec_of(args, None))
    spec = spec_of(args, config_of(args))
    if args.prompt is not None:  # what is wrong with it is told before anything is loaded
        check_request(_prompt_ids(args, _codec(args)), args.max_new_tokens, args.temperature, args.top_p)
    return spec


def _prompt_ids(args: argparse.Namespace, codec: TextCodec) -> list[int]:
    return codec.encode_chat(args.prompt) if args.chat else codec.encode(args.prompt)


def _argv(args: argparse.Namespace) -> list[str]:
    """Returns the command line of a rank."""
    words = ["build", str(args.description)]
    for name, value in vars(args).items():
        flag = {"overrides": "--set"}.get(name, "--" + name.replace("_", "-"))
        if name in ("command", "description") or value is None or value is False:
            continue
        if value is True:
            words.append(flag)
        else:
            words += [f"{flag}={each}" for each in (value if isinstance(value, list) else [value])]
    return words


def _rank(args: argparse.Namespace, several: bool) -> int:
    import torch

    from tpkit.building import build
    from tpkit.distributed.group import init_from_env, shutdown

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda, but torch sees no CUDA device", hint="use --device cpu")
    if several:
        init_from_env(device)
    spec = _prepare(args)
    first = not several or torch.distributed.get_rank() == 0
    model = build(
        spec,
        checkpoint=args.checkpoint,
        dtype=args.dtype,
        device=device,
        dummy_weights=args.dummy_weights,
        seed=args.seed,
        split=split_of(args),
        ep=args.ep,
        progress=_Progress() if first and sys.stderr.isatty() else None,
    )
    answer = _report(args, model, first)
    if args.prompt is not None:
        generated = _generate(args, model, first)
        answer["generated"] = generated
    if first and args.json:
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    if several:
        shutdown()
    return 0


class _Progress:
    """Bytes loaded, on one line of a terminal."""

    def __init__(self) -> None:
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        from tpkit.report import human

        percent = done * 100 // max(total, 1)
        if percent != self._shown:
            self._shown = percent
            end = "\n" if done >= total else ""
            sys.stderr.write(f"\rloading {percent:3d}% of {human(total)}{end}")
            sys.stderr.flush()


def _report(args: argparse.Namespace, model: Model, first: bool) -> dict[str, Any]:
    """Gathers what every rank took, and prints it on rank 0."""
    import torch

    from tpkit.report import plan_text, ranks_text

    loaded = model.loaded
    mine = {
        "rank": model.tp.rank,
        "param_bytes": model.param_bytes(),
        "bytes_read": loaded.bytes_read if loaded else 0,
        "load_seconds": round(loaded.seconds, 3) if loaded else 0.0,
        "peak_anon_bytes": model.peak_anon_bytes,
    }
    ranks = model.tp.gather_objects(mine)
    backend = torch.distributed.get_backend(model.tp.group) if model.tp.group is not None else "none"
    if first and not args.json:
        ep = f", ep {model.plan.ep}" if model.plan.ep > 1 else ""
        title = f"{model.spec.family}, tp {model.tp.size}{ep} ({backend}), {model.plan.dtype}"
        sys.stdout.write(f"{title}\n\n{plan_text(model.plan, model.device.type)}\n\n{ranks_text(ranks)}\n")
    return {
        "schema": 1,
        "model": model.spec.family,
        "tp": model.tp.size,
        "ep": model.plan.ep,
        "backend": backend,
        "dtype": model.plan.dtype,
        "ranks": ranks,
    }


def _codec(args: argparse.Namespace) -> TextCodec:
    from pathlib import Path

    from tpkit.chat import TextCodec

    places = [Path(place) for place in (args.checkpoint, args.config) if place is not None]
    folders = [place if place.is_dir() else place.parent for place in places]
    if not folders:
        raise UsageError("--prompt needs a tokenizer.json", hint="give the folder that holds one with --config")
    return TextCodec(next((folder for folder in folders if (folder / "tokenizer.json").is_file()), folders[0]))


def _generate(args: argparse.Namespace, model: Model, first: bool) -> dict[str, Any]:
    from tpkit.generation import eos_ids, generate

    codec = _codec(args)
    prompt_ids = _prompt_ids(args, codec)
    show = _Streamer(codec.decode) if first and not args.json else None
    if show is not None:
        sys.stdout.write(f"\n{args.prompt}\n" if args.chat else f"\n{args.prompt}")
    ids = generate(
        model,
        prompt_ids,
        max_new_tokens=args.max_new_tokens,
        eos=eos_ids(codec.folder),
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        on_token=show,
    )
    if show is not None:
        sys.stdout.write("\n")
    return {"prompt": args.prompt, "token_ids": ids, "text": codec.decode(ids)}


class _Streamer:
    """Writes text as its tokens come. A character may take several tokens, so only what is settled is written."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._written = ""

    def __call__(self, token: int) -> None:
        self._ids.append(token)
        text = self._decode(self._ids)
        if not text.endswith("\ufffd") and text.startswith(self._written):
            sys.stdout.write(text[len(self._written) :])
            sys.stdout.flush()
            self._written = text
