"""compressed-tensors: every format by the conformance kit, and against linears that the library wrote and decoded."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors import safe_open

from tpkit import LoadError, PluginError
from tpkit.layers import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from tpkit.quant import Header, Target
from tpkit.testing import QuantConformance
from tpkit_compressed_tensors import CompressedTensors

sys.path.insert(0, str(Path(__file__).parent))
from compressed_tensors_reference import Linear

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def config(weights: dict[str, Any] | None, form: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    said = {"config_groups": {"group_0": group}, "format": form, "ignore": ["lm_head"], "version": "0.9.4"}
    return {**said, "quantization_status": "compressed", "kv_cache_scheme": None, **more}


def made(said: dict[str, Any]) -> CompressedTensors:
    return CompressedTensors(CompressedTensors.Options(**CompressedTensors.read_config(said)))


# conformance: one class for each way to store; the slow ones are near relations of others


class _Kit(QuantConformance):
    linear: Linear

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.linear.encode(weight)

    def decode(self, stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        return self.linear.decode(stored, out, in_)

    def __init_subclass__(cls, weights: dict[str, Any], form: str, free: bool = False, **kw: Any) -> None:
        cls.linear, cls.config = Linear(weights, form, free), config(weights, form)
        cls.config["config_groups"]["group_0"]["targets"].append("Embedding")
        cls.method = made(cls.config)


class TestInt4(_Kit, weights={**INT4, "symmetric": False}, form="pack-quantized"):
    pass


@pytest.mark.slow
class TestInt3(_Kit, weights={**INT4, "num_bits": 3, "symmetric": False}, form="pack-quantized"):
    step_in, step_out = 96, 32  # one word more would be the older layout of fewer inputs


@pytest.mark.slow
class TestInt6Channel(_Kit, weights={"num_bits": 6, "type": "int", "strategy": "channel"}, form="pack-quantized"):
    step_in = 48


@pytest.mark.slow
class TestInt3WithFreeBits(_Kit, weights={**INT4, "num_bits": 3}, form="pack-quantized", free=True):
    step_in = 96


class TestInt4InOrderOfActivations(
    _Kit, weights={**INT4, "symmetric": False, "actorder": "group"}, form="pack-quantized"
):
    pass


@pytest.mark.slow
class TestInt8(_Kit, weights={**INT4, "num_bits": 8, "symmetric": False}, form="int-quantized"):
    pass


class TestFp8Block(_Kit, weights={**FP8, "strategy": "block", "block_structure": [6, 10]}, form="float-quantized"):
    pass


@pytest.mark.slow
class TestFp8Tensor(_Kit, weights={**FP8, "strategy": "tensor"}, form="float-quantized"):
    pass


@pytest.mark.slow
class TestMxfp8(_Kit, weights={**FP8, "strategy": "group", "group_size": 32}, form="mxfp8-quantized"):
    pass


class TestNvfp4(
    _Kit,
    weights={"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    form="nvfp4-pack-quantized",
):
    step_in = 2


@pytest.mark.slow
class TestMxfp4(
    _Kit, weights={"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, form="mxfp4-pack-quantized"
):
    step_in = 2


# against the library


@cache
def recorded() -> dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]]:
    """By case: configuration, tensors, decoded weight."""
    cases = {}
    for name in ("linears", "linears_old"):
        with safe_open(Path(__file__).parent / "data" / f"{name}.safetensors", "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
            for case, text in sorted(file.metadata().items()):
                if case != "written by":
                    own = {k.partition("/")[2]: t for k, t in tensors.items() if k.startswith(f"{case}/")}
                    cases[case] = json.loads(text), own, own.pop("decoded")
    return cases


@pytest.mark.parametrize("case", sorted(recorded()))
def test_what_the_library_wrote(case: str) -> None:
    said, tensors, decoded = recorded()[case]
    method = made({key: value for key, value in said.items() if key != "quant_method"})
    for kind in (ColumnParallelLinear, RowParallelLinear):
        for rank in range(3):
            layer = kind(64, 20, bias=False, quant=method, tp_rank=rank, tp_size=3)
            layer.load(tensors)
            spec = layer.sharded.layer.spec
            ((top, bottom),), ((left, right),) = (layer.sharded.layer.bounds(s, rank) for s in (spec.out, spec.in_))
            weight = method.dequantize(layer)
            torch.testing.assert_close(weight, decoded[top:bottom, left:right], rtol=1e-6, atol=1e-6)
            assert not layer.blobs


# which module belongs to which group


def groups(*said: tuple[list[str], int | None], **more: Any) -> CompressedTensors:
    """Groups of targets and bits; no bits: dense."""
    return made(
        {
            "config_groups": {
                f"group_{n}": {"targets": targets, "weights": bits and {**INT4, "num_bits": bits}}
                for n, (targets, bits) in enumerate(said)
            },
            "format": "pack-quantized",
            **more,
        }
    )


def label(method: CompressedTensors, name: str, kind: Any = "linear", *aliases: str) -> str | None:
    chosen = method.for_module(Target(name=name, kind=kind, aliases=aliases))
    return chosen and chosen.label()


def test_a_name_goes_before_a_regular_expression_and_that_before_the_class() -> None:
    method = groups(
        (["Linear"], 8), (["re:.*down_proj"], 4), (["model.layers.1.mlp.down_proj"], 2), (["re:.*router$"], None)
    )
    assert label(method, "model.layers.0.mlp.up_proj") == "int8 g16"
    assert label(method, "model.layers.0.mlp.down_proj") == "int4 g16"
    assert label(method, "model.layers.1.mlp.down_proj") == "int2 g16"
    assert label(method, "model.layers.0.mlp.router") is None
    assert label(method, "lm_head", "head") == "int8 g16"
    assert label(method, "model.embed_tokens", "embedding") is None
    assert label(groups((["Embedding"], 8)), "model.embed_tokens", "embedding") == "int8 g16"
    assert label(groups((["re:.*qkv_proj$"], 8)), "a.q_proj", "linear", "a.qkv_proj") == "int8 g16"


def test_regular_expressions_are_anchored_at_the_start_alone() -> None:
    method = groups((["re:model\\.layers\\.0", "re:mlp"], 4))
    assert label(method, "model.layers.0.mlp.up_proj") == "int4 g16"
    assert label(method, "model.layers.1.mlp.up_proj") is None


def test_what_is_ignored() -> None:
    method = groups((["Linear"], 4), ignore=["lm_head", "re:.*gate$", "model.layers.0.mlp.qkv_proj"])
    assert label(method, "lm_head", "head") is None
    assert label(method, "model.layers.0.mlp.gate") is None
    assert label(method, "model.layers.0.mlp.gate_proj") == "int4 g16"
    assert label(method, "model.layers.0.mlp.q_proj", "linear", "model.layers.0.mlp.qkv_proj") is None
    assert label(method, "model.lm_head.x") == "int4 g16"  # a name is the whole name
    assert label(groups((["Linear"], 4), ignore=["Linear"]), "a") is None
    assert label(groups((["Linear"], 4), ignore=None), "a") == "int4 g16"


def test_two_groups_that_claim_a_module_alike_are_refused() -> None:
    method = groups((["re:.*down_proj"], 4), (["re:.*mlp.*"], 8), (["re:.*o_proj"], 4), (["re:.*self.*"], 4))
    with pytest.raises(PluginError, match=r"a\.mlp\.down_proj: 2 groups.*int4 g16.*int8 g16"):
        label(method, "a.mlp.down_proj")
    assert label(method, "a.self_attn.o_proj") == "int4 g16"  # both say the same


def test_each_group_may_have_a_format() -> None:
    said = config(INT4, "mixed-precision")
    said["config_groups"]["group_0"]["format"] = "pack-quantized"
    said["config_groups"]["group_1"] = {"targets": ["re:.*down_proj$"], "weights": FP8, "format": "float-quantized"}
    said["config_groups"]["group_2"] = {"targets": ["re:.*o_proj$"], "weights": FP8, "format": "dense"}
    method = made(said)
    assert [label(method, f"m.{name}_proj") for name in ("up", "down", "o")] == ["int4 g16", "fp8 channel", None]
    with pytest.raises(PluginError, match="2 schemes"):
        ColumnParallelLinear(64, 16, quant=method)
    del said["config_groups"]["group_0"]["format"]
    with pytest.raises(PluginError, match="'mixed-precision'"):
        made(said)


def test_what_is_stored_tells_and_not_the_status() -> None:
    method = made(config(INT4, quantization_status="frozen"))
    packed, plain = Header(dtype="int32", shape=(8, 8)), Header(dtype="bfloat16", shape=(8, 64))
    assert method.for_module(Target(name="a", stored={"weight_packed": packed})) is not None
    with pytest.raises(PluginError, match=r"a is stored as bfloat16 \[8, 64\].*int4 g16.*'frozen'"):
        method.for_module(Target(name="a", stored={"weight": plain}))


# what a configuration may say


def test_what_writers_note_and_older_spellings() -> None:
    old = {
        "observer": "minmax",
        "observer_kwargs": {},
        "dynamic": False,
        "block_structure": None,
        "zp_dtype": "torch.int8",
        "scale_dtype": None,
    }
    notes = {
        "global_compression_ratio": 1.3,
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        "sparsity_config": {"format": "dense", "global_sparsity": 0.1, "sparsity_structure": "unstructured"},
        "transform_config": {"config_groups": {}},
        "moe_sparsity_config": None,
    }
    assert made(config({**INT4, **old, "actorder": "static"}, **notes)).label() == "int4 g16"
    assert made(config({**INT4, "actorder": "dynamic"})).label() == "int4 g16 g_idx"
    assert made(config({**INT4, "strategy": "group", "group_size": -1})).label() == "int4 channel"
    assert made(config({"num_bits": 8, "type": "int", "strategy": None, "group_size": None})).label() == "int8 tensor"
    block = {**FP8, "strategy": "block", "block_structure": "128x128"}
    assert made(config(block, "float-quantized")).label() == "fp8 128x128"
    nested = {"quantization_config": config(INT4), "sparsity_config": {}, "run_compressed": True}
    assert made(nested).label() == "int4 g16"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "marlin-24"}, "'marlin-24'"),
        ({"format": "sparse-bitmask"}, "'sparse-bitmask'"),
        ({"format": "mxfp6-pack-quantized"}, "'mxfp6-pack-quantized'"),
        ({"format": "fakequant"}, "'fakequant'"),
        ({"format": None}, "None"),
        ({"format": "float-quantized"}, "does not hold int of 4 bits"),
        ({"format": "nvfp4-pack-quantized"}, "does not hold"),
        ({"sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}}, "sparsity_config"),
        ({"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "transform_config"),
        ({"moe_sparsity_config": {"method": "prune"}}, "moe_sparsity_config"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        made(config(INT4, **{"form": change.pop("format")} if "format" in change else {}, **change))


@pytest.mark.parametrize(
    "weights",
    [
        {**INT4, "dynamic": True},
        {**INT4, "num_bits": 16},
        {**INT4, "strategy": "token"},
        {**INT4, "actorder": "sideways"},
        {**INT4, "secret": 1},
    ],
)
def test_unknown_options_of_weights(weights: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        made(config(weights))
    with pytest.raises(ValidationError):
        made(config(INT4, secret=1))


def test_strategies_need_their_sizes() -> None:
    for weights in ({**INT4, "group_size": None}, {**INT4, "strategy": "block"}, {**FP8, "actorder": "group"}):
        with pytest.raises(PluginError, match="does not go with"):
            made(config({k: v for k, v in weights.items() if v}, "naive-quantized"))


# what a layer refuses


def stored(weights: dict[str, Any], out: int = 16, in_: int = 64) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return Linear(weights, "pack-quantized").encode(torch.randn(out, in_))


def test_a_scale_that_is_missing() -> None:
    layer = ColumnParallelLinear(64, 16, bias=False, quant=made(config(INT4)), prefix="up")
    tensors = stored(INT4)
    for name in ("weight_scale", "weight_packed"):
        with pytest.raises(LoadError, match=name):
            layer.load({k: t for k, t in tensors.items() if k != name})
    layer.load({k: t for k, t in tensors.items() if k != "weight_shape"})


def test_the_order_of_groups_is_needed_where_the_configuration_says_so() -> None:
    ordered = {**INT4, "actorder": "group"}
    layer = RowParallelLinear(64, 16, bias=False, quant=made(config(ordered)), prefix="down")
    tensors = stored(ordered)
    with pytest.raises(LoadError, match="weight_g_idx"):
        layer.load({k: t for k, t in tensors.items() if k != "weight_g_idx"})
    with pytest.raises(PluginError, match="down: weight_g_idx has 64 inputs in none of the 4 groups"):
        layer.load({**tensors, "weight_g_idx": torch.full((64,), -1, dtype=torch.int32)})


def test_zero_points_of_symmetric_weights_must_be_zero() -> None:
    fp8 = {**FP8, "strategy": "tensor"}
    layer = ColumnParallelLinear(64, 16, bias=False, quant=made(config(fp8, "naive-quantized")), prefix="up")
    tensors = Linear(fp8, "naive-quantized").encode(torch.randn(16, 64))
    zero = torch.zeros(1).to(torch.float8_e4m3fn)
    layer.load({**tensors, "weight_zero_point": zero})
    with pytest.raises(PluginError, match=r"up.*weight_zero_point"):
        layer.load({**tensors, "weight_zero_point": torch.ones(1).to(torch.float8_e4m3fn)})


def test_rows_that_end_within_a_run_of_odd_bits() -> None:
    with pytest.raises(PluginError, match="40 inputs of 3 bits are no multiple of 32"):
        ColumnParallelLinear(40, 16, bias=False, quant=made(config({**INT4, "num_bits": 3})))


def test_parts_with_scales_of_their_own_keep_them() -> None:
    """q, k and v of nvfp4 and int8 have a scale each, far apart; none is rounded to another's."""
    cases = (
        ({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, "nvfp4-pack-quantized"),
        ({"num_bits": 8, "type": "int", "strategy": "tensor"}, "int-quantized"),
    )
    for weights, form in cases:
        linear = Linear(weights, form)
        parts = [linear.encode(torch.randn(rows, 64) * 10.0**n) for n, rows in enumerate((40, 8, 8))]
        tensors = {f"{p}_proj.{k}": t for p, part in zip("qkv", parts, strict=True) for k, t in part.items()}
        wanted = [linear.decode(part, rows, 64) for part, rows in zip(parts, (40, 8, 8), strict=True)]
        method = made(config(weights, form))
        layer = QKVParallelLinear(64, 8, 5, 1, bias=False, quant=method)
        layer.load(tensors)
        torch.testing.assert_close(method.dequantize(layer), torch.cat(wanted), rtol=1e-6, atol=0)


def test_only_some_parts_have_an_extra() -> None:
    """An input scale that is stored changes nothing, and nothing is left of it."""
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    linear, method = Linear(weights, "int-quantized"), made(config(weights, "int-quantized"))
    parts = {name: linear.encode(torch.randn(12, 32)) for name in ("gate_proj", "up_proj")}
    layer = MergedColumnParallelLinear(32, [12, 12], bias=False, quant=method)
    layer.load({f"{name}.{key}": tensor for name, part in parts.items() for key, tensor in part.items()})
    assert not layer.blobs
    assert sorted(name for name, _ in layer.named_parameters()) == ["weight", "weight_scale"]


def test_the_entry_point_is_declared() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert 'compressed-tensors = "tpkit_compressed_tensors:CompressedTensors"' in text


@pytest.mark.parametrize(("out", "in_"), [(320, 128), (360, 96), (333, 64)])
def test_the_kernel_computes_what_dequantising_gives(out: int, in_: int) -> None:
    torch.manual_seed(0)
    weights = {**INT4, "group_size": 32}
    tensors = stored(weights, out, in_)
    tensors["weight_scale"] = tensors["weight_scale"].bfloat16()
    method = made(config(weights)).for_module(Target(name="model.layers.0.mlp.up_proj"))
    assert method is not None
    layer = ColumnParallelLinear(in_, out, bias=False, quant=method, dtype=torch.bfloat16)
    layer.load(tensors)
    assert layer.kernel == "int4pack"
    assert set(dict(layer.named_parameters())) == {"packed", "scales_and_zeros"}
    wanted = Linear(weights, "pack-quantized", False).decode(tensors, out, in_)
    assert torch.equal(method.dequantize(layer), wanted)
    for rows in (1, 3, 20, 200):
        x = torch.randn(rows, in_).bfloat16()
        exact = x.double() @ wanted.double().t()
        assert (layer(x).double() - exact).abs().max() <= 0.01 * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_no_kernel_where_scales_would_be_rounded(dtype: torch.dtype) -> None:
    weights = {**INT4, "group_size": 32}
    tensors = stored(weights, 64, 64)
    tensors["weight_scale"] = tensors["weight_scale"].to(dtype)
    method = made(config(weights)).for_module(Target(name="model.layers.0.mlp.up_proj"))
    layer = ColumnParallelLinear(64, 64, bias=False, quant=method, dtype=torch.bfloat16)
    layer.load(tensors)
    assert layer.kernel == ""
    assert layer.weight_scale.dtype == dtype
