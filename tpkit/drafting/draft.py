"""Puts a draft together: the tree of modules, the fields it reads, and the questions that stay open."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpkit.drafting.block import block_node
from tpkit.drafting.fields import Fields, text_of
from tpkit.drafting.names import Group, Shape, grouped
from tpkit.drafting.parts import Tree, flow, is_norm, norm_node
from tpkit.drafting.vocabulary import BUFFERS
from tpkit.spec.reading import text_part

__all__ = ["Draft", "draft"]

_POSITION = re.compile(r"pos|wpe", re.IGNORECASE)
_EMBEDDING = re.compile(r"emb|wte|wpe|tok|pos", re.IGNORECASE)
_HEAD = re.compile(r"head|output|embed_out|unembed|logits", re.IGNORECASE)
_KEY = re.compile(r"[A-Za-z_][\w-]*")

#: where nothing but config.json is there: the names that most models have
_USUAL = (
    "model.embed_tokens", "model.layers.0.input_layernorm", "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj", "model.layers.0.self_attn.o_proj",
    "model.layers.0.post_attention_layernorm", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj",
    "model.layers.0.mlp.down_proj", "model.norm", "lm_head",
)  # fmt: skip


@dataclass(frozen=True)
class Draft:
    """A drafted description.

    Attributes:
        text: YAML, with the questions in comments at its top.
        family: its name.
        questions: what a person must decide before anything it computes can be trusted.
    """

    text: str
    family: str
    questions: tuple[str, ...]


def draft(config: Mapping[str, Any], tensors: Mapping[str, Shape] | None, source: str) -> Draft:
    """Drafts a description.

    Args:
        config: the content of config.json.
        tensors: shapes by name (None where only the name is known); None: nothing is known of them.
        source: where both come from, for the comment at the top.

    Returns:
        The draft. Whatever is guessed is among its questions.
    """
    _, part = text_part(config, [])
    fields = Fields(part)
    if tensors is None:
        fields.ask("the names of tensors are unknown (no index, no weights): the tree has the commonest ones")
        tensors = {f"{name}.weight": None for name in _USUAL}
    root = grouped(tensors, fields.value("num_hidden_layers"), fields.ask)
    tree, ignore = _Root(root, fields).nodes()
    if rest := fields.unread():
        fields.ask("config.json also says, and the draft does not read: " + "; ".join(rest))
    family = re.sub(r"\W+", "_", str(part.get("model_type") or config.get("model_type") or "drafted")).strip("_")
    header = _header(config, part, family, fields)
    text = "\n".join([*_comment(fields.questions, source), *header, *_ignored(ignore), "", "tree:", *_lines(tree, 1)])
    return Draft(text + "\n", family, tuple(fields.questions))


class _Root:
    """Everything outside the blocks: embedding, positions, last norm, head."""

    def __init__(self, root: Group, fields: Fields) -> None:
        self.root, self.fields = root, fields
        self.ignore = [f"{path}.{number}.**" for path, group in root.walk() for number in group.beyond]
        repeats = [(path, group) for path, group in root.walk() if group.repeat and "*" not in path]
        layers = fields.value("num_hidden_layers")
        ranked = sorted(repeats, key=lambda each: (each[1].repeat != layers, -each[1].repeat))
        self.trunk = ranked[0] if ranked else ("", None)
        leaves = [(path, group) for path, group in root.walk() if group.is_leaf and "*" not in path]
        wide = [(path, group) for path, group in leaves if not is_norm(group)]
        tables = [(path, group) for path, group in wide if _EMBEDDING.search(group.name)]
        tables = [each for each in tables if not _HEAD.search(each[1].name)]
        self.positions = next((path for path, group in tables if _POSITION.search(group.name)), "")
        words = [each for each in tables if not _POSITION.search(each[1].name)]
        self.embedding, table = words[0] if words else ("", None)
        self.head = next((path for path, group in wide if _HEAD.search(group.name)), "")
        shape = table.weight if table else None
        self.rows = shape[0] if shape else None
        self.hidden: int | None = shape[1] if shape else fields.value("hidden_size")

    def nodes(self) -> tuple[Tree, list[str]]:
        """Returns the tree, and patterns of what is left out of it on purpose."""
        fields = self.fields
        fields.size("vocab_size", self.rows)
        fields.size("hidden_size", self.hidden)
        trunk = self.trunk[1]
        if trunk is None:
            fields.ask("no numbered layers are among the names: the tree has none")
        else:
            fields.size("num_hidden_layers", trunk.repeat if trunk.repeat > 1 else None)
        tree = self._below(self.root, "")
        if self.embedding and not self.head:
            fields.ask("no head among the names: it is taken to share the weight of the embedding")
            tree["lm_head"] = self._head_words("")
        if not self.embedding:
            fields.ask("no embedding was recognised among the names")
        return tree, self.ignore

    def _below(self, group: Group, path: str) -> Tree:
        found = []
        for name, child in group.children.items():
            below = f"{path}.{name}" if path else name
            rank, node = self._node(child, below)
            if node is not None:
                found.append((rank, name, node))
            self._buffers(child, below)
        return {name: node for _, name, node in sorted(found, key=lambda each: each[0])}

    def _node(self, group: Group, path: str) -> tuple[int, Tree | str | None]:
        """Returns a node, and its place in the order in which children run."""
        if path == self.embedding:
            scale = self.fields.multiplier("embedding_multiplier", "the embedding")
            if not scale:
                self.fields.ask("embedding: is it multiplied by a scale (`scale: ...`)?")
            return 0, flow("module: embedding", "style: vocab", f"scale: {scale}" if scale else "")
        if path == self.positions:
            self.fields.size("max_position_embeddings", group.weight[0] if group.weight else None)
            self.fields.ask("learned positions: does position 0 have row 0? (`offset: 2` where it has row 2)")
            return 1, "{module: positions, style: replicated}"
        if path == self.trunk[0]:
            return 3, block_node(group, path, self.fields, self.hidden, rope=not self.positions)
        if path == self.head:
            return 5, self._head_words("bias: true" if group.has_bias else "")
        if is_norm(group):
            return (2 if _EMBEDDING.search(group.name) else 4), norm_node(group, self.fields)
        kept = (self.embedding, self.trunk[0], self.positions, self.head)
        if any(each.startswith(f"{path}.") for each in kept if each):
            return (0 if self.embedding.startswith(f"{path}.") else 3), self._below(group, path)
        if group.tensors.keys() - BUFFERS or group.children:
            self.fields.ask(f"{path}: not understood and ignored; if the language model needs it, the draft is wrong")
            self.ignore.append(f"{path}.**")
        return 9, None

    def _buffers(self, group: Group, path: str) -> None:
        """Ignores tensors that are no parameters: rotary frequencies, causal masks."""
        if path != self.trunk[0]:
            self.ignore += [f"{path}.{last}" for last in group.tensors if last in BUFFERS]
            return
        for below, each in [("*", group), *group.walk()]:
            for last, shape in each.tensors.items():
                stem = f"{path}.{below}"
                if last in BUFFERS or (last == "bias" and each.children and len(shape or (1,) * 4) == 4):
                    self.fields.ask(f"{stem}.{last} is taken for a buffer and ignored")
                    self.ignore.append(f"{stem}.{last}")

    def _head_words(self, bias: str) -> str:
        said = self.fields.config.get("tie_word_embeddings")
        tied = said if isinstance(said, bool) else not self.head
        if not isinstance(said, bool):
            self.fields.ask(f"tie_word_embeddings: not in config.json; {text_of(tied)} by the names of tensors")
        self.fields.declare("tie_word_embeddings", "tie_word_embeddings", tied)
        words = ["style: vocab", bias]
        if self.fields.word("logits_scaling", (int, float)) is not None:
            self.fields.ask("logits_scaling: by its name it is taken to divide the logits")
            words.append("scale: 1 / logits_scaling")
        if self.embedding:
            words.append(f"tied: {{when: tie_word_embeddings, to: {self.embedding}}}")
        return flow(*words)


def _header(config: Mapping[str, Any], part: Mapping[str, Any], family: str, fields: Fields) -> list[str]:
    classes = [name for each in (config, part) for name in each.get("architectures") or [] if isinstance(name, str)]
    kinds = [kind for each in (part, config) if isinstance(kind := each.get("model_type"), str)]
    if not classes:
        fields.ask("architectures: config.json names none; `Unknown` is a placeholder")
    return [
        "schema: 1",
        f"family: {family}",
        f"architectures: [{', '.join(map(text_of, dict.fromkeys(classes or ['Unknown'])))}]",
        f"model_types: [{', '.join(map(text_of, dict.fromkeys(kinds)))}]",
        "",
        "config:",
        *(f"  {name}: {text}" for name, text in fields.declared.items()),
        *(["", "derived:", *(f"  {name}: {text}" for name, text in fields.derived.items())] if fields.derived else []),
        *(["", f"require: [{', '.join(fields.required)}]"] if fields.required else []),
    ]


def _comment(questions: list[str], source: str) -> list[str]:
    lines = [
        f"# Drafted by `tpkit init` from {source}. Names and sizes are read; what is computed is guessed.",
        "# Open questions: answer each from the model's own code, then delete it.",
    ]
    return lines + [f"#  {number}. {' '.join(text.split())}" for number, text in enumerate(questions, 1)]


def _ignored(patterns: list[str]) -> list[str]:
    return ["", "ignore:", *(f"  - {text_of(pattern)}" for pattern in dict.fromkeys(patterns))] if patterns else []


def _lines(tree: Tree, depth: int) -> list[str]:
    lines = []
    for name, node in tree.items():
        key = name if _KEY.fullmatch(name) else text_of(name)
        lines.append("  " * depth + (f"{key}: {node}" if isinstance(node, str) else f"{key}:"))
        if isinstance(node, list):
            for branch in node:
                opened, *rest = _lines(branch, depth + 2)
                lines += ["  " * (depth + 1) + f"- {opened.lstrip()}", *rest]
        else:
            lines += _lines(node, depth + 1) if isinstance(node, dict) else []
    return lines
