"""The plugin against bitsandbytes itself (recorded, and installed if it is), and the conformance kit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tpkit import PluginError
from tpkit.errors import LoadError
from tpkit.layers import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from tpkit.params import Header
from tpkit.quant import Target
from tpkit.testing import QuantConformance
from tpkit_bitsandbytes import BitsAndBytes

DATA = sorted((Path(__file__).parent / "data").glob("*.safetensors"))

# values of bitsandbytes' functional.py, get_4bit_type: the table of a checkpoint is in the checkpoint
NF4 = [
    -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
]  # fmt: skip
FP4 = [0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3]


def blockwise(values: torch.Tensor, table: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes ``[n]`` and the absmax of each block."""
    padded = torch.nn.functional.pad(values, (0, -len(values) % block)).view(-1, block)
    absmax = padded.abs().amax(1)
    scaled = padded / absmax.clamp(min=1e-20).unsqueeze(1)
    order = table.argsort()
    middles = (table[order][1:] + table[order][:-1]) / 2
    return order[torch.bucketize(scaled, middles)].flatten()[: len(values)], absmax


def encode(
    weight: torch.Tensor, kind: str = "nf4", block: int = 64, double: bool = False, storage: torch.dtype = torch.uint8
) -> dict[str, torch.Tensor]:
    table = torch.tensor(NF4 if kind == "nf4" else FP4)
    table = table / table.abs().max()
    codes, absmax = blockwise(weight.flatten(), table, block)
    codes = torch.nn.functional.pad(codes, (0, -len(codes) % (2 * storage.itemsize)))
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
    stored = {"weight.quant_map": table}
    if double:
        offset = absmax.mean()
        nested_table = torch.linspace(-1, 1, 256)
        absmax, nested = blockwise(absmax - offset, nested_table, 256)
        stored |= {"weight.nested_absmax": nested, "weight.nested_quant_map": nested_table}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
        absmax = absmax.to(torch.uint8)
    octets = (codes[::2] * 16 + codes[1::2]).to(torch.uint8)
    stored |= {"weight": octets.view(storage).unsqueeze(1), "weight.absmax": absmax}
    blob = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {**stored, f"weight.quant_state.bitsandbytes__{kind}": blob}


