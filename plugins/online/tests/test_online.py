"""Quantising while loading: the formats, the same codes on any number of ranks, and the kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tpkit import PluginError
from tpkit.errors import LoadError
from tpkit.layers import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from tpkit.params import Header
from tpkit.quant import QuantMethod, Target
from tpkit.testing import QuantConformance
from tpkit_online import OnlineFp8, OnlineInt4, OnlineInt8


def plain(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"weight": weight}


def rounded8(group: torch.Tensor) -> torch.Tensor:
    scale = group.abs().max() / 127
    return torch.round(group / scale) * scale if scale else group


def rounded4(group: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    largest = group[group.abs().argmax()]
    if group.max() == -group.min():
        largest = group.max()
    scale = (largest / -8).to(dtype).float()
    return torch.round(group / scale).clamp(-8, 7) * scale if scale else group


def rounded_fp8(block: torch.Tensor) -> torch.Tensor:
    scale = block.abs().max() / 448
    return (block / scale).to(torch.float8_e4m3fn).float() * scale if scale else block


def by_blocks(weight: torch.Tensor, rows: int, columns: int, rounded: Any) -> torch.Tensor:
    """Rounds block by block, each by itself."""
    made = weight.float().clone()
    for top in range(0, weight.shape[0], rows):
        for left in range(0, weight.shape[1], columns):
            part = (slice(top, top + rows), slice(left, left + columns))
            made[part] = rounded(made[part].flatten()).view(made[part].shape)
    return made


class TestInt8(QuantConformance):
    method = OnlineInt8()
    encode = staticmethod(plain)

    def decode(self, stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        return by_blocks(stored["weight"], 1, in_, rounded8)


class TestInt4(QuantConformance):
    method = OnlineInt4(OnlineInt4.Options(group_size=32))
    dtype_matters = True  # scales are bfloat16 in bfloat16 models
    encode = staticmethod(plain)

    def decode(self, stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        return by_blocks(stored["weight"], 1, 32, rounded4)


class TestFp8(QuantConformance):
    method = OnlineFp8(OnlineFp8.Options(block=[12, 16]))
    encode = staticmethod(plain)

    def decode(self, stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        return by_blocks(stored["weight"], 12, 16, rounded_fp8)


METHODS = [
    OnlineInt8(),
    OnlineInt4(),
    OnlineInt4(OnlineInt4.Options(group_size=32)),
    OnlineFp8(),
    OnlineFp8(OnlineFp8.Options(block=[24, 40])),
]


def names(method: QuantMethod) -> str:
    return f"{type(method).__name__} {method.label()}"


def made(layer: Any, *sizes: Any, method: QuantMethod, tensors: Any, rank: int, ranks: int, **flags: Any) -> Any:
    if layer is RowParallelLinear:
        flags["reduce_results"] = False
    module = layer(
        *sizes, bias=False, quant=method, tp_rank=rank, tp_size=ranks, prefix="model.layers.0.some_proj", **flags
    )
    module.load(tensors)
    return module


@pytest.mark.parametrize("method", METHODS, ids=names)
@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
def test_any_number_of_ranks_gives_the_bits_of_one(method: Any, layer: Any) -> None:
    torch.manual_seed(0)
    for out, in_, dtype in ((200, 320, torch.float32), (131, 257, torch.bfloat16), (5, 3, torch.float16)):
        tensors = plain(torch.randn(out, in_).to(dtype))
        flags = {"method": method, "tensors": tensors, "dtype": dtype}
        whole = method.dequantize(made(layer, in_, out, rank=0, ranks=1, **flags))
        for ranks in (2, 5, 7):
            modules = [made(layer, in_, out, rank=rank, ranks=ranks, **flags) for rank in range(ranks)]
            parts = [method.dequantize(m) for m in modules if m.in_features and m.out_features]
            assert torch.equal(torch.cat(parts, 1 if layer is RowParallelLinear else 0), whole)
            if layer is RowParallelLinear and in_ == 320 and ranks == 5 and method is METHODS[0]:
                assert [m.in_features for m in modules] == [64] * 5  # whole rows are needed, not held


@pytest.mark.parametrize("method", METHODS, ids=names)
def test_parts_stored_apart_have_blocks_of_their_own(method: Any) -> None:
    torch.manual_seed(0)
    heads, dim, in_ = {"q": 9, "k": 3, "v": 3}, 11, 150
    parts = {name: torch.randn(n * dim, in_) * 10**i for i, (name, n) in enumerate(heads.items())}
    tensors = {f"{name}_proj.weight": weight for name, weight in parts.items()}
    alone = {
        name: method.dequantize(
            made(ColumnParallelLinear, in_, len(w), method=method, tensors=plain(w), rank=0, ranks=1)
        )
        for name, w in parts.items()
    }
    for ranks in (1, 2, 3, 5):
        found: dict[str, list[torch.Tensor]] = {name: [] for name in heads}
        for rank in range(ranks):
            module = made(QKVParallelLinear, in_, dim, 9, 3, method=method, tensors=tensors, rank=rank, ranks=ranks)
            if module.out_features:
                for name, part in zip(heads, method.dequantize(module).split(module.out_sizes), strict=True):
                    found[name].append(part)
        assert torch.equal(torch.cat(found["q"]), alone["q"])
        assert all(any(torch.equal(k, a) for a in alone["k"].split(len(k))) for k in found["k"] if len(k) == dim)
        if ranks <= 3:
            assert torch.equal(torch.cat(found["v"]), alone["v"])


@pytest.mark.parametrize(("method", "bytes_per_weight"), [(METHODS[0], 1.02), (METHODS[1], 0.55), (METHODS[3], 1.01)])
def test_only_codes_and_scales_stay(method: Any, bytes_per_weight: float) -> None:
    for ranks in (1, 3):
        flags = {"method": method, "tensors": plain(torch.randn(640, 640)), "rank": 0, "ranks": ranks}
        for layer in (ColumnParallelLinear, RowParallelLinear):
            module = made(layer, 640, 640, **flags)
            held = sum(p.nbytes for p in module.parameters())
            assert held <= bytes_per_weight * module.in_features * module.out_features
            assert not hasattr(module, "weight")


@pytest.mark.parametrize("method", METHODS, ids=names)
def test_zeros_extremes_and_ties(method: Any) -> None:
    weight = torch.zeros(40, 256)
    weight[30:] = torch.randn(10, 256) * torch.logspace(-38, 37, 10).unsqueeze(1)
    weight[29] = 1e-45
    weight[28, :2] = torch.tensor([-3.0, 3.0])
    module = made(ColumnParallelLinear, 256, 40, method=method, tensors=plain(weight), rank=0, ranks=1)
    got = method.dequantize(module)
    assert got.isfinite().all() and not got[:24].any()
    error = (got - weight).abs().amax(1) / weight.abs().amax(1).clamp(min=1e-30)
    if not isinstance(method, OnlineFp8):  # whose blocks put rows of all magnitudes together
        assert error[30:].max() < (0.01 if isinstance(method, OnlineInt8) else 0.13)
        assert got[28, 1] != 0
    again = made(ColumnParallelLinear, 256, 40, method=method, tensors=plain(weight), rank=1, ranks=2)
    assert torch.equal(method.dequantize(again), got[-again.out_features :])


@pytest.mark.parametrize("method", METHODS, ids=names)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_refuses_weights_that_are_no_numbers(method: Any, value: float) -> None:
    weight = torch.randn(16, 64)
    weight[3, 5] = value
    with pytest.raises(PluginError, match=r"model\.layers\.0\.some_proj: 1 of 1024 weights are NaN or infinite"):
        made(ColumnParallelLinear, 64, 16, method=method, tensors=plain(weight), rank=0, ranks=1)


def test_refuses_what_is_quantised_already() -> None:
    floats, packed = Header(dtype="bfloat16", shape=(16, 64)), Header(dtype="int32", shape=(8, 16))
    for stored in (
        {"qweight": packed, "scales": floats},
        {"weight": Header(dtype="int8", shape=(16, 64))},
        {"weight": floats, "weight_scale": floats},
    ):
        for method in METHODS:
            with pytest.raises(PluginError, match=r"mlp\.up is quantised already: .*(qweight|weight) .*16 x 64"):
                method.for_module(Target(name="mlp.up", out_features=16, in_features=64, stored=stored))
    for method in METHODS:
        assert method.for_module(Target(name="mlp.up", stored={"weight": floats, "bias": floats})) is method
        assert method.for_module(Target(name="lm_head", kind="head", stored={"weight": floats})) is None
        with pytest.raises(LoadError, match="weight"):
            made(ColumnParallelLinear, 64, 16, method=method, tensors={"qweight": torch.ones(3)}, rank=0, ranks=1)


def test_what_is_ignored_stays_as_it_is() -> None:
    method = OnlineInt8(OnlineInt8.Options(ignore=["layers.1", "down_proj"]))
    assert method.for_module(Target(name="model.layers.1.mlp.up_proj")) is None
    assert method.for_module(Target(name="model.layers.2.mlp.down_proj")) is None
    assert method.for_module(Target(name="model.layers.11.mlp.up_proj")) is method


def kernelled(out: int, in_: int, group: int, layer: Any = ColumnParallelLinear, **flags: Any) -> Any:
    method = OnlineInt4(OnlineInt4.Options(group_size=group))
    tensors = plain(torch.randn(out, in_).bfloat16())
    module = made(layer, in_, out, method=method, tensors=tensors, dtype=torch.bfloat16, **flags)
    assert module.kernel == "int4pack"
    if not hasattr(module, "packed"):
        pytest.skip("this CPU packs in an order that is not known")
    return module


@pytest.mark.parametrize(("out", "in_", "group"), [(320, 128, 128), (333, 320, 32), (352, 384, 128), (321, 64, 64)])
def test_the_kernel_computes_what_the_format_says(out: int, in_: int, group: int) -> None:
    torch.manual_seed(0)
    module = kernelled(out, in_, group, rank=0, ranks=1)
    method = module.quant_method
    weight = method.dequantize(module)
    without = OnlineInt4(OnlineInt4.Options(group_size=group))
    without.kernels = ()
    torch.manual_seed(0)
    tensors = plain(torch.randn(out, in_).bfloat16())
    other = made(ColumnParallelLinear, in_, out, method=without, tensors=tensors, rank=0, ranks=1, dtype=torch.bfloat16)
    assert module.scales_and_zeros.dtype == torch.bfloat16
    assert torch.equal(weight, without.dequantize(other))
    assert torch.equal(weight, by_blocks(tensors["weight"], 1, group, lambda g: rounded4(g, torch.bfloat16)))
    bias = torch.randn(out).bfloat16()
    for rows in (1, 2, 15):
        x = torch.randn(rows, in_).bfloat16()
        exact = x.double() @ weight.double().t()
        y = method.apply(module, x)
        # accumulated in float32, rounded once
        assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5 * exact.abs().max()).all()
        assert torch.equal(method.apply(module, x, bias), y + bias)
        assert torch.equal(method.apply(module, x.unsqueeze(0))[0], y)
    for rows in (16, 40, 150):
        x = torch.randn(rows, in_).bfloat16()
        exact = x.double() @ weight.double().t()
        assert ((method.apply(module, x, bias) - bias - exact).abs().max() <= 0.02 * exact.abs().max()).all()
    assert method.apply(module, x[:0]).shape == (0, out)
    assert method.apply(module, x.float()).dtype == torch.float32


def test_the_kernel_serves_shards_whose_cuts_are_whole() -> None:
    for rank in (0, 1):
        module = kernelled(320, 320, 32, RowParallelLinear, rank=rank, ranks=2)
        x = torch.randn(2, module.in_features).bfloat16()
        exact = x.double() @ module.quant_method.dequantize(module).double().t()
        assert ((module(x).double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()
    for tensors in (plain(torch.randn(320, 320).bfloat16()), plain(torch.randn(320, 320).bfloat16() * 3)):
        module.load(tensors)  # again
        y = module(x)
        exact = x.double() @ module.quant_method.dequantize(module).double().t()
        assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-3).all()
    held = sum(p.nbytes for p in module.parameters())
    assert held <= 0.8 * module.in_features * module.out_features
    method = OnlineInt4(OnlineInt4.Options(group_size=32))
    merged = MergedColumnParallelLinear(64, [200, 200], bias=False, quant=method, dtype=torch.bfloat16)
    assert merged.kernel == "int4pack"
    merged.load({f"{name}_proj.weight": torch.randn(200, 64) for name in ("gate", "up")})
    assert merged(torch.randn(2, 64).bfloat16()).shape == (2, 400)


@pytest.mark.parametrize(("out", "in_"), [(319, 128), (320, 96)])
def test_no_kernel_where_it_would_pad_too_much(out: int, in_: int) -> None:
    layer = ColumnParallelLinear(in_, out, bias=False, quant=OnlineInt4(), dtype=torch.bfloat16)
    assert layer.kernel == ""


@pytest.mark.parametrize(("out", "in_", "kernel"), [(40, 96, "int8pack"), (7, 64, "int8pack"), (40, 80, "")])
def test_int8_is_multiplied_without_decoding_where_the_width_allows(out: int, in_: int, kernel: str) -> None:
    torch.manual_seed(0)
    layer = ColumnParallelLinear(in_, out, quant=OnlineInt8(), dtype=torch.bfloat16)
    layer.load({"weight": torch.randn(out, in_).bfloat16(), "bias": torch.randn(out).bfloat16()})
    assert layer.kernel == kernel
    weight = layer.quant_method.dequantize(layer).double()
    for rows in (1, 3, 40):
        x = torch.randn(2, rows, in_).bfloat16()
        exact = x.double() @ weight.t() + layer.bias.double()
        assert ((layer(x).double() - exact).abs().max() <= 0.01 * exact.abs().max()).all()
        if kernel and rows < 16:  # rounded in two places, the result alone
            assert ((layer(x).double() - exact).abs() <= exact.abs() * 2**-7 + 1e-3 * exact.abs().max()).all()
