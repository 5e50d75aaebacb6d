"""Tiny real checkpoints with random weights, written by transformers, each with the logits that it computes.

    made = families.make(Tiny(family="qwen3", heads=9, kv=3))
    made.folder / "config.json", made.ids, made.logits

Names and layouts on disk are those of ``save_pretrained``, that is of the hub. The reference is computed in float32
with eager attention (see `attention` in tests/tiny_configs.py), from the weights as they were saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_configs import arguments, attention

__all__ = ["SIZES", "Families", "Made", "Tiny", "fuse", "rewrite", "tensors_of"]

#: (heads, kv, ffn, vocab, hidden): even ones, and those that nothing divides
SIZES = [(4, 2, 128, 256, 64), (9, 3, 136, 257, 144), (4, 1, 131, 257, 64), (8, 8, 128, 256, 64), (6, 2, 96, 250, 96)]


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """What to make.

    Attributes:
        family: a model_type of transformers that tests/tiny_configs.py lists.
        tied: the head is the embedding.
        dtype: of the stored weights.
        shard_size: files of at most this size, with an index; "": one file.
        fields: further fields of config.json, as JSON.
    """

    family: str = "llama"
    heads: int = 4
    kv: int = 2
    ffn: int = 128
    vocab: int = 256
    hidden: int = 64
    layers: int = 2
    seed: int = 0
    tied: bool = False
    dtype: str = "float32"
    shard_size: str = ""
    fields: str = "{}"

    @property
    def description(self) -> str:
        """The description that serves the family."""
        return self.family

    def config(self) -> dict[str, Any]:
        """Returns the arguments of transformers' configuration class."""
        sizes = {"vocab": self.vocab, "hidden": self.hidden, "ffn": self.ffn, "layers": self.layers, "length": 128}
        sizes |= {"heads": self.heads, "kv": self.kv}
        return arguments(self.family, sizes, {"tie_word_embeddings": self.tied, **json.loads(self.fields)})


@dataclass(frozen=True)
class Made:
    """A checkpoint and its reference.

    Attributes:
        tiny: what it is.
        folder: holds config.json and the weights.
        ids: ``[2, 14]`` int64.
        logits: ``[2, 14, vocab]`` float32.
    """

    tiny: Tiny
    folder: Path
    ids: torch.Tensor
    logits: torch.Tensor


class Families:
    """Makes each checkpoint once.

    Args:
        root: where the folders go.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def make(self, tiny: Tiny | None = None) -> Made:
        """Returns a checkpoint, made if it is not there yet. Its folder is shared: tests that damage it copy it."""
        tiny = tiny or Tiny()
        name = f"{tiny.family}-{hashlib.sha256(repr(tiny).encode()).hexdigest()[:12]}"
        folder, reference = self.root / name, self.root / f"{name}.reference"
        if not reference.exists():
            _write(tiny, folder, reference)
        found = load_file(reference)
        return Made(tiny, folder, found["ids"], found["logits"])

    def copy(self, tiny: Tiny, to: Path) -> Path:
        """Returns a copy of a checkpoint's folder that may be changed."""
        return Path(shutil.copytree(self.make(tiny).folder, to))


def _write(tiny: Tiny, folder: Path, reference: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.stack([torch.arange(14) * 7 % (tiny.vocab - 56) + 3, torch.arange(14) * 11 % (tiny.vocab - 40) + 5])
    with _quiet():
        model = _random(tiny)
        size = {"max_shard_size": tiny.shard_size} if tiny.shard_size else {}
        model.to(getattr(torch, tiny.dtype)).save_pretrained(folder, **size)
        kind = {"dtype": torch.float32, "attn_implementation": attention(tiny.family, json.loads(tiny.fields))}
        kind["experts_implementation"] = "eager"  # any width; grouped ones want multiples of 16 bytes
        model = AutoModelForCausalLM.from_pretrained(folder, **kind).eval()
    with torch.no_grad():
        logits = model(ids).logits
    save_file({"ids": ids, "logits": logits.float().contiguous()}, reference)


def _random(tiny: Tiny) -> Any:
    """Returns a model whose matrices, norms, biases and corrections are all random, norms around 1."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(tiny.seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(tiny.family, **tiny.config())).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = name.endswith("weight") and (parameter.ndim == 1 or "norm" in name)
            around = 1.0 if norm else 0.0
            parameter.copy_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.2) + around)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):  # added to the scores of experts
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all weights of a folder."""
    return {k: v for file in sorted(folder.glob("model*.safetensors")) for k, v in load_file(file).items()}


def rewrite(folder: Path, tensors: Mapping[str, torch.Tensor] | None = None, **fields: Any) -> Path:
    """Replaces all weights of a folder (None: leaves them) and sets fields of its config.json; ``...`` removes one."""
    if tensors is not None:
        for file in folder.glob("model*.safetensors*"):
            file.unlink()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return folder


def fuse(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the same weights with q, k, v and gate, up as one tensor each, in blocks."""
    left = dict(tensors)
    for name in list(tensors):
        for parts, whole in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
            stem, _, kind = name.rpartition(".")
            if stem.endswith("." + parts[0]):
                above = stem.removesuffix(parts[0])
                left[f"{above}{whole}.{kind}"] = torch.cat([left.pop(f"{above}{part}.{kind}") for part in parts])
    return left
