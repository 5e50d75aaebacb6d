"""The command line: ``tpkit COMMAND ...``. One module per command, imported only when it is run.

A command module offers ``add_arguments(parser)``, which imports nothing heavy, and ``run(args) -> int``, which may.
Exit codes: 0 fine, 2 usage or description, 3 plugin, 4 checkpoint or sharding, 70 a bug.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from tpkit.distributed.rank import BUG, enter_rank, fail_rank, in_launcher, message_of
from tpkit.errors import TpkitError, UsageError

__all__ = ["main"]

#: command -> what `tpkit --help` says of it; the module of the same name implements it
COMMANDS = {
    "build": "build a model from its description and a checkpoint, load it, and generate text",
    "check": "tell everything that is wrong with a description, and how it fits a checkpoint, without weights",
    "init": "draft a description from a checkpoint's config.json and the names of its tensors",
    "new": "begin a plugin: a complete, tested quant method to change",
    "plan": "show what every rank would hold, without ranks and without reading a weight",
    "plugins": "list the installed modules, styles, quant methods and checkpoint formats",
}

#: what a shell reports for a program ended by Ctrl-C, and by a closed pipe
INTERRUPTED, BROKEN_PIPE = 130, 141


class _Version(argparse.Action):
    """Prints the version; the metadata of the distribution is read only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        sys.stdout.write(f"tpkit {version('tpkit')}\n")
        parser.exit()


def _command_module(name: str) -> ModuleType:
    return importlib.import_module(f"tpkit.cli.{name}")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments. Only the command that is named is imported, for its own options."""
    parser = argparse.ArgumentParser(
        prog="tpkit",
        description="Language models over any number of ranks from a YAML description and an ordinary checkpoint.",
        epilog="`tpkit COMMAND --help` tells the options of a command.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    named = next((word for word in argv if not word.startswith("-")), None)
    for name, purpose in COMMANDS.items():
        sub = commands.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
        if name == named:
            _command_module(name).add_arguments(sub)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; every error ends as a message on stderr.

    Args:
        argv: the arguments after the program's name; None takes them from the process.

    Returns:
        The exit code of the process.
    """
    argv = sys.argv[1:] if argv is None else argv
    enter_rank()
    try:
        args = _parse(argv)
        code = int(_command_module(args.command).run(args))
        sys.stdout.flush()
    except SystemExit as stop:  # argparse: --help, --version and usage errors
        return stop.code if isinstance(stop.code, int) else UsageError.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader went away (`tpkit plan ... | head`). Python's own flush at exit must not fail on it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if in_launcher():
            fail_rank(error)
        sys.stderr.write(message_of(error))
        return error.exit_code if isinstance(error, TpkitError) else BUG
    return code
