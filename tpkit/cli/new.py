"""``tpkit new``: a complete plugin to begin with, which keeps the contract as it is written."""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template

from tpkit.errors import UsageError
from tpkit.registry import Registry

__all__ = ["add_arguments", "run"]

#: template -> where it goes; `name` is replaced in both
FILES = {
    "pyproject.toml.in": "pyproject.toml",
    "README.md.in": "README.md",
    "__init__.py.in": "src/tpkit_$name/__init__.py",
    "test.py.in": "tests/test_$name.py",
}

#: letters of a name
LONGEST = 30

NEXT = """\
written to {folder}:
{listing}

next:
  cd {folder}
  pip install -e '.[test]'
  pytest                 # the conformance kit; it passes as generated
  tpkit plugins          # lists the quant method {name}
then change what is marked CHANGE, first in tests/test_{name}.py; docs/plugins.md of tpkit explains the contract
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("kind", choices=["quant"], help="what to begin: a quant method")
    parser.add_argument("name", metavar="NAME", help="its name in config.json and in descriptions, e.g. int6_groups")
    parser.add_argument(
        "--dir", metavar="DIR", type=Path, default=Path(), help="where to make its folder NAME (default: here)"
    )


def run(args: argparse.Namespace) -> int:
    """Writes the plugin, and tells what to do next."""
    _check_name(args.name)
    folder: Path = args.dir / args.name
    if not args.dir.is_dir():
        raise UsageError(f"--dir {args.dir}: no such folder")
    written = _write(folder, args.name)
    listing = "\n".join(f"  {path}" for path in written)
    sys.stdout.write(NEXT.format(folder=folder, listing=listing, name=args.name))
    return 0


def _check_name(name: str) -> None:
    """Refuses a name that could not be a module, or that is taken.

    Raises:
        UsageError: saying what a name is.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name) or len(name) > LONGEST:
        raise UsageError(
            f"{name!r} cannot be the name of a quant method",
            hint=f"small letters, digits and single underscores, a letter first, at most {LONGEST}: int6_groups",
        )
    taken = [plugin for plugin in Registry.default().listing() if (plugin.kind, plugin.name) == ("quant method", name)]
    if taken:
        raise UsageError(f"a quant method {name!r} is installed: {taken[0].distribution} offers it ({taken[0].value})")
    if find_spec(f"tpkit_{name}") is not None:
        raise UsageError(f"a package tpkit_{name} is installed", hint="choose another name")


def _write(folder: Path, name: str) -> list[str]:
    """Writes every file of the plugin into a new folder and returns their paths in it.

    Raises:
        UsageError: if the folder exists, or cannot be made.
    """
    kind = "".join(word.capitalize() for word in name.split("_")) + "Quant"
    words = {"name": name, "dashed": name.replace("_", "-"), "kind": kind}
    texts = {"src/tpkit_$name/py.typed": ""}
    for template, path in FILES.items():
        text = (files("tpkit.testing") / "template" / template).read_text(encoding="utf-8")
        texts[path] = Template(text).substitute(words)
    try:
        folder.mkdir()
        for path, text in texts.items():
            place = folder / Template(path).substitute(words)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
    except FileExistsError:
        raise UsageError(f"{folder} exists", hint="nothing is overwritten: choose another name or --dir") from None
    except OSError as cause:
        raise UsageError(f"{folder} cannot be written: {cause}") from cause
    return sorted(Template(path).substitute(words) for path in texts)
