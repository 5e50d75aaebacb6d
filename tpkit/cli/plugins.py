"""``tpkit plugins``: what is installed, by entry points alone. None is imported, unless ``--check`` asks for it."""

from __future__ import annotations

import argparse
import json
import sys

from tpkit.errors import PluginError
from tpkit.registry import GROUPS, Plugin, Registry

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--check", action="store_true", help="import each plugin, and tell which are broken")


def run(args: argparse.Namespace) -> int:
    """Prints every plugin with its kind, name, distribution and object."""
    registry = Registry.default()
    plugins = registry.listing()
    broken = _broken(registry, plugins) if getattr(args, "check", False) else {}
    sys.stdout.write(_as_json(plugins, broken) if args.json else _as_table(plugins, broken))
    if getattr(args, "check", False) and not args.json:
        sys.stdout.write(f"\n{len(broken)} of {len(plugins)} plugins are broken\n")
    return 3 if broken else 0


def _broken(registry: Registry, plugins: list[Plugin]) -> dict[Plugin, str]:
    found = {}
    for plugin in plugins:
        if plugin.kind == "model configs":
            continue  # a folder of files; nothing of it is imported
        try:
            registry.load(plugin.kind, f"{plugin.name}@{plugin.distribution}")
        except PluginError as error:
            found[plugin] = error.message
    return found


def _as_json(plugins: list[Plugin], broken: dict[Plugin, str]) -> str:
    rows = [
        {
            "kind": plugin.kind,
            "name": plugin.name,
            "distribution": plugin.distribution,
            "version": plugin.version,
            "object": plugin.value,
            **({"broken": broken[plugin]} if plugin in broken else {}),
        }
        for plugin in plugins
    ]
    return json.dumps({"schema": 1, "plugins": rows}, indent=2) + "\n"


def _as_table(plugins: list[Plugin], broken: dict[Plugin, str]) -> str:
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
            lines += [f"    broken: {broken[plugin]}"] if plugin in broken else []
        blocks.append("\n".join([*lines, *([] if rows else ["  none"])]))
    return "\n\n".join(blocks) + "\n"
