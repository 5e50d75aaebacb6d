"""Plugins by name. One scan of the installed entry points that imports nothing; exactly what is asked for is imported.

A name that two distributions claim is an error only when that name is asked for; ``name@distribution`` chooses.
A broken plugin never stops another. Descriptions name registry keys, never import paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import EntryPoint, distributions
from typing import Any

from tpkit.errors import PluginError, did_you_mean

__all__ = ["API", "GROUPS", "Plugin", "Registry"]

#: version of the contract between tpkit and its plugins; a plugin class states the one it was written for as ``api``
API = 1

#: entry-point groups, by what they hold
GROUPS = {
    "quant method": "tpkit.quant_methods",
    "module": "tpkit.modules",
    "style": "tpkit.styles",
    "checkpoint format": "tpkit.checkpoint_formats",
    "model configs": "tpkit.model_configs",
}


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """One claim of a name: which distribution offers it and where its object is."""

    kind: str
    name: str
    value: str
    distribution: str
    version: str
    entry_point: EntryPoint | None = None
    target: Any = field(default=None, compare=False)
    hidden: str = ""

    def load(self) -> Any:
        """Imports the plugin's object.

        Raises:
            PluginError: naming distribution, entry point and cause.
        """
        try:
            loaded = self.target if self.entry_point is None else self.entry_point.load()
        except (Exception, SystemExit) as cause:
            raise PluginError(
                f"{self.kind} {self.name!r} of {self.distribution} {self.version} (entry point {self.value}) "
                f"does not import: {type(cause).__name__}: {cause}",
                hint=f"repair or uninstall {self.distribution}; other plugins are not affected",
            ) from cause
        wanted = getattr(loaded, "api", API)
        if wanted != API:
            raise PluginError(
                f"{self.kind} {self.name!r} of {self.distribution} {self.version} is written for plugin api {wanted}, "
                f"this tpkit has {API}",
                hint=f"install versions of tpkit and {self.distribution} that go together",
            )
        return loaded


class Registry:
    """Maps ``(kind, name)`` to plugins. `Registry.default()` holds what is installed; an empty one serves tests.

    Example:
        >>> registry = Registry.default().copy()
        >>> registry.register("quant method", "mine", MyMethod)
    """

    def __init__(self, plugins: Iterator[Plugin] | tuple[Plugin, ...] = ()) -> None:
        self._plugins: dict[tuple[str, str], list[Plugin]] = {}
        self._loaded: dict[Plugin, Any] = {}
        #: what is told of names that only a copy of a distribution offers that another copy hides
        self._hidden: dict[tuple[str, str], list[str]] = {}
        for plugin in plugins:
            if plugin.hidden:
                self._hidden.setdefault((plugin.kind, plugin.name), []).append(plugin.hidden)
            else:
                self._add(plugin)

    @classmethod
    @lru_cache(maxsize=1)
    def default(cls) -> Registry:
        """Returns the registry of all installed distributions, scanned once per process."""
        return cls(tuple(_scan()))

    def copy(self) -> Registry:
        """Returns a registry of the same plugins that can be extended on its own."""
        return Registry(tuple(self.listing()))

    def _add(self, plugin: Plugin) -> None:
        claims = self._plugins.setdefault((plugin.kind, plugin.name), [])
        if not any((c.distribution, c.value) == (plugin.distribution, plugin.value) for c in claims):
            claims.append(plugin)
            claims.sort(key=lambda c: (c.distribution, c.value))

    def register(self, kind: str, name: str, target: Any, *, distribution: str = "this program") -> None:
        """Adds a plugin by hand. It lives in this process only: ranks started by ``tpkit build`` do not see it.

        Raises:
            PluginError: for an unknown kind, or a name already taken.
        """
        if kind not in GROUPS:
            raise PluginError(
                f"unknown kind of plugin {kind!r}{did_you_mean(kind, GROUPS)}; one of: {', '.join(GROUPS)}"
            )
        if (kind, name) in self._plugins:
            owner = self._plugins[kind, name][0].distribution
            raise PluginError(f"{kind} {name!r} is already offered by {owner}", hint="choose another name")
        value = f"{getattr(target, '__module__', '?')}:{getattr(target, '__qualname__', repr(target))}"
        self._add(Plugin(kind=kind, name=name, value=value, distribution=distribution, version="", target=target))

    def names(self, kind: str) -> list[str]:
        """Returns the names offered for a kind, sorted."""
        return sorted(name for k, name in self._plugins if k == kind)

    def listing(self) -> list[Plugin]:
        """Returns all plugins, sorted by kind, name and distribution; imports nothing."""
        return [plugin for key in sorted(self._plugins) for plugin in self._plugins[key]]

    def find(self, kind: str, name: str) -> Plugin:
        """Returns the one plugin of a name (``name`` or ``name@distribution``) without importing it.

        Raises:
            PluginError: if nobody or more than one distribution offers it.
        """
        plain, _, chosen = name.partition("@")
        claims = self._plugins.get((kind, plain), [])
        if not claims:
            known = self.names(kind)
            raise PluginError(
                f"no {kind} named {plain!r} is installed{did_you_mean(plain, known)}; found: {_described(self, kind)}"
                + "".join(f"\n  {line}" for line in self._hidden.get((kind, plain), ())),
                hint=f"install the distribution that offers it (entry-point group {GROUPS.get(kind, kind)})",
            )
        if chosen:
            claims = [c for c in claims if _normal(c.distribution) == _normal(chosen)]
            if not claims:
                raise PluginError(f"{chosen!r} offers no {kind} named {plain!r}; found: {_described(self, kind)}")
        if len(claims) > 1:
            who = ", ".join(f"{c.distribution} {c.version} ({c.value})" for c in claims)
            raise PluginError(
                f"{kind} {plain!r} is offered by {len(claims)} plugins: {who}",
                hint=f"name one of them as {plain}@{claims[0].distribution}, or uninstall the other",
            )
        return claims[0]

    def load(self, kind: str, name: str) -> Any:
        """Returns the imported object of a plugin; see `find` and `Plugin.load` for the errors."""
        plugin = self.find(kind, name)
        if plugin not in self._loaded:
            self._loaded[plugin] = plugin.load()
        return self._loaded[plugin]


def _described(registry: Registry, kind: str) -> str:
    rows = [f"{p.name} ({p.distribution} {p.version})".replace(" )", ")") for p in registry.listing() if p.kind == kind]
    return ", ".join(rows) or "none"


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _scan() -> Iterator[Plugin]:
    kinds = {group: kind for kind, group in GROUPS.items()}
    seen: dict[str, str] = {}
    for dist in distributions():
        try:
            points = [point for point in dist.entry_points if point.group in kinds]
            name = str(dist.metadata["Name"] or "?") if points else ""
            told = str(dist.metadata["Version"] or "?") if points else ""
            place = str(dist.locate_file("")) if points else ""
        except Exception:  # a distribution whose own files are damaged must not stop the others
            continue
        if not points:
            continue
        first = seen.setdefault(_normal(name), f"{told} in {place}")
        hidden = ""
        if first != f"{told} in {place}":  # an earlier folder of the path has the same distribution: that one counts
            hidden = f"{name} {told} in {place} offers it, but {name} {first} comes first and does not"
        for point in points:
            yield Plugin(
                kind=kinds[point.group],
                name=point.name,
                value=point.value,
                distribution=name,
                version=told,
                entry_point=point,
                hidden=hidden,
            )
