"""``tpkit init`` drafts a description that binds a renamed checkpoint, and asks about what it guessed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import small
from tpkit import cli
from tpkit.drafting import draft

Capture = pytest.CaptureFixture[str]

#: another project's names for the same tensors
RENAMED = (
    ("model.embed_tokens", "transformer.tok_emb"),
    ("model.layers", "transformer.blocks"),
    ("self_attn.q_proj", "attention.wq"),
    ("self_attn.k_proj", "attention.wk"),
    ("self_attn.v_proj", "attention.wv"),
    ("self_attn.o_proj", "attention.wo"),
    ("mlp.gate_proj", "ffn.w1"),
    ("mlp.up_proj", "ffn.w3"),
    ("mlp.down_proj", "ffn.w2"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("model.norm", "transformer.norm"),
    ("lm_head", "output"),
)
IDENTITY = {"architectures": ["NewForCausalLM"], "model_type": "newish", "hidden_act": "silu", "rope_theta": 1e4}


def renamed(names: Iterable[tuple[str, str]] = RENAMED, **fields: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in small.weights(**fields).items():
        for old, new in names:
            name = name.replace(old, new)
        found[name] = tensor
    return found


def drafted(capsys: Capture, folder: Path, out: Path) -> str:
    assert cli.main(["init", str(folder), "--out", str(out)]) == 0
    return capsys.readouterr().out


def fits(capsys: Capture, out: Path, folder: Path) -> None:
    code = cli.main(["check", str(out), "--checkpoint", str(folder)])
    assert code == 0, capsys.readouterr().out + out.read_text()


def fitting(capsys: Capture, folder: Path, out: Path) -> tuple[str, str]:
    """Drafts a description that must fit its checkpoint; returns what was said, and the draft."""
    said = drafted(capsys, folder, out)
    fits(capsys, out, folder)
    return said, out.read_text()


def test_an_installed_description_is_named_instead(tmp_path: Path, capsys: Capture) -> None:
    folder = small.write(tmp_path / "c")
    said = drafted(capsys, folder, tmp_path / "out.yaml")
    assert "llama describes this model" in said
    assert "tpkit build auto --checkpoint" in said
    assert not (tmp_path / "out.yaml").exists()


def test_a_renamed_checkpoint_binds_all_of_its_tensors(tmp_path: Path, capsys: Capture) -> None:
    folder = small.write(tmp_path / "c", renamed(), **IDENTITY)
    out = tmp_path / "newish.yaml"
    said = drafted(capsys, folder, out)
    fits(capsys, out, folder)
    assert f"tpkit check {out} --checkpoint {folder}" in said
    text = out.read_text()
    for about in ("`half` pairs", "which of them goes through the activation", "forward: guessed", "zero_centered"):
        assert about in said
        assert about in text
    assert "packs: [w1, w3]" in text


def test_nothing_is_overwritten(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small.write(tmp_path / "c", renamed(), **IDENTITY)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", str(folder)]) == 0
    before = (tmp_path / "newish.yaml").read_text()
    assert cli.main(["init", str(folder)]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert (tmp_path / "newish.yaml").read_text() == before


def test_names_of_an_index_are_enough(tmp_path: Path, capsys: Capture) -> None:
    tensors = renamed()
    folder = small.write(tmp_path / "c", tensors, files=[list(tensors)], **IDENTITY)
    (folder / "model-00001-of-00001.safetensors").unlink()
    out = tmp_path / "out.yaml"
    drafted(capsys, folder, out)
    fits(capsys, out, folder)


def test_fused_biased_and_with_norms_on_heads(tmp_path: Path, capsys: Capture) -> None:
    tensors = {}
    for name, tensor in renamed().items():
        if ".wq" in name:
            stem = name.replace("wq", "{}")
            parts = [small.weights()["model.layers.0.self_attn." + p + "_proj.weight"] for p in "qkv"]
            tensors[stem.format("query_key_value")] = torch.cat(parts).contiguous()
            tensors[stem.format("query_key_value").replace("weight", "bias")] = torch.zeros(64)
            tensors[stem.format("q_norm")], tensors[stem.format("key_layernorm")] = torch.ones(8), torch.ones(8)
        elif ".wk" not in name and ".wv" not in name:
            tensors[name] = tensor
    folder = small.write(tmp_path / "c", tensors, **IDENTITY)
    out = tmp_path / "out.yaml"
    said, text = fitting(capsys, folder, out)
    assert "query_key_value: {style: qkv, fused: [q, k, v], bias: true}" in text
    assert "key_layernorm: {norm: rms, role: k_norm, over: head}" in text
    assert "Shapes cannot tell" in said


def test_names_of_gpt_style_with_layer_norms(tmp_path: Path, capsys: Capture) -> None:
    h, layers = 32, 2
    tensors: dict[str, torch.Tensor] = {"wte.weight": torch.zeros(96, h), "wpe.weight": torch.zeros(64, h)}
    for layer in range(layers):
        for name, shape in (
            ("ln_1", (h,)), ("ln_2", (h,)), ("attn.c_attn", (h, 3 * h)), ("attn.c_proj", (h, h)),
            ("mlp.c_fc", (h, 4 * h)), ("mlp.c_proj", (4 * h, h)),
        ):  # fmt: skip
            tensors[f"h.{layer}.{name}.weight"] = torch.zeros(shape)
            tensors[f"h.{layer}.{name}.bias"] = torch.zeros(shape[-1:])
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64)
    tensors |= {"ln_f.weight": torch.zeros(h), "ln_f.bias": torch.zeros(h)}
    folder = small.write(tmp_path / "c", tensors)
    sizes = {"n_embd": h, "n_layer": layers, "n_head": 4, "n_positions": 64, "vocab_size": 96, "n_inner": None}
    said_also = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True}
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["OtherLM"], "model_type": "other", **sizes, **said_also})
    )
    out = tmp_path / "out.yaml"
    said, text = fitting(capsys, folder, out)
    assert "hidden_size: {from: n_embd, default: 32}" in text
    assert "intermediate_size: 4 * hidden_size" in text
    assert "transposed: true" in text
    assert "h.*.attn.bias" in text
    assert "scale_attn_weights: true" in said


def test_config_alone_gives_a_skeleton_and_says_so(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**small.CONFIG, **IDENTITY}))
    out = tmp_path / "out.yaml"
    said = drafted(capsys, path, out)
    assert "names of tensors are unknown" in said
    assert cli.main(["check", str(out), "--config", str(path)]) == 0, capsys.readouterr().out + out.read_text()


def test_what_is_not_read_is_asked() -> None:
    made = draft({**small.CONFIG, **IDENTITY, "odd_multiplier": 3.5, "torch_dtype": "bfloat16"}, None, "here")
    assert any("odd_multiplier: 3.5" in question for question in made.questions)
    assert not any("torch_dtype" in question for question in made.questions)
    assert all(f"#  {number}. " in made.text for number in range(1, len(made.questions) + 1))


def test_layers_that_differ_and_parts_not_understood_are_asked() -> None:
    shapes: dict[str, Any] = {name: tuple(tensor.shape) for name, tensor in renamed().items()}
    shapes["transformer.blocks.1.mixer.A_log"] = (4,)
    shapes["vision.patch.weight"] = (8, 8)
    made = draft({**small.CONFIG, **IDENTITY}, shapes, "here")
    assert any("only 1 of 2 copies of transformer.blocks have mixer" in question for question in made.questions)
    assert any("left out: mixer" in question for question in made.questions)
    assert "vision.**" in made.text


@pytest.mark.parametrize(
    ("norms", "forward"),
    [
        (["ln"], "[x + attention(ln(x)) + ffn(ln(x))]"),
        (
            ["post_attention_norm", "post_ffn_norm"],
            "[x + post_attention_norm(attention(x)), x + post_ffn_norm(ffn(x))]",
        ),
        (
            ["input_norm", "post_attention_norm", "pre_ffn_norm", "post_ffn_norm"],
            "[x + post_attention_norm(attention(input_norm(x))), x + post_ffn_norm(ffn(pre_ffn_norm(x)))]",
        ),
    ],
    ids=["parallel", "after", "around"],
)
def test_forward_by_the_number_and_names_of_norms(norms: list[str], forward: str) -> None:
    shapes: dict[str, Any] = {
        name: tuple(tensor.shape)
        for name, tensor in renamed().items()
        if "attn_norm" not in name and "ffn_norm" not in name
    }
    for layer in range(2):
        shapes |= {f"transformer.blocks.{layer}.{name}.weight": (32,) for name in norms}
    made = draft({**small.CONFIG, **IDENTITY}, shapes, "here")
    assert f"forward: {forward}" in made.text
    assert any(question.startswith("forward: guessed from") for question in made.questions)
