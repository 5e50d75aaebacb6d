"""fp8: conformance for every kind of scale, values of libraries, configs as the hub has them, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import load_file

from tpkit import LoadError
from tpkit.layers import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from tpkit.quant import Header, LinearSpec, Target
from tpkit.testing import QuantConformance
from tpkit_fp8 import FbgemmFp8, Fp8

BLOCK = (6, 10)


def codes_to_values(codes: torch.Tensor) -> torch.Tensor:
    """Decodes sign, exponent and mantissa by hand (e4m3fn has a bias of 7, e5m2 one of 15)."""
    exponent_bits, bias = (4, 7) if codes.dtype == torch.float8_e4m3fn else (5, 15)
    fraction_bits = 7 - exponent_bits
    raw = codes.view(torch.uint8).to(torch.int32)
    exponent, fraction = (raw >> fraction_bits) & (2**exponent_bits - 1), (raw & (2**fraction_bits - 1)).double()
    normal = (1 + fraction / 2**fraction_bits) * torch.exp2(exponent.double() - bias)
    subnormal = fraction / 2**fraction_bits * 2.0 ** (1 - bias)
    return torch.where(raw >= 128, -1.0, 1.0) * torch.where(exponent > 0, normal, subnormal)


def per_block(values: torch.Tensor, out: int, in_: int, block: tuple[int, int]) -> torch.Tensor:
    return values.repeat_interleave(block[0], 0)[:out].repeat_interleave(block[1], 1)[:, :in_]


def amax(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    out, in_ = weight.shape
    padded = torch.nn.functional.pad(weight.abs(), (0, -in_ % block[1], 0, -out % block[0]))
    return padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).amax((1, 3)).clamp(min=1e-6)


class Kit(QuantConformance):
    name = "weight_scale"

    def decode(self, stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        return codes_to_values(stored["weight"]) * self.spread(stored[self.name], out, in_).double()

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = self.scale(weight)
        codes = (weight / self.spread(scale, *weight.shape).float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, self.name: scale}

    def scale(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.abs().max() / 448

    def spread(self, scale: torch.Tensor, out: int, in_: int) -> torch.Tensor:
        return scale.expand(out, in_)


class TestTensorStatic(Kit):
    """As transformers names it, and of no dimension."""

    method = Fp8(Fp8.Options(activation_scheme="static", fmt="e4m3", scale_name="weight_scale_inv"))
    name = "weight_scale_inv"

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return {**super().encode(weight), "activation_scale": torch.tensor(0.02)}


class TestFbgemm(Kit):
    method = FbgemmFp8()
    config: ClassVar[dict[str, Any]] = {"activation_scale_ub": 1200.0, "modules_to_not_convert": None}

    def scale(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.abs().amax(1, keepdim=True).clamp(min=1e-6) / 448


class TestBlock(Kit):
    method = Fp8(Fp8.Options(weight_block_size=list(BLOCK)))
    config: ClassVar[dict[str, Any]] = {"activation_scheme": "dynamic", "fmt": None, "weight_block_size": list(BLOCK)}
    name = "weight_scale_inv"

    def scale(self, weight: torch.Tensor) -> torch.Tensor:
        return amax(weight, BLOCK) / 448

    def spread(self, scale: torch.Tensor, out: int, in_: int) -> torch.Tensor:
        return per_block(scale.double(), out, in_, BLOCK)


class TestBlockPowersOfTwo(TestBlock):
    method = Fp8(Fp8.Options(weight_block_size=list(BLOCK), scale_fmt="ue8m0"))
    config: ClassVar[dict[str, Any]] = {"weight_block_size": list(BLOCK), "scale_fmt": "ue8m0", "expert_dtype": "fp8"}

    def scale(self, weight: torch.Tensor) -> torch.Tensor:
        return (amax(weight, BLOCK) / 448).log2().ceil().exp2().to(torch.float8_e8m0fnu)


# what a checkpoint shows decides


def dequantised(method: Fp8, stored: dict[str, torch.Tensor], size: int = 1, kind: Any = ColumnParallelLinear) -> Any:
    out, in_ = stored["weight"].shape
    parts = []
    for rank in range(size):
        flags = {} if kind is ColumnParallelLinear else {"reduce_results": False}
        layer = kind(in_, out, bias=False, quant=method, tp_rank=rank, tp_size=size, **flags)
        layer.load(stored)
        assert {name for name, _ in layer.named_parameters()} == {"weight", "weight_scale"}
        parts.append(method.dequantize(layer))
    return torch.cat(parts, 0 if kind is ColumnParallelLinear else 1)


def codes(out: int = 12, in_: int = 20) -> torch.Tensor:
    return torch.randn(out, in_, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (12,), (12, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 3])
def test_the_checkpoint_tells_name_type_and_number_of_scales(name: str, shape: Any, dtype: Any, size: int) -> None:
    scale = (torch.rand(shape) + 0.5).to(dtype)
    inputs = {name: torch.tensor([0.5]) for name in ("input_scale", "activation_scale", "input_scale_ub")}
    found = dequantised(Fp8(), {"weight": codes(), name: scale, **inputs}, size)
    assert torch.equal(found, (codes_to_values(codes()) * scale.double().reshape(-1, 1)).float())


@pytest.mark.parametrize(("dtype", "options"), [(torch.float8_e8m0fnu, {}), (torch.uint8, {"scale_fmt": "ue8m0"})])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_powers_of_two_by_their_exponent(dtype: torch.dtype, options: dict[str, Any], kind: Any) -> None:
    exponents = torch.randint(120, 134, (2, 2), dtype=torch.uint8)
    stored = {"weight": codes(), "weight_scale_inv": exponents.view(dtype)}
    found = dequantised(Fp8(Fp8.Options(weight_block_size=list(BLOCK), **options)), stored, 3, kind)
    scale = per_block(torch.exp2(exponents.double() - 127), 12, 20, BLOCK)
    assert torch.equal(found, (codes_to_values(codes()) * scale).float())


def test_floats_that_are_powers_of_two_are_floats_for_all_that() -> None:
    """DeepSeek-V3.1 says ue8m0 and stores float32."""
    stored = {"weight": codes(), "weight_scale_inv": torch.tensor([[0.5, 2], [4, 0.25]])}
    found = dequantised(Fp8(Fp8.Options(weight_block_size=list(BLOCK), scale_fmt="ue8m0")), stored, 2)
    scale = per_block(stored["weight_scale_inv"].double(), 12, 20, BLOCK)
    assert torch.equal(found, (codes_to_values(codes()) * scale).float())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_scales_of_q_k_and_v_are_never_made_one(size: int) -> None:
    scales, parts = {"q_proj": 0.01, "k_proj": 1.0, "v_proj": 25.0}, []
    tensors = {f"{part}.weight_scale": torch.tensor([scale]) for part, scale in scales.items()}
    tensors |= {f"{part}.weight": codes(12 if part == "q_proj" else 4) for part in scales}
    for rank in range(size):
        layer = QKVParallelLinear(20, 2, 6, 2, bias=False, quant=Fp8(), tp_rank=rank, tp_size=size)
        layer.load(tensors)
        parts.append(Fp8().dequantize(layer))
        bounds = layer.sharded.layer.bounds(layer.sharded.layer.spec.out, rank)
        wanted = [
            codes_to_values(tensors[f"{part}.weight"])[start:stop] * torch.tensor(scale).double()
            for (part, scale), (start, stop) in zip(scales.items(), bounds, strict=True)
        ]
        assert torch.equal(parts[-1], torch.cat(wanted).float())


@pytest.mark.parametrize("file", sorted((Path(__file__).parent / "data").iterdir()), ids=lambda file: file.stem)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_values_are_those_of_the_libraries(file: Path, size: int, kind: Any) -> None:
    with safe_open(file, "pt") as opened:
        block = [int(size) for size in opened.metadata()["block"].split(",") if size]
    stored = load_file(file)
    wanted = stored.pop("decoded")
    assert torch.equal(dequantised(Fp8(Fp8.Options(weight_block_size=block or None)), stored, size, kind), wanted)


def test_e5m2() -> None:
    stored = {"weight": codes().float().to(torch.float8_e5m2), "weight_scale": torch.tensor(0.25)}
    assert torch.equal(
        dequantised(Fp8(Fp8.Options(fmt="e5m2")), stored), codes_to_values(stored["weight"]).float() * 0.25
    )


# configs and modules

CONFIGS: dict[str, tuple[type[Fp8], dict[str, Any]]] = {
    "DeepSeek-V3": (Fp8, {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}),
    "AutoFP8": (Fp8, {"activation_scheme": "static", "ignored_layers": ["lm_head"], "kv_cache_scheme": "static"}),
    "Qwen3": (
        Fp8,
        {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
            "weight_per_tensor": False,
            "act_per_tensor": False,
        },
    ),
    "MiniMax": (Fp8, {"fmt": "float8_e4m3fn", "weight_block_size": [128, 128], "modules_to_not_convert": ["gate"]}),
    "transformers": (
        Fp8,
        {
            "activation_scheme": "dynamic",
            "dequantize": False,
            "expert_dtype": "fp8",
            "modules_to_convert": None,
            "modules_to_not_convert": None,
            "scale_fmt": "float",
            "weight_block_size": None,
        },
    ),
    "fbgemm": (FbgemmFp8, {"activation_scale_ub": 1200.0, "modules_to_not_convert": ["model.layers.0.mlp.down_proj"]}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_reads_configs_of_the_hub(name: str) -> None:
    kind, config = CONFIGS[name]
    method = kind(kind.Options(**kind.read_config(config)))
    block = " 128x128" if config.get("weight_block_size") else ""
    assert method.label() == f"{config.get('fmt') or 'e4m3'}{block}"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"fmt": "e4m3fnuz"}, "half the value"),
        ({"fmt": "e3m4"}, "none of"),
        ({"weight_block_size": [128]}, "at least 2 items"),
        ({"weight_block_size": [0, 128]}, "at least one row"),
        ({"activation_scheme": "sometimes"}, "dynamic"),
        ({"expert_dtype": "fp4"}, "expert_dtype"),
        ({"never_heard_of": 1}, "never_heard_of"),
    ],
)
def test_refuses(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Fp8.Options(**Fp8.read_config(config))


def target(name: str, weight: str | None = "float8_e4m3fn", scaled: bool = True, **kw: Any) -> Target:
    stored = {"weight": Header(dtype=weight, shape=(8, 8))} if weight else {}
    return Target(
        name=name, stored=stored | ({"weight_scale": Header(dtype="float32", shape=())} if scaled else {}), **kw
    )


def test_which_modules() -> None:
    method = Fp8(Fp8.Options(ignored_layers=[".layers.0.mlp.gate_up_proj", "gate"], modules_to_not_convert=["o_proj"]))
    up = {"aliases": ("model.layers.0.mlp.gate_up_proj",), "siblings": ("model.layers.0.mlp.gate_proj",)}
    assert method.for_module(target("model.layers.0.mlp.up_proj", **up)) is None
    assert method.for_module(target("model.layers.1.mlp.gate_proj")) is method  # not "gate"
    assert method.for_module(target("model.layers.1.mlp.gate")) is None
    assert method.for_module(target("model.layers.1.self_attn.o_proj")) is None
    only = Fp8(Fp8.Options(ignored_layers=["gate_proj"]))
    assert only.for_module(target("model.layers.0.mlp.up_proj", **up)) is only


def test_a_plain_weight_without_a_scale_is_not_fp8_and_a_head_is_if_it_is_stored_so() -> None:
    method = Fp8()
    assert method.for_module(target("model.layers.0.mlp.gate", "bfloat16", scaled=False)) is None
    assert method.for_module(target("model.layers.0.mlp.up_proj", "bfloat16")) is method  # and loading refuses it
    assert method.for_module(target("model.layers.0.mlp.up_proj", scaled=False)) is method
    assert method.for_module(target("lm_head", kind="head")) is method
    assert method.for_module(target("lm_head", "bfloat16", scaled=False, kind="head")) is None
    assert method.for_module(Target(name="lm_head", kind="head")) is None
    assert method.for_module(Target(name="q_proj")) is method


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({"weight": codes()}, "weight_scale"),
        ({"weight": codes(), "scale_weight": torch.ones(1)}, "scale_weight"),
        ({"weight": codes(), "weight_scale": torch.ones(3)}, r"weight_scale is \[3\]"),
        ({"weight": codes(), "weight_scale": torch.ones(1, dtype=torch.uint8)}, "uint8"),
        ({"weight": codes().float(), "weight_scale": torch.ones(1)}, "float32"),
        ({"weight": codes().float().to(torch.float8_e5m2), "weight_scale": torch.ones(1)}, "float8_e5m2"),
    ],
)
def test_what_does_not_fit_is_not_loaded(stored: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(LoadError, match=said):
        ColumnParallelLinear(20, 12, bias=False, quant=Fp8()).load(stored)


def test_scales_of_a_quantised_cache_are_not_needed() -> None:
    assert {"**.k_scale", "**.v_scale", "**.output_scale"} <= set(Fp8.unused)


def test_without_a_checkpoint_options_tell() -> None:
    spec = LinearSpec(name="x", in_features=20, segments=(("", 12),), dtype="float32")
    assert [dim.along for dim in Fp8().create_weights(spec)["weight_scale"].dims] == ["segment"]
    assert [dim.along for dim in FbgemmFp8().create_weights(spec)["weight_scale"].dims] == ["out", "fixed"]
    block = Fp8(Fp8.Options(weight_block_size=[4, 4])).create_weights(spec)["weight_scale"]
    assert (block.stored, [dim.per for dim in block.dims]) == ("weight_scale_inv", [4, 4])
