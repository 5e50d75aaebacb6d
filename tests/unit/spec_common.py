"""What the tests of descriptions share: a registry of the built-in words, a small description, and ways to bend it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tpkit import attention, feedforward, styles, tables
from tpkit.errors import SpecError
from tpkit.registry import Registry
from tpkit.spec import Description, describe

REPOSITORY = Path(__file__).parents[2]
DESCRIPTIONS = REPOSITORY / "model_configs"
REAL_CONFIGS = REPOSITORY.parent / "shared/data/real_configs"
NAMES = ("llama", "qwen2", "qwen3")


def registry() -> Registry:
    """The built-in words, whether or not tpkit is installed."""
    made = Registry()
    for name, target in (
        ("attention", attention.Attention),
        ("mlp", feedforward.Mlp),
        ("moe", feedforward.Moe),
        ("embedding", tables.Embedding),
    ):
        made.register("module", name, target)
    for name in ("column", "row", "qkv", "merged_column", "vocab", "replicated"):
        made.register("style", name, getattr(styles, name))
    return made


BASE = """\
schema: 1
family: small
architectures: [SmallForCausalLM]
model_types: [small, wide]
config:
  model_type: small
  vocab_size: 256
  hidden_size: 64
  intermediate_size: 128
  num_hidden_layers: 4
  num_attention_heads: 4
  num_key_value_heads: num_attention_heads
  head_dim: hidden_size // num_attention_heads
  hidden_act: silu
  rms_norm_eps: 1e-6
  rope_theta: 10000.0
  rope_scaling: null
  sliding_window: null
  layer_type: {per_layer: layer_types, every: 2, is: full_attention, otherwise: sliding_attention}
  bias: false
  tie_word_embeddings: false
ignore: [model.layers.*.self_attn.rotary_emb.inv_freq]
tree:
  model:
    embed_tokens: {module: embedding, style: vocab}
    layers:
      repeat: num_hidden_layers
      forward: [x + self_attn(input_layernorm(x)), x + mlp(post_attention_layernorm(x))]
      input_layernorm: {norm: rms}
      self_attn:
        module: attention
        rope: {pairs: half}
        window: {when: model_type != 'wide' and layer_type == 'sliding_attention', is: sliding_window}
        qkv_proj: {style: qkv, packs: [q_proj, k_proj, v_proj], bias: bias}
        q_norm: {norm: rms, over: head}
        o_proj: {style: row}
      post_attention_layernorm: {norm: rms}
      mlp:
        module: mlp
        activation: hidden_act
        gate_up_proj: {style: merged_column, packs: [gate_proj, up_proj]}
        down_proj: {style: row}
    norm: {norm: rms}
  lm_head: {style: vocab, tied: {when: tie_word_embeddings, to: model.embed_tokens}}
"""


def bent(*changes: tuple[str, str]) -> str:
    """Returns the small description with texts replaced; each must be there."""
    text = BASE
    for old, new in changes:
        assert text.count(old) >= 1, f"{old!r} is not in the description"
        text = text.replace(old, new, 1)
    return text


def described(text: str, folder: Path, known: Registry | None = None) -> Description:
    """Writes a description to a file and reads it."""
    path = folder / "d.yaml"
    path.write_text(text)
    return describe(path, registry=known or registry())


def problems_of(text: str, folder: Path) -> list[str]:
    """Returns what is wrong with a description, without the folder."""
    with pytest.raises(SpecError) as caught:
        described(text, folder)
    return [line.replace(f"{folder}/", "") for line in caught.value.problems]


def bind_problems(description: Description, config: Any, folder: Path | None = None, **overrides: Any) -> list[str]:
    """Returns what does not fit when a description is bound."""
    with pytest.raises(SpecError) as caught:
        description.bind(config, overrides)
    return [line.replace(f"{folder}/", "") if folder else line for line in caught.value.problems]
