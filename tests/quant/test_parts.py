"""Layers and parts of packed layers that are quantised differently: the dense model's logits on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tpkit
from tests.quant.methods import dense, quantised, registry
from tests.ranks import Ranks
from tests.small import on_rank, write
from tpkit.errors import SpecError
from tpkit.layers.parted import PartedLinear
from tpkit.report import plan_text

IDS = torch.arange(14)[None] * 5 % 96
SIZES: dict[str, Any] = {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 48, "hidden_size": 48}
MIXED = {
    "quant_method": "rows",
    "modules_to_not_convert": ["v_proj", "layers.1.mlp.gate_up_proj", "layers.0.mlp.up_proj"],
}
PLAIN = ("v_proj", "1.mlp.gate_proj", "1.mlp.up_proj", "0.mlp.up_proj")


def build(folder: Path, tp: Any = None, quant: Any = None) -> Any:
    found = registry()
    spec = tpkit.load_spec("llama", config=folder, quant=quant, registry=found)
    return tpkit.build(spec, checkpoint=folder, tp=tp, registry=found)


def logits(folder: Path, quant: Any = None) -> torch.Tensor:
    return build(folder, quant=quant)(IDS)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    folder = tmp_path_factory.mktemp("mixed")
    tensors = quantised(PLAIN, **SIZES)
    plain = write(folder / "dense", dense(tensors), **SIZES)
    return write(folder / "mixed", tensors, quantization_config=MIXED, **SIZES), on_rank(plain)(IDS)


def test_parts_that_differ_are_built_apart_and_the_plan_says_so(mixed: tuple[Path, torch.Tensor]) -> None:
    folder, reference = mixed
    model = build(folder)
    first = model.model.layers[0]
    assert isinstance(first.self_attn.qkv_proj, PartedLinear)
    assert isinstance(first.mlp.gate_up_proj, PartedLinear)
    assert not isinstance(model.model.layers[1].mlp.gate_up_proj, PartedLinear)
    text = plan_text(model.plan)
    assert (
        "model.layers.*.self_attn.qkv_proj is built in parts (q_proj: rows, k_proj: rows, v_proj: none), 2 layers"
        in text
    )
    assert "model.layers.*.mlp.gate_up_proj is built in parts (gate_proj: rows, up_proj: none)" in text
    assert "kernel of rows on cpu: even" in text
    torch.testing.assert_close(model(IDS), reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_on_several_ranks(size: int, mixed: tuple[Path, torch.Tensor], ranks: Ranks) -> None:
    folder, reference = mixed
    for found in ranks(size).run(logits, folder):
        torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-4)


def test_rules_that_split_a_tensor_stored_fused(tmp_path: Path) -> None:
    tensors = quantised()
    for layer in range(2):
        stem = f"model.layers.{layer}.self_attn"
        for last in ("weight", "scale"):
            tensors[f"{stem}.qkv_proj.{last}"] = torch.cat([tensors.pop(f"{stem}.{p}_proj.{last}") for p in "qkv"])
    folder = write(tmp_path, tensors, quantization_config={"quant_method": "rows"})
    assert torch.isfinite(logits(folder)).all()
    for rule, fits in (("qkv_proj", False), ("v_proj", True)):
        said = {"quant_method": "rows", "modules_to_not_convert": [rule]}
        write(tmp_path, tensors, quantization_config=said)
        with pytest.raises(SpecError if fits else tpkit.LoadError) as caught:
            build(folder)
        if fits:
            assert "stored fused as model.layers.0.self_attn.qkv_proj" in str(caught.value)
            assert "q_proj: rows, k_proj: rows, v_proj: none" in str(caught.value)


def test_other_options_for_some_modules(tmp_path: Path) -> None:
    """o_proj and k_proj have groups of 16, the rest one scale for a row."""
    tensors, fine = quantised(), quantised(group=16)
    wide = [name for name in tensors if "o_proj" in name or "k_proj" in name]
    tensors |= {name: fine[name] for name in wide}
    plain = write(tmp_path / "dense", dense(tensors))
    said = {"quant_method": "rows", "wide": ["o_proj", "k_proj"]}
    folder = write(tmp_path / "wide", tensors, quantization_config=said)
    model = build(folder)
    assert [str(model.plan.planned[f"model.layers.0.self_attn.{n}"].choice) for n in ("o_proj", "qkv_proj.k_proj")] == [
        "rows g16", "rows g16",
    ]  # fmt: skip
    torch.testing.assert_close(model(IDS), on_rank(plain)(IDS), rtol=1e-4, atol=1e-4)


def test_dequantised_while_loading(mixed: tuple[Path, torch.Tensor]) -> None:
    folder, reference = mixed
    model = build(folder, quant={"dequantize": True})
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert set(dict(model.model.layers[0].self_attn.o_proj.named_parameters())) == {"weight"}
    assert "rows dequantized" in plan_text(model.plan)
    torch.testing.assert_close(model(IDS), reference, rtol=1e-4, atol=1e-4)
