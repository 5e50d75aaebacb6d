"""Text to tokens and back: tokenizer.json through the `tokenizers` library, chat templates in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpkit.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["TextCodec"]


class TextCodec:
    """The tokenizer of a checkpoint folder.

    Args:
        folder: holds tokenizer.json, and for `chat` a template in chat_template.jinja or tokenizer_config.json.

    Raises:
        UsageError: if the library is not installed.
        CheckpointError: if the folder has no tokenizer.json, or it is not one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise UsageError("a prompt needs the library tokenizers", hint="pip install 'tpkit[chat]'") from None
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer.json", hint="a prompt needs one; without it leave --prompt out"
            )
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(file))
        except Exception as cause:  # the library raises plain Exception
            raise CheckpointError(f"{file} is not a tokenizer: {cause}") from cause
        # settings of training that a file may carry along: a prompt is neither cut nor filled up
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, with the special ones that the tokenizer adds."""
        try:
            return list(self._tokenizer.encode(text).ids)
        except UnicodeEncodeError as cause:
            raise UsageError(f"the prompt is not text: {cause}") from cause

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens, without special ones."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def encode_chat(self, prompt: str) -> list[int]:
        """Returns the tokens of a user's message in the checkpoint's chat template, ready for the answer.

        Raises:
            UsageError: if jinja2 is not installed.
            CheckpointError: if there is no template, or it does not render.
        """
        text = self.render([{"role": "user", "content": prompt}])
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """Returns messages in the chat template. The template is untrusted: it runs in jinja2's immutable sandbox."""
        try:
            from jinja2.exceptions import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise UsageError("--chat needs the library jinja2", hint="pip install 'tpkit[chat]'") from None
        config = _json(self.folder / "tokenizer_config.json")
        source = _template(self.folder, config)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        special = {key: _token(value) for key, value in config.items() if key.endswith("_token")}
        try:
            rendered = environment.from_string(source).render(
                messages=list(messages), add_generation_prompt=True, **special
            )
        except (TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as cause:
            raise CheckpointError(f"{self.folder}: the chat template does not render: {cause}") from cause
        return str(rendered)


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as cause:
        raise CheckpointError(f"{file} is not JSON: {cause}") from cause
    return content if isinstance(content, dict) else {}


def _template(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as cause:
            raise CheckpointError(f"{file} cannot be read: {cause}") from cause
    said = config.get("chat_template")
    if isinstance(said, list):  # several, by name
        said = next(
            (row.get("template") for row in said if isinstance(row, dict) and row.get("name") == "default"), None
        )
    if not isinstance(said, str):
        raise CheckpointError(
            f"{folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)",
            hint="leave --chat out to continue the prompt as plain text",
        )
    return said


def _token(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)
