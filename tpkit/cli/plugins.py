"""``tpkit plugins``: what is installed, by entry points alone. A broken plugin is listed too: none is imported."""

from __future__ import annotations

import argparse
import json
import sys

from tpkit.registry import GROUPS, Plugin, Registry

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Prints every plugin with its kind, name, distribution and object."""
    plugins = Registry.default().listing()
    sys.stdout.write(_as_json(plugins) if args.json else _as_table(plugins))
    return 0


def _as_json(plugins: list[Plugin]) -> str:
    rows = [
        {
            "kind": plugin.kind,
            "name": plugin.name,
            "distribution": plugin.distribution,
            "version": plugin.version,
            "object": plugin.value,
        }
        for plugin in plugins
    ]
    return json.dumps({"schema": 1, "plugins": rows}, indent=2) + "\n"


def _as_table(plugins: list[Plugin]) -> str:
    """One block per kind; a name that several distributions claim is marked, since asking for it plainly is refused."""
    blocks = []
    for kind in GROUPS:
        rows = [plugin for plugin in plugins if plugin.kind == kind]
        names = [plugin.name for plugin in rows]
        width = max(map(len, names), default=0)
        lines = [f"{kind} ({GROUPS[kind]})"]
        for plugin in rows:
            line = f"  {plugin.name:{width}}  {plugin.distribution} {plugin.version}  {plugin.value}"
            several = names.count(plugin.name) > 1
            lines.append(f"{line}  ambiguous: ask for {plugin.name}@{plugin.distribution}" if several else line)
        blocks.append("\n".join([*lines, *([] if rows else ["  none"])]))
    return "\n\n".join(blocks) + "\n"