def decode(stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
    (name,) = [name for name in stored if "quant_state" in name]
    state = json.loads(stored[name].numpy().tobytes())
    octets = stored["weight"].contiguous().view(torch.uint8).flatten().to(torch.int64)
    assert 0 <= 2 * len(octets) - out * in_ < 16, "stored in words of another size"
    index = torch.arange(out * in_)
    codes = torch.where(index % 2 == 0, octets[index // 2] >> 4, octets[index // 2] & 15)
    absmax = stored["weight.absmax"]
    if "weight.nested_absmax" in stored:
        nested = stored["weight.nested_absmax"][torch.arange(len(absmax)) // 256]
        absmax = stored["weight.nested_quant_map"][absmax.to(torch.int64)] * nested + state["nested_offset"]
    return (stored["weight.quant_map"][codes] * absmax[index // state["blocksize"]]).view(out, in_)


def made(**options: Any) -> BitsAndBytes:
    return BitsAndBytes(BitsAndBytes.Options(**options))


class TestNf4(QuantConformance):
    method = made()
    resident = 1.1
    config: ClassVar = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
    encode, decode = staticmethod(encode), staticmethod(decode)


class TestFp4InOtherWords(QuantConformance):
    method = made(quant_type="fp4", quant_storage="bfloat16", blocksize=16)
    resident = 1.1
    decode = staticmethod(decode)

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return encode(weight, "fp4", 16, storage=torch.bfloat16)


class TestInt8(QuantConformance):
    method = made(bits=8)
    resident = 1.1
    config: ClassVar = {"load_in_8bit": True, "llm_int8_threshold": 6.0, "_load_in_4bit": False}

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scb = weight.abs().amax(1)
        codes = (weight * 127 / scb.unsqueeze(1)).round().to(torch.int8)
        return {"weight": codes, "SCB": scb, "weight_format": torch.tensor(0, dtype=torch.uint8)}

    def decode(self, stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        return stored["weight"].double() * stored["SCB"].double().unsqueeze(1) / 127


def headers(stored: dict[str, torch.Tensor]) -> dict[str, Header]:
    return {n: Header(dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape)) for n, t in stored.items()}


def target(stored: dict[str, torch.Tensor], out: int, in_: int, name: str = "model.layers.0.mlp.up_proj") -> Target:
    return Target(name=name, in_features=in_, out_features=out, stored=headers(stored))


def shards(layer: Any, stored: dict[str, torch.Tensor], *sizes: Any, method: BitsAndBytes, ranks: int) -> torch.Tensor:
    """Returns the shards' weights put together again, of layers where every rank has one run of rows or columns."""
    flags = {"reduce_results": False} if layer is RowParallelLinear else {}
    weights = []
    for rank in range(ranks):
        module = layer(*sizes, bias=False, quant=method, tp_rank=rank, tp_size=ranks, prefix="some.proj", **flags)
        module.load(stored)
        if module.in_features and module.out_features:
            weights.append(method.dequantize(module))
    return torch.cat(weights, 1 if layer is RowParallelLinear else 0)


@pytest.mark.parametrize("path", DATA, ids=lambda path: path.stem)
@pytest.mark.parametrize("ranks", [1, 3])
def test_decodes_what_bitsandbytes_decodes(path: Path, ranks: int) -> None:
    stored = load_file(path)
    wanted = stored.pop("decoded")
    eight = "SCB" in stored
    kind = "fp4" if any("__fp4" in name for name in stored) else "nf4"
    method = made(bits=8) if eight else made(quant_type=kind).for_module(target(stored, *wanted.shape))
    assert method is not None
    for layer in (ColumnParallelLinear, RowParallelLinear):
        got = shards(layer, stored, wanted.shape[1], wanted.shape[0], method=method, ranks=ranks)
        torch.testing.assert_close(got, wanted, rtol=3e-7, atol=0)
    with safe_open(path, "pt") as file:
        assert file.metadata()["library"].startswith("bitsandbytes ")


@pytest.mark.parametrize(("out", "in_"), [(24, 192), (23, 77), (300, 128)])
@pytest.mark.parametrize(("kind", "double"), [("nf4", False), ("nf4", True), ("fp4", True)])
def test_decodes_what_the_installed_bitsandbytes_writes(out: int, in_: int, double: bool, kind: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(
        torch.randn(out, in_), blocksize=64, compress_statistics=double, quant_type=kind
    )
    stored = {"weight": codes, **{f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}}
    state.shape = torch.Size((1, out * in_))  # its CPU kernel begins a block at every row; the files do not
    wanted = functional.dequantize_4bit(codes, state).view(out, in_)
    method = made(quant_type=kind).for_module(target(stored, out, in_))
    assert method is not None
    for layer in (ColumnParallelLinear, RowParallelLinear):
        torch.testing.assert_close(shards(layer, stored, in_, out, method=method, ranks=3), wanted, rtol=3e-7, atol=0)


@pytest.mark.parametrize("in_", [128, 130])
@pytest.mark.parametrize("fused", [False, True])
def test_nested_parts_keep_their_own_offsets_and_tables(in_: int, fused: bool) -> None:
    torch.manual_seed(0)
    method, rows = made(double_quant=True), [130, 300]
    if fused:
        stored = encode(torch.randn(sum(rows), in_), double=True)
        wanted = list(decode(stored, sum(rows), in_).split(rows))
    else:
        parts = [encode(torch.randn(n, in_) * (1 + 5 * i), double=True) for i, n in enumerate(rows)]
        parts[1]["weight.nested_quant_map"] = parts[1]["weight.nested_quant_map"] * 1.5
        stored = {
            f"{name}_proj.{k}": t for name, part in zip(("gate", "up"), parts, strict=True) for k, t in part.items()
        }
        wanted = [decode(part, n, in_) for part, n in zip(parts, rows, strict=True)]
    for ranks in (1, 2, 3):
        pieces: list[list[torch.Tensor]] = [[], []]
        for rank in range(ranks):
            layer = MergedColumnParallelLinear(in_, rows, bias=False, quant=method, tp_rank=rank, tp_size=ranks)
            layer.load(stored)
            for part, piece in zip(pieces, method.dequantize(layer).split(layer.out_sizes), strict=True):
                part.append(piece)
        torch.testing.assert_close([torch.cat(part) for part in pieces], wanted, rtol=3e-7, atol=0)


@pytest.mark.parametrize(("block", "decoded"), [(64, True), (32, False)])
def test_what_stays_is_within_a_tenth_of_what_is_stored(block: int, decoded: bool) -> None:
    stored = encode(torch.randn(256, 256), block=block, double=True)
    layer = ColumnParallelLinear(256, 256, bias=False, quant=made(double_quant=True, blocksize=block))
    layer.load(stored)
    assert layer.absmax.is_floating_point() is decoded
    held, given = (sum(t.nbytes for t in tensors) for tensors in (layer.parameters(), stored.values()))
    assert held <= 1.1 * given
    torch.testing.assert_close(layer.quant_method.dequantize(layer), decode(stored, 256, 256), rtol=3e-7, atol=0)


def test_headers_say_how_it_is_stored() -> None:
    for out, in_, block in ((24, 128, 64), (24, 100, 256), (5, 7, 64), (24, 128, 4096)):
        stored = encode(torch.randn(out, in_), block=block, double=True)
        method = made().for_module(target(stored, out, in_))
        assert method is not None and method.options.double_quant
        assert method.options.blocksize == block or out * in_ <= min(block, method.options.blocksize)
        assert shards(ColumnParallelLinear, stored, in_, out, method=method, ranks=2).shape == (out, in_)
    stored = encode(torch.randn(24, 128), storage=torch.bfloat16)
    method = made().for_module(target(stored, 24, 128))
    assert method is not None and method.label() == "nf4 g64"
    got = shards(ColumnParallelLinear, stored, 128, 24, method=method, ranks=2)
    torch.testing.assert_close(got, decode(stored, 24, 128), rtol=3e-7, atol=0)


REAL = {
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp"],
    "llm_int8_threshold": 6.0,
}


def test_reads_configurations_old_and_new() -> None:
    old = BitsAndBytes.read_config(REAL)
    assert old == BitsAndBytes.read_config({**REAL, "load_in_4bit": True, "load_in_8bit": False})
    options = BitsAndBytes.Options(**old)
    assert (options.bits, options.quant_type, options.double_quant) == (4, "nf4", True)
    eight = {"load_in_8bit": True, "bnb_4bit_quant_type": "fp4", "llm_int8_skip_modules": None}
    assert BitsAndBytes.Options(**BitsAndBytes.read_config(eight)) == BitsAndBytes.Options(bits=8)
    for wrong in ({"load_in_4bit": False}, {"load_in_4bit": True, "load_in_8bit": True}):
        with pytest.raises(PluginError, match="bits"):
            BitsAndBytes.read_config(wrong)


def test_leaves_out_what_is_listed_or_stored_as_it_is() -> None:
    listed = BitsAndBytes(BitsAndBytes.Options(**BitsAndBytes.read_config(REAL)))
    unlisted = made(double_quant=True)
    stored, plain = encode(torch.randn(8, 64), double=True), {"weight": torch.randn(8, 64)}
    assert listed.for_module(target(stored, 8, 64, "model.layers.1.mlp.up_proj")) is None
    assert listed.for_module(target(stored, 8, 64, "model.layers.11.mlp.up_proj")) is not None
    for method in (listed, unlisted):
        assert method.for_module(target(plain, 8, 64)) is None
        assert method.for_module(Target(name="lm_head", kind="head")) is None
        assert method.for_module(Target(name="model.embed_tokens", kind="embedding")) is None
        assert method.for_module(Target(name="model.layers.0.mlp.up_proj")) is method


def loaded(stored: dict[str, torch.Tensor], **options: Any) -> None:
    layer = ColumnParallelLinear(64, 24, bias=False, quant=made(**options), prefix="model.layers.0.up")
    layer.load(stored)


def test_refuses_what_it_cannot_read() -> None:
    stored = encode(torch.randn(24, 64), double=True)
    name = "weight.quant_state.bitsandbytes__nf4"
    state = json.loads(stored[name].numpy().tobytes())

    def told(**other: Any) -> dict[str, torch.Tensor]:
        return {**stored, name: torch.tensor(list(json.dumps({**state, **other}).encode()), dtype=torch.uint8)}

    loaded(told(), double_quant=True)
    with pytest.raises(PluginError, match=r"model\.layers\.0\.up: quant_state says blocks of 128, read with .* 64"):
        loaded(told(blocksize=128), double_quant=True)
    with pytest.raises(PluginError, match="nested blocks of 512"):
        loaded(told(nested_blocksize=512), double_quant=True)
    with pytest.raises(PluginError, match="cannot be read"):
        loaded(told(blocksize=None), double_quant=True)
    with pytest.raises(PluginError, match="cannot be read"):
        loaded({**stored, name: stored[name][:-3]}, double_quant=True)
    without = {key: value for key, value in state.items() if key != "nested_offset"}
    blob = torch.tensor(list(json.dumps(without).encode()), dtype=torch.uint8)
    with pytest.raises(PluginError, match=r"cannot be read.*nested_offset"):
        loaded({**stored, name: blob}, double_quant=True)
    eight = {"weight": torch.zeros(24, 64, dtype=torch.int8), "SCB": torch.ones(24)}
    loaded(eight, bits=8)
    with pytest.raises(PluginError, match=r"weight_format is \[2\]"):
        loaded({**eight, "weight_format": torch.tensor(2, dtype=torch.uint8)}, bits=8)


@pytest.mark.parametrize("name", ["weight.absmax", "weight.nested_absmax", "weight.nested_quant_map", "SCB"])
def test_a_missing_scale_is_named(name: str) -> None:
    if name == "SCB":
        stored, options = {"weight": torch.zeros(24, 64, dtype=torch.int8)}, {"bits": 8}
    else:
        stored, options = encode(torch.randn(24, 64), double=True), {"double_quant": True}
        del stored[name]
    assert made(**options).for_module(target(stored, 24, 64)) is not None
    with pytest.raises(LoadError, match=name):
        loaded(stored, **options)


def test_parts_with_other_tables_are_refused() -> None:
    parts = [encode(torch.randn(24, 64)) for _ in range(2)]
    parts[1]["weight.quant_map"] = parts[1]["weight.quant_map"] / 2
    stored = {f"{name}_proj.{k}": t for name, part in zip(("gate", "up"), parts, strict=True) for k, t in part.items()}
    layer = MergedColumnParallelLinear(64, [24, 24], bias=False, quant=made())
    with pytest.raises(PluginError, match="2 parts have different tables"):
        layer.load(stored)
