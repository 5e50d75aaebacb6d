"""modelopt: conformance for every layout, values of the library, both forms of config, mixed precision, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import load_file

from tpkit import LoadError, PluginError
from tpkit.layers import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from tpkit.quant import Header, LinearSpec, Target
from tpkit.testing import QuantConformance
from tpkit_modelopt import ModelOpt

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def method(algo: str, **options: Any) -> ModelOpt:
    return ModelOpt(ModelOpt.Options(quant_algo=algo, **options))


def spread(values: torch.Tensor, out: int, in_: int, rows: int, columns: int) -> torch.Tensor:
    return values.double().repeat_interleave(rows, 0)[:out].repeat_interleave(columns, 1)[:, :in_]


def amax(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    out, in_ = weight.shape
    padded = torch.nn.functional.pad(weight.abs(), (0, -in_ % columns, 0, -out % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3)).clamp(min=1e-6)


def fp8(values: torch.Tensor) -> torch.Tensor:
    return values.float().clamp(-448, 448).to(torch.float8_e4m3fn)


class TestFp8Block(QuantConformance):
    """Small blocks; the scale has four dimensions on disk."""

    method = method("fp8_pb_wo", group_size=6)
    config: ClassVar[dict[str, Any]] = {"quant_algo": "fp8_pb_wo", "group_size": 6, "ignore": []}

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = amax(weight, 6, 6) / 448
        return {"weight": fp8(weight / spread(scale, *weight.shape, 6, 6)), "weight_scale": scale[:, None, :, None]}

    def decode(self, stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        return stored["weight"].double() * spread(stored["weight_scale"][:, 0, :, 0], out, in_, 6, 6)


class TestMxfp8(QuantConformance):
    method = method("MXFP8")

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        power = (amax(weight, 1, 32) / 448).log2().ceil()
        codes = fp8(weight / spread(power.exp2(), *weight.shape, 1, 32))
        return {"weight": codes, "weight_scale": (power + 127).to(torch.uint8)}

    def decode(self, stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        powers = torch.exp2(stored["weight_scale"].double() - 127)
        return stored["weight"].double() * spread(powers, out, in_, 1, 32)


class TestNvfp4(QuantConformance):
    method = method("NVFP4")
    step_in = 2

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        second = weight.abs().max() / 2688
        scale = fp8((amax(weight, 1, 16) / 6 / second).clamp(min=2**-9))
        scaled = weight / (spread(scale.float(), *weight.shape, 1, 16) * second)
        codes = (scaled.unsqueeze(-1) - FP4).abs().argmin(-1).to(torch.uint8)
        packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
        return {"weight": packed, "weight_scale": scale, "weight_scale_2": second}

    def decode(self, stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        codes = torch.stack([stored["weight"] & 15, stored["weight"] >> 4], -1).flatten(1)
        return FP4[codes.long()] * spread(stored["weight_scale"].float(), out, in_, 1, 16) * stored["weight_scale_2"]


class TestInt4Awq(QuantConformance):
    """Two rows in a byte, and an input that is multiplied with a factor for each feature."""

    method = method("W4A16_AWQ", group_size=8)
    step_out = 2
    fused = False  # each part smooths its own inputs
    optional = ("pre_quant_scale",)

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        smooth = torch.rand(weight.shape[1]) + 0.5
        scale = amax(weight / smooth, 1, 8) / 7
        codes = (weight / smooth / spread(scale, *weight.shape, 1, 8)).round().to(torch.int8) & 15
        packed = (codes[0::2] | (codes[1::2] << 4)).view(torch.uint8)
        return {"weight": packed, "weight_scale": scale, "pre_quant_scale": smooth}

    def decode(self, stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        bytes_ = stored["weight"].to(torch.int32)
        codes = torch.stack([bytes_ & 15, bytes_ >> 4], 1).flatten(0, 1)
        codes = torch.where(codes > 7, codes - 16, codes)
        return codes * spread(stored["weight_scale"], out, in_, 1, 8) * stored["pre_quant_scale"].double()


# values of the library


def dequantised(quant: ModelOpt, stored: dict[str, torch.Tensor], shape: Any, size: int, kind: Any) -> torch.Tensor:
    parts = []
    for rank in range(size):
        flags = {} if kind is ColumnParallelLinear else {"reduce_results": False}
        layer = kind(shape[1], shape[0], bias=False, quant=quant, tp_rank=rank, tp_size=size, **flags)
        layer.load(stored)
        assert not hasattr(layer, "input_scale")
        parts.append(quant.dequantize(layer))
    return torch.cat(parts, 0 if kind is ColumnParallelLinear else 1)


@pytest.mark.parametrize("file", sorted((Path(__file__).parent / "data").iterdir()), ids=lambda file: file.stem)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_values_are_those_of_the_library(file: Path, size: int, kind: Any) -> None:
    with safe_open(file, "pt") as opened:
        quant, block = method(opened.metadata()["quant_algo"]), int(opened.metadata()["block"])
    assert quant.options.group in (block, 128 if "pb_wo" in file.stem else block)
    stored = load_file(file)
    wanted = stored.pop("decoded")
    found = dequantised(quant, stored, wanted.shape, size, kind)
    torch.testing.assert_close(found, wanted, rtol=3e-7, atol=0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_q_k_and_v_keep_their_second_scales_and_their_smoothing(size: int) -> None:
    kit, heads = TestNvfp4(), {"q_proj": 12, "k_proj": 4, "v_proj": 4}
    torch.manual_seed(0)
    parts = {
        name: {**kit.encode(torch.randn(rows, 32) * 10**n), "pre_quant_scale": torch.rand(32) + n}
        for n, (name, rows) in enumerate(heads.items())
    }
    tensors = {f"{part}.{name}": tensor for part, stored in parts.items() for name, tensor in stored.items()}
    for rank in range(size):
        quant = method("NVFP4_AWQ")
        layer = QKVParallelLinear(32, 2, 6, 2, bias=False, quant=quant, tp_rank=rank, tp_size=size)
        layer.load(tensors)
        bounds = layer.sharded.layer.bounds(layer.sharded.layer.spec.out, rank)
        wanted = [
            (kit.decode(stored, heads[part], 32) * stored["pre_quant_scale"].double())[start:stop]
            for (part, stored), (start, stop) in zip(parts.items(), bounds, strict=True)
        ]
        torch.testing.assert_close(quant.dequantize(layer), torch.cat(wanted).float(), rtol=1e-6, atol=0)


def test_fp8_that_was_calibrated_by_row() -> None:
    weight, scale = fp8(torch.randn(6, 10)), torch.rand(6, 1)
    found = dequantised(method("FP8"), {"weight": weight, "weight_scale": scale}, (6, 10), 2, ColumnParallelLinear)
    assert torch.equal(found, weight.float() * scale)


# configs

PRODUCER = {"name": "modelopt", "version": "0.47.0"}
FLOAT8 = {"dynamic": False, "num_bits": 8, "type": "float"}
FLOAT4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}


def group(targets: list[str], weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"weights": weights, "targets": targets, **({"input_activations": inputs} if inputs else {})}


MIXED = {
    "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"},
    "model.layers.0.mlp.gate_proj": {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.0.self_attn.qkv_proj": {
        "quant_algo": "W4A16_AWQ",
        "group_size": 64,
        "has_zero_point": False,
        "pre_quant_scale": True,
    },
    "lm_head": {"quant_algo": "FP8"},
}
SIDE_FILE = {
    "quant_algo": "NVFP4",
    "kv_cache_quant_algo": "FP8",
    "group_size": 16,
    "exclude_modules": ["lm_head", "model.layers.0.self_attn*"],
}


@pytest.mark.parametrize(
    ("config", "label"),
    [
        (
            {
                "config_groups": {"group_0": group(["Linear"], FLOAT8, FLOAT8)},
                "ignore": ["lm_head"],
                "quant_algo": "FP8",
                "kv_cache_scheme": FLOAT8,
                "producer": PRODUCER,
            },
            "FP8",
        ),
        ({"config_groups": {"group_0": group(["Linear"], FLOAT4, FLOAT4)}, "quant_algo": "NVFP4"}, "NVFP4 g16"),
        ({"ignore": ["lm_head"], "quant_algo": "fp8_pb_wo", "producer": PRODUCER}, "FP8_PB_WO g128"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": None}, "FP8"),
        (SIDE_FILE, "NVFP4 g16"),
        ({"producer": PRODUCER, "quantization": SIDE_FILE}, "NVFP4 g16"),
        ({"quant_algo": "W4A16_AWQ", "awq_block_size": 64, "has_zero_point": False}, "W4A16_AWQ g64"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": MIXED}, "MIXED_PRECISION"),
        ({"quant_algo": None, "kv_cache_quant_algo": "FP8"}, "None"),
    ],
)
def test_reads_both_forms_of_config(config: dict[str, Any], label: str) -> None:
    assert ModelOpt(ModelOpt.Options(**ModelOpt.read_config(config))).label() == label


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_algo": "INT3"}, "none of"),
        ({"quant_algo": "NVFP4_SVD", "lora_rank": 32}, "low-rank"),
        ({"quant_algo": "W4A16_AWQ", "has_zero_point": True}, "has_zero_point"),
        ({"quant_algo": "FP8", "never_heard_of": 1}, "never_heard_of"),
        ({"ignore": []}, "quant_algo"),
        ({"quant_algo": "FP8", "config_groups": {"group_0": {**group(["Linear"], FLOAT8), "odd": 1}}}, "config_groups"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "FP8", "odd": 1}}}, "odd"),
        (
            {"quant_algo": "MIXED_PRECISION", "config_groups": {"g": group(["a.b"], {**FLOAT4, "group_size": 128})}},
            "without quantized_layers",
        ),
    ],
)
def test_refuses(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ModelOpt.Options(**ModelOpt.read_config(config))


# modules


def chosen(config: dict[str, Any], name: str, **kw: Any) -> str | None:
    quant = ModelOpt(ModelOpt.Options(**ModelOpt.read_config(config)))
    answer = quant.for_module(Target(name=name, **kw))
    return None if answer is None else answer.label()


def test_excluded_are_whole_names_with_stars_of_parts_and_of_packed_projections() -> None:
    config = {"quant_algo": "FP8", "exclude_modules": ["model.layers.1.self_attn*", "*router", "a.qkv_proj", "q_proj"]}
    assert chosen(config, "model.layers.1.self_attn.q_proj") is None
    assert chosen(config, "model.layers.11.self_attn.q_proj") == "FP8"  # and "q_proj" is no whole name
    assert chosen(config, "model.layers.3.mlp.router") is None
    assert chosen(config, "a.k_proj", aliases=("a.qkv_proj",), siblings=("a.q_proj", "a.v_proj")) is None
    assert chosen(config, "lm_head", kind="head") is None
    fp8_head = {"weight": Header(dtype="float8_e4m3fn", shape=(4, 4))}
    assert chosen(config, "lm_head", kind="head", stored=fp8_head) == "FP8"
    assert chosen(config, "mlp.gate", stored={"weight": Header(dtype="bfloat16", shape=(4, 4))}) is None
    assert chosen({"quant_algo": None}, "a.k_proj") is None


def test_mixed_precision_is_by_module() -> None:
    config = {"quant_algo": "MIXED_PRECISION", "quantized_layers": MIXED, "exclude_modules": ["lm_head"]}
    assert chosen(config, "model.layers.0.mlp.up_proj") == "FP8"
    assert chosen(config, "model.layers.0.mlp.gate_proj") == "NVFP4 g16"
    assert chosen(config, "model.layers.0.mlp.down_proj") is None
    assert chosen(config, "lm_head", kind="head") is None
    assert chosen({**config, "exclude_modules": []}, "lm_head", kind="head") == "FP8"
    packed = {"aliases": ("model.layers.0.self_attn.qkv_proj",), "siblings": ("model.layers.0.self_attn.k_proj",)}
    assert chosen(config, "model.layers.0.self_attn.q_proj", **packed) == "W4A16_AWQ g64"
    with pytest.raises(PluginError, match="says nothing about one layer"):
        quant = ModelOpt(ModelOpt.Options(**ModelOpt.read_config(config)))
        ColumnParallelLinear(8, 8, quant=quant)


def test_equal_modules_get_the_same_method() -> None:
    config = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"a.*": {"quant_algo": "FP8"}, "b": MIXED["lm_head"]},
    }
    quant = ModelOpt(ModelOpt.Options(**ModelOpt.read_config(config)))
    assert quant.for_module(Target(name="a.x.y")) is quant.for_module(Target(name="b")) is not None


def test_mixed_precision_by_config_groups_alone() -> None:
    groups = {
        "group_0": group(["a"], FLOAT8, FLOAT8),
        "group_1": group(["b", "c"], FLOAT4, FLOAT4),
        "group_2": group(["d"], {**FLOAT8, "strategy": "channel"}, FLOAT8),
        "group_3": group(["e"], {**FLOAT8, "group_size": 32}),
        "group_4": group(["f"], {"dynamic": False, "num_bits": 4, "type": "int", "group_size": 64}),
    }
    config = {"quant_algo": "MIXED_PRECISION", "config_groups": groups}
    labels = [chosen(config, name) for name in "abcdefg"]
    row = "FP8_PER_CHANNEL_PER_TOKEN"
    assert labels == ["FP8", "NVFP4 g16", "NVFP4 g16", row, "MXFP8 g32", "W4A16_AWQ g64", None]


# loading


@pytest.mark.parametrize("missing", ["weight", "weight_scale", "weight_scale_2"])
def test_no_scale_may_be_missing(missing: str) -> None:
    stored = TestNvfp4().encode(torch.randn(8, 32))
    del stored[missing]
    with pytest.raises(LoadError, match=missing):
        ColumnParallelLinear(32, 8, bias=False, quant=method("NVFP4")).load(stored)


def test_what_is_stored_otherwise_is_not_loaded() -> None:
    stored = TestNvfp4().encode(torch.randn(8, 32))
    with pytest.raises(LoadError, match="weight_scale_2"):
        ColumnParallelLinear(32, 8, bias=False, quant=method("MXFP4")).load(stored)
    with pytest.raises(LoadError, match="uint8"):
        ColumnParallelLinear(32, 8, bias=False, quant=method("FP8")).load(stored)


def test_scales_of_a_quantised_cache_are_not_needed() -> None:
    assert {"**.k_scale", "**.v_scale"} <= set(ModelOpt.unused)


def test_needs_no_checkpoint() -> None:
    spec = LinearSpec(name="x", in_features=32, segments=(("", 8),), dtype="float32")
    assert method("NVFP4").create_weights(spec)["weight_scale"].dtype == "float8_e4m3fn"
    assert sorted(method("W4A8_AWQ").create_weights(spec)) == ["weight", "weight_scale", "weight_scale_2"]
