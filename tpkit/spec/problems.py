"""Collects what is wrong with a description, so that one run shows all of it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from tpkit.errors import SpecError, did_you_mean
from tpkit.spec.data import Data, Mark, locate

__all__ = ["Problems", "reason", "shown", "told"]

LONGEST = 60


def shown(value: Any) -> str:
    """Returns a value as a message shows it: JSON's words, never longer than a line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        text = f"text {value!r}"
    else:
        text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."


def reason(message: str) -> str:
    """Returns pydantic's message as a part of a sentence."""
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def told(error: Exception) -> str:
    """Returns an error's message with its hint on one line."""
    hint = getattr(error, "hint", None)
    return f"{getattr(error, 'message', error)}{f'; {hint}' if hint else ''}"


class Problems:
    """A list of findings, each ``file:line:col: tree.path: message``."""

    def __init__(self) -> None:
        self._found: list[tuple[Mark, str]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def add(self, mark: Mark, path: str, message: str) -> None:
        """Notes a finding; saying the same twice counts once."""
        line = ": ".join(part for part in (str(mark), path, message) if part)
        if all(line != known for _, known in self._found):
            self._found.append((mark, line))

    def lines(self) -> tuple[str, ...]:
        """Returns the findings in the order of their positions."""
        return tuple(line for _, line in sorted(self._found, key=lambda found: found[0][1:]))

    def raise_if_any(self, what: str, *, hint: str | None = None) -> None:
        """Raises a `SpecError` that lists the findings, if there are any."""
        if self._found:
            count = len(self._found)
            raise SpecError(f"{what}: {count} problem{'s' * (count > 1)}", problems=self.lines(), hint=hint)

    def add_validation(self, error: ValidationError, data: Data, path: str, model: type[BaseModel]) -> None:
        """Notes what pydantic found, in this project's words and with positions."""
        for item in error.errors(include_url=False):
            loc = tuple(item["loc"])
            name, kind = str(loc[-1]) if loc else "", item["type"]
            below = ".".join([path, *map(str, loc[:-1])]) if len(loc) > 1 else path
            if kind == "extra_forbidden":
                known = [field.alias or key for key, field in model.model_fields.items()]
                self.add(locate(data, loc, key=True), below, f"unknown word {name!r}{did_you_mean(name, known)}")
            elif kind == "missing":
                self.add(locate(data, loc[:-1]), below, f"needs {name!r}")
            else:
                where = ".".join(part for part in [path, *map(str, loc)] if part)
                message = reason(item["msg"])
                self.add(locate(data, loc), where, f"{message}, not {shown(item['input'])}")
