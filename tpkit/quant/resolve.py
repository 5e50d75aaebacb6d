"""The one place that decides which quant method a module gets. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from tpkit.errors import PluginError, SpecError, did_you_mean
from tpkit.quant.base import QuantMethod, plugin_errors
from tpkit.quant.dequantized import Dequantized
from tpkit.quant.stated import Stated
from tpkit.quant.target import Dialect, Target
from tpkit.registry import Registry

__all__ = ["Choice", "Resolver"]


class Choice(NamedTuple):
    """A registry name, and the method with its options."""

    name: str
    method: QuantMethod

    def __str__(self) -> str:
        return f"{self.name} {self.method.label()}".strip()

    def like(self, other: Choice) -> bool:
        """Says whether both store and compute alike."""
        mine, theirs = self.method, other.method
        return (self.name, type(mine), mine.options, mine.label()) == (
            other.name,
            type(theirs),
            theirs.options,
            theirs.label(),
        )


class Resolver:
    """Decides from all that is said of a model.

    Args:
        registry: where methods come from.
        stated: every source's word. They must agree: on the method, and on every option that two of them give.

    Raises:
        SpecError: if they disagree, quoting each.
        PluginError: for a method that is not installed, or does not take the options.
    """

    def __init__(self, registry: Registry, stated: Sequence[Stated]) -> None:
        self._registry = registry
        self._made: dict[tuple[str, str], QuantMethod] = {}
        self._providers = _providers(stated)
        #: every pattern of a rule that was compared with a module, and whether it ever matched one
        self.patterns: dict[tuple[str, Dialect], bool] = {}
        self._ours = [each for each in stated if not each.foreign]
        self.unquantized = Choice("none", self._make("none", {}, "tpkit"))
        #: who says that the model is quantised
        self.who = ", ".join(each.source for each in stated if each.method not in (None, "none"))
        self.said = bool(self.who)
        self._dequantize = _one("dequantize", [(s.source, s.dequantize) for s in stated if s.dequantize is not None])
        naming = [each for each in stated if each.method is not None]
        accept = {key for each in stated for key in each.accept}
        self._base = self._options = None
        if naming:
            self._agree_on_method(naming)
            name = self._provided(naming[0].method or "none")
            self._options = self._merged(naming, accept)
            sources = ", ".join(each.source for each in naming)
            self._base = Choice(name, self._make(name, self._options, sources))

    def choose(self, target: Target, own: Stated | None = None) -> Choice:
        """Returns what a part of a layer gets.

        Args:
            target: the part.
            own: the module's own ``quant:`` in the description; it wins over what is said of the whole model.
        """
        base, dequantize = self._base, self._dequantize
        if own is not None:
            dequantize = own.dequantize if own.dequantize is not None else dequantize
            if own not in self._ours:
                self._ours.append(own)
            if own.method is not None:
                name = self._provided(own.method)
                inherited = self._options if base is not None and base.name == name else None
                options = {**(inherited or {}), **own.options}
                base = Choice(name, self._make(name, options, own.source))
        if base is None or base.name == "none":
            return self.unquantized
        with plugin_errors(base.method, "for_module", target.name):
            answer: object = base.method.for_module(target)
        if answer is None:
            if own is None or own.method is None:
                return self.unquantized
            answer = base.method  # the description names it for this very module
        if not isinstance(answer, QuantMethod):
            who = type(base.method).__name__
            raise PluginError(f"for_module of {who} gave {answer!r} for {target.name}, not a QuantMethod or None")
        return Choice(base.name, Dequantized(answer) if dequantize else answer)

    def check_patterns(self, names: Iterable[str]) -> None:
        """Checks that what the description and the command line list means some module: a misspelt name is silent.

        Args:
            names: of all modules, for what may have been meant.

        Raises:
            SpecError: for an entry of a list that was compared with every module and matched none.
        """
        targets = [Target(name=name) for name in names]
        lost: dict[str, set[Dialect]] = {}
        for (pattern, dialect), matched in self.patterns.items():
            if not matched:
                lost.setdefault(pattern, set()).add(dialect)
        for each in self._ours:
            for text in sorted(lost.keys() & set(_texts(each.options))):
                # a module that is not quantised anyway may be listed too
                if not any(target.matches([text], how) for target in targets for how in lost[text]):
                    near = did_you_mean(text, {target.name.rpartition(".")[2] for target in targets})
                    raise SpecError(f"{each.source}: {text!r} matches no module of the model{near}")

    def _provided(self, name: str) -> str:
        """Returns the name with its distribution, where one source chose it."""
        return self._providers.get(name, name)

    def _agree_on_method(self, naming: Sequence[Stated]) -> None:
        classes = {each.method: self._class(each.method or "none") for each in naming}
        if len(set(classes.values())) > 1:
            raise SpecError(
                f"the sources disagree on the quant method: {'; '.join(map(str, naming))}",
                hint="remove or correct the one that is wrong; what the checkpoint stores decides",
            )

    def _merged(self, naming: Sequence[Stated], accept: set[str]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        origin: dict[str, str] = {}
        for each in naming:
            said = {key: value for key, value in each.options.items() if value is not None}  # null says nothing
            options = {key: value for key, value in said.items() if not (each.foreign and key in accept)}
            if each.foreign:
                kind = self._class(each.method or "none")
                with plugin_errors(kind, "read_config", each.source):
                    options = dict(kind.read_config(options))
            for key, value in options.items():
                if value is None:
                    continue
                if key not in merged:
                    merged[key], origin[key] = value, each.source
                elif not _alike(merged[key], value):
                    raise SpecError(
                        f"the sources disagree on {each.method} {key}: {origin[key]} says {merged[key]!r:.200}, "
                        f"{each.source} says {value!r:.200}",
                        hint="remove or correct the one that is wrong; what the checkpoint stores decides",
                    )
        return merged

    def _class(self, name: str) -> type[QuantMethod]:
        kind: object = self._registry.load("quant method", self._provided(name))
        if not (isinstance(kind, type) and issubclass(kind, QuantMethod)):
            raise PluginError(f"quant method {name!r} is {kind!r}, not a subclass of tpkit.QuantMethod")
        return kind

    def _make(self, name: str, options: Mapping[str, Any], sources: str) -> QuantMethod:
        key = name, repr(sorted(options.items()))
        if key not in self._made:
            kind = self._class(name)
            try:
                given = kind.Options(**options)
            except ValidationError as cause:
                raise self._refused(name, cause, sources) from cause
            with plugin_errors(kind, "the constructor", ""):
                self._made[key] = kind(given)
        return self._made[key]

    def _refused(self, name: str, cause: ValidationError, sources: str) -> PluginError:
        who = self._registry.find("quant method", name)
        known = list(self._class(name).Options.model_fields)
        wrong = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'options'}: "
            + ("no such option" if e["type"] == "extra_forbidden" else e["msg"])
            + (did_you_mean(str(e["loc"][0]), known) if e["type"] == "extra_forbidden" and len(e["loc"]) == 1 else "")
            for e in cause.errors()
        )
        unknown = any(e["type"] == "extra_forbidden" for e in cause.errors())
        return PluginError(
            f"quant method {name!r} of {who.distribution} {who.version} does not take the options of {sources}: "
            f"{wrong}",
            hint="if an option of a file that it does not know changes nothing in the weights, accept it: "
            "--quant '{accept: [NAME]}'"
            if unknown
            else None,
        )


def _providers(stated: Sequence[Stated]) -> dict[str, str]:
    """Returns names that one source gives with their distribution: that chooses for all who give the plain name."""
    full = [(each.source, each.method) for each in stated if each.method and "@" in each.method]
    plain = {name.partition("@")[0] for _, name in full}
    return {
        each: _one(f"who offers {each!r}", [(who, name) for who, name in full if name.partition("@")[0] == each])
        for each in plain
    }


def _alike(one: Any, other: Any) -> bool:
    """Says whether two sources mean the same: lists of names have no order."""
    if isinstance(one, list) and isinstance(other, list):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    return bool(one == other)


def _texts(options: Any) -> Iterator[str]:
    if isinstance(options, str):
        yield options
    elif isinstance(options, Mapping):
        for value in options.values():
            yield from _texts(value)
    elif isinstance(options, list | tuple):
        for value in options:
            yield from _texts(value)


def _one(what: str, said: Sequence[tuple[str, Any]]) -> Any:
    if len({value for _, value in said}) > 1:
        raise SpecError(f"the sources disagree on {what}: {'; '.join(f'{who} says {value}' for who, value in said)}")
    return said[0][1] if said else None
