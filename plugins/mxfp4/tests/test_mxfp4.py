"""gpt-oss blocks against transformers' own decoder, over every kind of layer and cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from tpkit import CheckpointError, LoadError
from tpkit.layers import ColumnParallelLinear
from tpkit.layers.parallel import ParallelLinear
from tpkit.quant import Header, Target
from tpkit.testing import QuantConformance
from tpkit_mxfp4 import Mxfp4

CONFIG = {
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
}
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def stored(out: int, in_: int, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    groups = -(-in_ // 32)
    return {
        "blocks": torch.randint(0, 256, (out, groups, 16), dtype=torch.uint8),
        "scales": torch.randint(120, 130, (out, groups), dtype=torch.uint8),
    }


def decoded(tensors: dict[str, torch.Tensor], in_: int) -> torch.Tensor:
    """By the definition, one value at a time."""
    rows = []
    for blocks, scales in zip(tensors["blocks"].tolist(), tensors["scales"].tolist(), strict=True):
        row = []
        for block, scale in zip(blocks, scales, strict=True):
            for byte in block:
                codes = byte & 15, byte >> 4
                row += [(-1.0 if code & 8 else 1.0) * VALUES[code & 7] * 2.0 ** (scale - 127) for code in codes]
        rows.append(row[:in_])
    return torch.tensor(rows)


def held(layers: list[ParallelLinear], wanted: list[torch.Tensor]) -> None:
    """Every rank's weight is its part of the whole, to the bit."""
    spec = layers[0].sharded.layer.spec
    for rank, layer in enumerate(layers):
        if layer.out_features and layer.in_features:
            outs, ((start, stop),) = (layer.sharded.layer.bounds(side, rank) for side in (spec.out, spec.in_))
            part = torch.cat([whole[a:b, start:stop] for whole, (a, b) in zip(wanted, outs, strict=True)])
            torch.testing.assert_close(layer.quant_method.dequantize(layer), part, rtol=0, atol=0)


def test_the_definition_is_that_of_transformers() -> None:
    tensors = load_file(Path(__file__).parent / "data" / "linear.safetensors")
    wanted = tensors.pop("decoded")
    torch.testing.assert_close(decoded(tensors, wanted.shape[1]), wanted, rtol=0, atol=0)
    layer = ColumnParallelLinear(*reversed(wanted.shape), bias=False, quant=Mxfp4())
    layer.load(tensors)
    held([layer], [wanted])


class TestConformance(QuantConformance):
    method = Mxfp4()
    config: ClassVar[dict[str, Any]] = {}

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return stored(*weight.shape, seed=int(weight.abs().sum()))

    def decode(self, tensors: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        return decoded(tensors, in_)


def test_the_ends_of_the_scales() -> None:
    layer = ColumnParallelLinear(32, 4, bias=False, quant=Mxfp4())
    tensors = stored(4, 32)
    tensors["scales"] = torch.tensor([[0], [127], [250], [255]], dtype=torch.uint8)
    for scales in (tensors["scales"], tensors["scales"].view(torch.float8_e8m0fnu)):
        with pytest.raises(CheckpointError, match=r"scales: 1 of 4 values on rank 0 are NaN"):
            layer.load({**tensors, "scales": scales})
    tensors["scales"][3] = 128
    layer.load(tensors)
    torch.testing.assert_close(layer.quant_method.dequantize(layer), decoded(tensors, 32), rtol=0, atol=0)
    layer.load({**tensors, "scales": tensors["scales"].view(torch.float8_e8m0fnu)})
    torch.testing.assert_close(layer.quant_method.dequantize(layer), decoded(tensors, 32), rtol=0, atol=0)


def test_which_modules() -> None:
    method = Mxfp4(Mxfp4.Options(**Mxfp4.read_config({**CONFIG, "dequantize": False})))
    experts = Target(name="model.layers.3.mlp.experts.gate_up_proj")
    assert method.for_module(experts) is method
    for name in ("model.layers.3.self_attn.q_proj", "model.layers.11.mlp.router"):
        assert method.for_module(Target(name=name)) is None
    assert method.for_module(Target(name="lm_head", kind="head")) is None
    assert method.for_module(Target(name="model.embed_tokens", kind="embedding")) is None
    unsaid, plain = Mxfp4(), {"weight": Header(dtype="bfloat16", shape=(64, 64))}
    assert unsaid.for_module(Target(name="model.layers.0.self_attn.q_proj", stored=plain)) is None
    assert unsaid.for_module(experts) is unsaid


def test_what_is_refused() -> None:
    with pytest.raises(ValidationError, match="bits"):
        Mxfp4.Options(**Mxfp4.read_config({"bits": 4}))
    layer = ColumnParallelLinear(64, 8, bias=False, quant=Mxfp4(), prefix="experts.up")
    tensors = stored(8, 64)
    with pytest.raises(LoadError, match="scales"):
        layer.load({"blocks": tensors["blocks"]})
    with pytest.raises(LoadError, match="blocks"):
        layer.load({**tensors, "blocks": tensors["blocks"].flatten(1)[:, :16]})


def test_it_may_be_loaded_again() -> None:
    layer = ColumnParallelLinear(64, 8, bias=False, quant=Mxfp4())
    for seed in (1, 2):
        layer.load(stored(8, 64, seed))
        held([layer], [decoded(stored(8, 64, seed), 64)])


def test_the_entry_point_is_declared() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert 'mxfp4 = "tpkit_mxfp4:Mxfp4"' in text
    assert json.loads(Mxfp4.Options(**CONFIG).model_dump_json()) == CONFIG
