"""A llama of a few kilobytes, written without transformers: for tests of files, names and shapes, not of logits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import tpkit
from tpkit.checkpoint.stored import Stored
from tpkit.distributed.group import TensorParallel
from tpkit.dtypes import torch_dtype
from tpkit.geometry import Box
from tpkit.model import Model
from tpkit.planning import ModelPlan
from tpkit.spec.data import to_python
from tpkit.spec.find import read_source

__all__ = ["CONFIG", "BoxReader", "description", "on_rank", "plan", "weights", "write"]

#: q is [32, 32], k and v [16, 32], o [32, 32], gate and up [64, 32], down [32, 64], embed_tokens and lm_head [96, 32]
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "vocab_size": 96, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}  # fmt: skip


def weights(dtype: torch.dtype = torch.float32, **fields: Any) -> dict[str, torch.Tensor]:
    """Returns random weights by their names on disk, for `CONFIG` with some fields changed."""
    c = CONFIG | fields
    hidden, ffn = c["hidden_size"], c["intermediate_size"]
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}
    for layer in range(c["num_hidden_layers"]):
        stem = f"model.layers.{layer}"
        for name, rows, columns in (
            ("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q),
        ):  # fmt: skip
            shapes[f"{stem}.self_attn.{name}_proj.weight"] = (rows, columns)
        for name, rows, columns in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
            shapes[f"{stem}.mlp.{name}_proj.weight"] = (rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{stem}.{name}.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], hidden)
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write(
    folder: Path,
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    files: Sequence[Iterable[str]] = (),
    **fields: Any,
) -> Path:
    """Writes a checkpoint folder.

    Args:
        folder: made if it is not there.
        tensors: None: `weights` of the fields.
        files: the names in each of several files with an index; empty: one file.
        fields: of config.json, over `CONFIG`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = weights(**fields) if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    if not files:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    where = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        where |= dict.fromkeys(names, file)
        save_file({name: tensors[name] for name, there in where.items() if there == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def description(**changes: Any) -> dict[str, Any]:
    """Returns llama.yaml as data, with whole top-level keys replaced."""
    _, data = read_source("llama", tpkit.Registry.default())
    return to_python(data) | changes  # type: ignore[no-any-return]


def plan(folder: Path, tp: int = 2, source: Any = "llama", overrides: Any = None, **options: Any) -> ModelPlan:
    """Plans a folder for a number of ranks."""
    spec = tpkit.load_spec(source, config=folder, overrides=overrides)
    return tpkit.plan_model(spec, ranks=tp, checkpoint=tpkit.open_checkpoint(folder), **options)


def on_rank(
    folder: Path, rank: int = 0, tp: int = 1, overrides: Any = None, source: Any = "llama", **options: Any
) -> Model:
    """Builds what one of several ranks holds, in this process; it can compute alone only for tp 1."""
    spec = tpkit.load_spec(source, config=folder, overrides=overrides)
    return tpkit.build(spec, checkpoint=folder, tp=TensorParallel(rank=rank, size=tp), **options)


class BoxReader:
    """A reader that counts for itself, and hands out one buffer that it overwrites when it is asked again.

    Attributes:
        asked: the boxes asked for, by tensor.
        bytes_read: bytes of all of them.
    """

    def __init__(self) -> None:
        self.asked: dict[str, list[Box]] = {}
        self.bytes_read = 0
        self._handed_out = torch.empty(0, dtype=torch.uint8)

    def read(self, name: str, stored: Stored, shape: Sequence[int], box: Box) -> torch.Tensor:
        self._handed_out.fill_(255)  # NaN in every float type
        with stored.file.open("rb") as stream:
            stream.seek(stored.begin)
            data = bytearray(stream.read(stored.nbytes))
        whole = torch.frombuffer(data, dtype=torch_dtype(stored.dtype)).reshape(tuple(shape))
        piece = whole[tuple(slice(run.start, run.stop, run.step) for run in box)].clone()
        self.asked.setdefault(name, []).append(tuple(box))
        self.bytes_read += piece.numel() * piece.element_size()
        self._handed_out = piece.reshape(-1).view(torch.uint8)
        return piece

    def close(self) -> None:
        self._handed_out.fill_(255)

    def elements(self, name: str) -> set[tuple[int, ...]]:
        """Returns the indices asked for, and fails if one was asked for twice."""
        found = [index for box in self.asked[name] for index in product(*(run.indices() for run in box))]
        assert len(found) == len(set(found)), f"{name}: elements read twice"
        return set(found)
