"""What a model family is stands in its description alone: no source file names one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
#: families and vendors without a description here
FURTHER = {
    "mixtral", "deepseek", "deepseek_v2", "deepseek_v3", "gpt_oss", "llama4", "olmoe", "granitemoe", "minimax",
    "qwen1", "qwen1_5", "qwen2_5", "qwen3_5", "qwen3_moe", "qwen3_next", "internlm", "baichuan", "chatglm", "command_r",
    "gemma3", "gemma3n", "gemma4", "kimi", "smollm", "smollm2", "pythia", "vicuna", "lfm2", "mamba", "molmo",
}  # fmt: skip


class Exempt(NamedTuple):
    """Where which words may stand, as regular expressions, and why."""

    where: str
    words: str
    prose: bool
    why: str


EXEMPT = [
    Exempt(r".*", r"llama3", False, "the rope_type of a way to scale rotary embedding that many families use"),
    Exempt(r"tpkit/.*", r"(llama|qwen3)\.yaml", False, "an example of how a description is named"),
    Exempt(r"tpkit/spec/(__init__|match)\.py", r"``llama``|'llama'", True, "the same, and its family in a doctest"),
    Exempt(r"tpkit/layers/rot.*\.py", r"Llama 3\.1", True, "where the scaling llama3 comes from"),
    Exempt(r"plugins/gguf/src/.*", r".*", False, "a GGUF file states an architecture; names and orders follow from it"),
    Exempt(r"plugins/.*", r".*", True, "which checkpoints are stored in a format, and who defined it"),
    Exempt(r".*", r"llama\.cpp", True, "a program"),
]


def names() -> set[str]:
    """Returns all names, with the spellings that classes and texts use."""
    found = set(FURTHER)
    for file in (ROOT / "model_configs").glob("*.yaml"):
        text = file.read_text(encoding="utf-8")
        found.add(file.stem)
        found.update(re.findall(r"^family: (\w+)", text, flags=re.MULTILINE))
        for listed in re.findall(r"^(?:model_types|architectures): \[(.*?)\]", text, flags=re.MULTILINE):
            found.update(name.strip() for name in listed.split(","))
    return found | {name.replace("_", spelling) for name in found for spelling in ("-", "")}


def lines() -> Iterator[tuple[str, int, str]]:
    """Yields path, number and text of all lines of source."""
    for file in sorted([*ROOT.glob("tpkit/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]):
        path = file.relative_to(ROOT).as_posix()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            yield path, number, line


@cache
def prose(path: str) -> set[int]:
    """Returns the numbers of the lines of a file that docstrings and comments take."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found = {n for n, line in enumerate(text.splitlines(), 1) if line.lstrip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def exempt(path: str, number: int, line: str, found: re.Match[str]) -> bool:
    """Says whether a name may stand where it does."""
    return any(
        re.fullmatch(rule.where, path)
        and any(m.start() <= found.start() and found.end() <= m.end() for m in re.finditer(rule.words, line))
        and (not rule.prose or number in prose(path))
        for rule in EXEMPT
    )


def test_no_source_names_a_model_family() -> None:
    known = "|".join(sorted(map(re.escape, names())))
    word = re.compile(rf"(?<![A-Za-z0-9_])({known})(?![A-Za-z0-9_])", re.IGNORECASE)
    found = [
        f"{path}:{number}: {hit[0]}: {line.strip()}"
        for path, number, line in lines()
        for hit in word.finditer(line)
        if not exempt(path, number, line, hit)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rule", EXEMPT, ids=lambda rule: rule.words)
def test_every_exemption_is_needed(rule: Exempt) -> None:
    assert any(re.fullmatch(rule.where, path) and re.search(rule.words, line) for path, _, line in lines()), rule
