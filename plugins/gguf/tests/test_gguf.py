"""GGUF: every block type against ggml's own reference, shards at any cut, and a container that is not believed."""

from __future__ import annotations

import json
import math
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tpkit import CheckpointError, LoadError, PluginError, Registry, load_spec, open_checkpoint
from tpkit.checkpoint.stored import Checkpoint
from tpkit.layers import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from tpkit.params import Header
from tpkit.quant import LinearSpec, Target
from tpkit.testing import QuantConformance
from tpkit_gguf import Gguf, GgufFormat, decode, types
from tpkit_gguf.config import llama3_scaling

gguf = pytest.importorskip("gguf")

HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "MXFP4": [],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip
ENCODINGS = list(types.BLOCKS)


def encoded(encoding: str, out: int, in_: int, seed: int = 0) -> torch.Tensor:
    """Random blocks whose scales are finite."""
    per, size = types.BLOCKS[encoding]
    made = np.random.default_rng(seed)
    blocks = made.integers(0, 256, (out, in_ // per, size), dtype=np.uint8)
    for at in HALVES[encoding]:
        blocks[..., at : at + 2] = (made.standard_normal((out, in_ // per, 1)) / 64).astype(np.float16).view(np.uint8)
    if encoding == "MXFP4":
        blocks[..., 0] = made.integers(120, 130, blocks.shape[:2])
    return torch.from_numpy(blocks.reshape(out, -1))


def reference(octets: torch.Tensor, encoding: str) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType[encoding]
    return torch.from_numpy(gguf.quants.dequantize(octets.numpy(), kind).copy())


def method(encoding: str) -> Gguf:
    return Gguf(Gguf.Options(encoding=encoding))


# decoding


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_random_blocks_decode_to_the_last_bit(encoding: str) -> None:
    octets = encoded(encoding, 37, 1024)
    assert torch.equal(decode.decode(octets, encoding), reference(octets, encoding))


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_what_the_library_quantised_decodes_to_the_last_bit(encoding: str) -> None:
    weight = np.random.default_rng(1).standard_normal((24, 96)).astype(np.float32)
    octets = torch.from_numpy(gguf.quants.quantize(weight, gguf.GGMLQuantizationType[encoding]))
    values = decode.decode(octets, encoding)
    assert torch.equal(values, reference(octets, encoding))
    assert (values - torch.from_numpy(weight)).abs().max() < (2 if encoding == "MXFP4" else 0.5)


def test_every_exponent_and_code_of_mxfp4() -> None:
    octets = torch.arange(256, dtype=torch.uint8).repeat_interleave(17).view(256, 17).clone()
    octets[:, 1:] = torch.arange(16, dtype=torch.uint8) * 17
    with np.errstate(over="ignore"):
        assert torch.equal(decode.decode(octets, "MXFP4"), reference(octets, "MXFP4"))


def test_large_tables_are_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    octets = encoded("Q4_K", 50, 512)
    monkeypatch.setattr(decode, "_AT_ONCE", 3 * 512 + 1)
    assert torch.equal(decode.decode(octets, "Q4_K"), reference(octets, "Q4_K"))
    assert decode.decode(octets[:0], "Q4_K").shape == (0, 512)


def test_the_table_of_types_is_the_librarys() -> None:
    assert {kind.value: kind.name for kind in gguf.GGMLQuantizationType} == types.NAMES
    sizes = {kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert all(sizes[name] == block for name, block in types.BLOCKS.items())


# layers


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_column_and_row_shards(encoding: str, size: int) -> None:
    octets = encoded(encoding, 11, 512)
    whole, rows, total = reference(octets, encoding), [], torch.zeros(2, 11, dtype=torch.float64)
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(0))
    for rank in range(size):
        place: dict[str, Any] = {"bias": False, "quant": method(encoding), "tp_rank": rank, "tp_size": size}
        column = ColumnParallelLinear(512, 11, **place)
        column.load({"weight": octets})
        rows.append(column.quant_method.dequantize(column))
        row = RowParallelLinear(512, 11, reduce_results=False, input_is_parallel=False, **place)
        row.load({"weight": octets})
        ((start, stop),) = row.sharded.layer.bounds(row.sharded.layer.spec.in_, rank)
        assert torch.equal(row.quant_method.dequantize(row), whole[:, start:stop])
        total += row(x).double()
    assert torch.equal(torch.cat(rows), whole)
    scale = (x.double().abs() @ whole.double().abs().t()).max()
    assert (total - x.double() @ whole.double().t()).abs().max() < 1e-6 * scale


class TestNibbles(QuantConformance):
    method = method("Q4_0")
    step_in = 32

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        kind = gguf.GGMLQuantizationType[self.method.label()]
        return {"weight": torch.from_numpy(gguf.quants.quantize(weight.numpy(), kind))}

    def decode(self, stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        return reference(stored["weight"], self.method.label())


class TestExponents(TestNibbles):
    method = method("MXFP4")


class TestLargeBlocks(TestNibbles):
    method = method("Q4_K")
    step_in = 256

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        # nobody quantises to these types in Python: any blocks do
        return {"weight": encoded("Q4_K", *weight.shape, seed=int(weight.abs().sum() * 100))}


@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_cuts_inside_a_block_of_256(size: int) -> None:
    octets = encoded("Q5_K", 3, 256)
    whole = reference(octets, "Q5_K")
    pieces = []
    for rank in range(size):
        row = RowParallelLinear(
            256, 3, bias=False, reduce_results=False, quant=method("Q5_K"), tp_rank=rank, tp_size=size
        )
        row.load({"weight": octets})
        pieces.append(row.quant_method.dequantize(row))
    assert torch.equal(torch.cat(pieces, 1), whole)
    assert sum(piece.shape[1] > 0 for piece in pieces) > 1  # a block is shared, not given to one rank


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_packed_layers(size: int) -> None:
    parts = {name: encoded("Q6_K", rows, 512, seed) for seed, (name, rows) in enumerate([("gate", 30), ("up", 30)])}
    heads = {
        name: encoded("Q4_0", rows, 96, seed) for seed, (name, rows) in enumerate(zip("qkv", (60, 20, 20), strict=True))
    }
    for rank in range(size):
        place: dict[str, Any] = {"bias": False, "tp_rank": rank, "tp_size": size}
        merged = MergedColumnParallelLinear(512, [30, 30], names=list(parts), quant=method("Q6_K"), **place)
        merged.load({f"{name}.weight": octets for name, octets in parts.items()})
        qkv = QKVParallelLinear(96, 10, 6, 2, names=list("qkv"), quant=method("Q4_0"), **place)
        qkv.load({f"{name}.weight": octets for name, octets in heads.items()})
        for layer, stored, encoding in ((merged, parts, "Q6_K"), (qkv, heads, "Q4_0")):
            bounds = layer.sharded.layer.bounds(layer.sharded.layer.spec.out, rank)
            wanted = [
                reference(octets, encoding)[slice(*bound)]
                for octets, bound in zip(stored.values(), bounds, strict=True)
            ]
            assert torch.equal(layer.quant_method.dequantize(layer), torch.cat(wanted))


@pytest.mark.parametrize("size", [1, 3])
def test_an_embedding_decodes_only_the_rows_it_is_asked_for(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    octets, ids, asked = encoded("Q4_K", 50, 256), torch.tensor([[1, 49, 1], [20, 49, 33]]), []
    own = decode.decode
    monkeypatch.setattr(decode, "decode", lambda rows, encoding: asked.append(len(rows)) or own(rows, encoding))
    table = VocabParallelEmbedding(50, 256, quant=method("Q4_K"), tp_rank=0, tp_size=size)
    table.load({"weight": octets})
    local = ids % table.out_features
    assert torch.equal(table.quant_method.embedding(table, local), reference(octets, "Q4_K")[local])
    assert asked == [len(local.unique())]


def test_a_missing_weight_is_reported() -> None:
    with pytest.raises(LoadError, match="weight"):
        ReplicatedLinear(64, 4, bias=False, quant=method("Q4_0"), tp_rank=0, tp_size=1).load({})


# the method


@pytest.mark.parametrize("kind", ["linear", "head", "embedding"])
def test_each_module_gets_the_type_it_is_stored_in(kind: Any) -> None:
    packed = {"weight": Header(dtype="uint8", shape=(8, 144), encoding="Q4_K")}
    chosen = Gguf().for_module(Target(name="x", kind=kind, stored=packed))
    assert chosen is not None
    assert chosen.label() == "Q4_K"
    plain = {"weight": Header(dtype="float16", shape=(8, 256))}
    assert Gguf().for_module(Target(name="x", kind=kind, stored=plain)) is None
    assert Gguf().for_module(Target(name="x", kind=kind)) is None
    assert method("Q4_0").for_module(Target(name="x", kind=kind)) is not None
    assert Gguf.Options(**Gguf.read_config({})) == Gguf().options


@pytest.mark.parametrize("encoding", ["", "IQ2_XXS"])
def test_a_type_that_is_not_known_is_refused_by_name(encoding: str) -> None:
    layer = LinearSpec(name="model.norm", in_features=64, segments=(("", 4),), dtype="float32")
    with pytest.raises(PluginError, match=r"model.norm: GGUF encoding .*Q6_K"):
        method(encoding).create_weights(layer)


# the container

CODES = {int: "I", float: "f", bool: "?"}
NUMBERS = {int: 4, float: 6, bool: 7}


def packed_value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<IQ", 8, len(value)) + value.encode()
    if isinstance(value, list):
        kind = type(value[0])
        texts = b"".join(struct.pack("<Q", len(text)) + text.encode() for text in value) if kind is str else b""
        body = texts or struct.pack(f"<{len(value)}{CODES[kind]}", *value)
        return struct.pack("<IIQ", 9, 8 if kind is str else NUMBERS[kind], len(value)) + body
    return struct.pack("<I" + CODES[type(value)], NUMBERS[type(value)], value)


Entry = tuple[str, tuple[int, ...], int, bytes]
F32 = 0


def container(
    metadata: list[tuple[str, Any]],
    tensors: list[Entry],
    *,
    offsets: list[int] | None = None,
    alignment: int = 32,
    head: bytes = b"GGUF\3\0\0\0",
    counts: tuple[int, int] | None = None,
) -> bytes:
    """Writes a file as the specification has it, or wrong where a test asks for it."""
    data, infos = b"", b""
    for index, (name, shape, kind, content) in enumerate(tensors):
        data += b"\0" * (-len(data) % alignment)
        offset = len(data) if offsets is None else offsets[index]
        infos += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
        infos += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", kind, offset)
        data += content
    entries = b"".join(struct.pack("<Q", len(key)) + key.encode() + packed_value(value) for key, value in metadata)
    made = head + struct.pack("<QQ", *(counts or (len(tensors), len(metadata)))) + entries + infos
    return made + b"\0" * (-len(made) % alignment) + data


def plain(name: str, *shape: int) -> Entry:
    return name, shape, F32, torch.arange(math.prod(shape), dtype=torch.float32).numpy().tobytes()


def model(arch: str = "llama", **changed: Any) -> list[tuple[str, Any]]:
    keys = {
        "context_length": 128, "embedding_length": 32, "block_count": 1, "feed_forward_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    keys |= {key.replace("__", "."): value for key, value in changed.items()}
    own = [(f"{arch}.{key}", value) for key, value in keys.items() if value is not None]
    return [("general.architecture", arch), ("tokenizer.ggml.tokens", ["a", "bc", ""]), *own]


TENSORS = [
    plain("token_embd.weight", 7, 32),
    plain("blk.0.attn_q.weight", 32, 32),
    plain("blk.0.attn_k.weight", 16, 32),
]


def opened(folder: Path, content: bytes, name: str = "model.gguf") -> Checkpoint:
    (folder / name).write_bytes(content)
    return GgufFormat.open(folder / name)


def stored(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Reads a plain tensor with its rows in Hugging Face's order."""
    held = checkpoint.tensors[name]
    with held.file.open("rb") as stream:
        stream.seek(held.begin)
        values = torch.frombuffer(bytearray(stream.read(held.nbytes)), dtype=getattr(torch, held.dtype))
    values, view = values.view(held.shape), checkpoint.orders.get(name.rpartition(".")[0])
    if view is None:
        return values
    return values[torch.cat([torch.arange(run.start, run.stop, run.step) for run in view.runs(0, view.size)])]


def test_names_types_and_places(tmp_path: Path) -> None:
    block = encoded("Q4_0", 64, 32).numpy().tobytes()
    checkpoint = opened(
        tmp_path,
        container(
            model(), [*TENSORS, ("blk.0.ffn_up.weight", (64, 32), 2, block), plain("blk.0.attn_rot_embd.weight", 2)]
        ),
    )
    up = checkpoint.tensors["model.layers.0.mlp.up_proj.weight"]
    assert (up.dtype, up.shape, up.encoding, up.nbytes) == ("uint8", (64, 18), "Q4_0", 64 * 18)
    embedding = checkpoint.tensors["model.embed_tokens.weight"]
    assert (embedding.dtype, embedding.shape, embedding.encoding) == ("float32", (7, 32), "")
    assert "blk.0.attn_rot_embd.weight" in checkpoint.tensors
    assert checkpoint.quantization == {"quant_method": "gguf"}
    assert torch.equal(stored(checkpoint, "model.embed_tokens.weight"), torch.arange(7.0 * 32).view(7, 32))
    checkpoint.check_unchanged()


def test_a_file_without_blocks_is_not_quantised(tmp_path: Path) -> None:
    assert opened(tmp_path, container(model(), TENSORS)).quantization is None


def damaged() -> dict[str, tuple[bytes, str]]:
    def of(tensors: list[Entry], **wrong: Any) -> bytes:
        return container(model(), tensors, **wrong)

    return {
        "empty": (b"", "empty"),
        "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs"),
        "web page": (b"<!DOCTYPE html>", "web page"),
        "magic": (b"GGML" + bytes(60), "no GGUF file"),
        "version 1": (of(TENSORS, head=b"GGUF\1\0\0\0"), "version 1; known: 2 and 3"),
        "big endian": (of(TENSORS, head=b"GGUF\0\0\0\3"), "version 3, big endian"),
        "tensors": (of(TENSORS, counts=(1 << 60, 9)), "tensors at byte .* need at least"),
        "entries": (of(TENSORS, counts=(3, 1 << 60)), "metadata entries at byte"),
        "key twice": (container([*model(), ("a", 1), ("a", 1)], TENSORS), "has a twice"),
        "tensor twice": (of([TENSORS[0], TENSORS[0]]), "holds token_embd.weight twice"),
        "name twice": (of([*TENSORS, plain("model.embed_tokens.weight", 1)]), "stored twice"),
        "overlap": (of(TENSORS, offsets=[0, 32, 8192]), "overlap those of token_embd"),
        "outside": (of(TENSORS, offsets=[0, 8192, 1 << 40]), "ends at byte"),
        "unaligned": (of(TENSORS, offsets=[4, 8192, 32768]), "not at a multiple of 32"),
        "type": (of([("x", (2, 256), 16, bytes(132))]), r"IQ2_XXS \(16\).*known: F32.*Q6_K"),
        "number": (of([("x", (2, 256), 99, bytes(132))]), r"\(99\), which cannot be read"),
        "row": (of([("x", (2, 40), 2, bytes(132))]), "not whole blocks of 32"),
        "no dimension": (of([("x", (), F32, b"")]), "0 dimensions"),
        "five dimensions": (of([plain("x", 1, 1, 1, 1, 1)]), "5 dimensions"),
        "no element": (of([plain("x", 0, 3)]), "shape"),
        "huge": (of([("x", (1 << 62, 1 << 62), F32, b"")]), "ends at byte"),
        "alignment": (container([*model(), ("general.alignment", 24)], TENSORS), "not a power of two"),
        "alignment 0": (container([*model(), ("general.alignment", 0)], TENSORS), "not a power of two"),
    }


@pytest.mark.parametrize("fault", damaged())
def test_damaged_files_are_refused_by_name(fault: str, tmp_path: Path) -> None:
    content, message = damaged()[fault]
    with pytest.raises(CheckpointError, match=message) as raised:
        opened(tmp_path, content)
    assert "model.gguf" in str(raised.value)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = container(model(), TENSORS[:1])
    opened(tmp_path, whole)
    for length in [*range(0, len(whole) - 896, 3), *range(len(whole) - 896, len(whole), 41)]:
        with pytest.raises(CheckpointError):
            opened(tmp_path, whole[:length])


def test_a_file_with_any_byte_changed_opens_or_is_refused(tmp_path: Path) -> None:
    whole, chance = container(model(), TENSORS[:1]), random.Random(0)
    for _ in range(300):
        content = bytearray(whole)
        content[chance.randrange(len(whole) - 896)] = chance.randrange(256)
        try:
            opened(tmp_path, bytes(content))
        except CheckpointError:
            continue


def test_another_alignment(tmp_path: Path) -> None:
    content = container([*model(), ("general.alignment", 128)], TENSORS, alignment=128)
    checkpoint = opened(tmp_path, content)
    assert {held.begin % 128 for held in checkpoint.tensors.values()} == {0}
    assert stored(checkpoint, "model.embed_tokens.weight")[1, 0] == 32


def test_what_a_path_stands_for(tmp_path: Path) -> None:
    content = container(model(), TENSORS)
    opened(tmp_path, content)
    assert GgufFormat.recognises(tmp_path)
    assert GgufFormat.open(tmp_path).tensors.keys() == GgufFormat.open(tmp_path / "model.gguf").tensors.keys()
    (tmp_path / "other.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"2 GGUF models: model.gguf, other.gguf"):
        GgufFormat.open(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert not GgufFormat.recognises(tmp_path)
    assert GgufFormat.recognises(tmp_path / "other.gguf")


def test_tpkit_finds_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(container(model(), TENSORS))
    registry = Registry()
    registry.register("checkpoint format", "gguf", GgufFormat)
    assert len(open_checkpoint(tmp_path, registry).tensors) == 3


def test_what_the_file_says_of_itself_goes_before_a_config_beside_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(container(model(), TENSORS))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4096, "rms_norm_eps": 1}))
    for path in (tmp_path, tmp_path / "model.gguf"):
        spec = load_spec("llama", config=path)
        assert (spec.values["hidden_size"], spec.values["rms_norm_eps"]) == (32, pytest.approx(1e-5))
    assert load_spec("llama", config=tmp_path / "config.json").values["hidden_size"] == 4096


def test_split_files(tmp_path: Path) -> None:
    def part(number: int, tensors: list[Entry], told: int | None = None) -> None:
        keys = [("split.no", number if told is None else told), ("split.count", 2), ("split.tensors.count", 3)]
        own = model() if number == 0 else [("general.architecture", "llama")]
        (tmp_path / f"m-{number + 1:05d}-of-00002.gguf").write_bytes(container([*own, *keys], tensors))

    part(0, TENSORS[:1])
    with pytest.raises(CheckpointError, match=r"one of 2 parts; missing: m-00002-of-00002.gguf"):
        GgufFormat.open(tmp_path)
    part(1, TENSORS[1:])
    for path in (tmp_path, tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"):
        checkpoint = GgufFormat.open(path)
        assert {held.file.name for held in checkpoint.tensors.values()} == {
            "m-00001-of-00002.gguf",
            "m-00002-of-00002.gguf",
        }
        assert len(checkpoint.tensors) == 3
    part(1, TENSORS[1:2])
    with pytest.raises(CheckpointError, match="hold 3 tensors, they hold 2"):
        GgufFormat.open(tmp_path)
    part(1, TENSORS[:1] + TENSORS[1:])
    with pytest.raises(CheckpointError, match=r"stored twice|they hold 4"):
        GgufFormat.open(tmp_path)
    part(1, TENSORS[1:], told=0)
    with pytest.raises(CheckpointError, match="says it is part 0"):
        GgufFormat.open(tmp_path)
    (tmp_path / "alone.gguf").write_bytes((tmp_path / "m-00001-of-00002.gguf").read_bytes())
    with pytest.raises(CheckpointError, match="of 2, by its name it is 0 of 1"):
        GgufFormat.open(tmp_path / "alone.gguf")


# what a file of the library says


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("split", [0, 4])
def test_a_file_of_the_library_comes_back(arch: str, split: int, tmp_path: Path) -> None:
    heads, kv, head_dim, hidden = 3, 1, 8, 24
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], 2)
    shapes = {"model.embed_tokens.weight": (9, hidden), "model.norm.weight": (hidden,), "lm_head.weight": (9, hidden)}
    for layer in ("model.layers.0.", "model.layers.1."):
        sizes = {"q_proj": heads, "k_proj": kv, "v_proj": kv}
        shapes |= {f"{layer}self_attn.{name}.weight": (n * head_dim, hidden) for name, n in sizes.items()}
        shapes |= {f"{layer}self_attn.{name}.bias": (n * head_dim,) for name, n in sizes.items()}
        shapes |= {f"{layer}self_attn.o_proj.weight": (hidden, heads * head_dim)}
        shapes |= {f"{layer}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}mlp.{name}.weight": (40, hidden) for name in ("gate_proj", "up_proj")}
        shapes |= {f"{layer}mlp.down_proj.weight": (hidden, 40)}
        if arch == "qwen3":
            shapes |= {f"{layer}self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
    dense = {name: torch.randn(shape) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", arch, split_max_tensors=split)
    writer.add_block_count(2), writer.add_context_length(64), writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(40), writer.add_head_count(heads), writer.add_head_count_kv(kv)
    writer.add_layer_norm_rms_eps(1e-6), writer.add_rope_freq_base(5e5), writer.add_token_list(["x"] * 9)
    writer.add_bos_token_id(1)
    for name, weight in dense.items():
        count = {"q_proj": heads, "k_proj": kv}.get(name.split(".")[-2]) if arch == "llama" else None
        # as the converter does: neighbours are rotated, not halves
        turned = weight.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2) if count else weight
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), turned.numpy())
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    checkpoint = GgufFormat.open(tmp_path)
    assert set(checkpoint.tensors) == set(dense)
    assert all(torch.equal(stored(checkpoint, name), weight) for name, weight in dense.items())
    assert bool(checkpoint.orders) == (arch == "llama")
    config = dict(checkpoint.config or {})
    assert config.pop("rms_norm_eps") == pytest.approx(1e-6)
    assert config.pop("attention_bias", True)
    assert config.pop("mlp_bias", False) is False
    assert config == {
        "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[arch] + "ForCausalLM"],
        "model_type": arch,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 40,
        "vocab_size": 9,
        "max_position_embeddings": 64,
        "rope_theta": 5e5,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
    }


# config.json


def config(folder: Path, *more: Entry, arch: str = "llama", **keys: Any) -> dict[str, Any]:
    return dict(opened(folder, container(model(arch, **keys), [*TENSORS, *more])).config or {})


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, {"tie_word_embeddings": True, "rope_theta": 10000.0, "head_dim": 8, "vocab_size": 7}),
        ({"attention__head_count_kv": [2]}, {"num_key_value_heads": 2}),
        (
            {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        ),
        ({"rope__scale_linear": 2.0}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, {"rope_scaling": None}),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32},
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        ),
        ({"attention__sliding_window": 16}, {"model_type": "mistral", "sliding_window": 16}),
        ({"expert_count": 8, "expert_used_count": 2}, {"model_type": "mixtral", "num_local_experts": 8}),
    ],
)  # fmt: skip
def test_metadata_becomes_config(keys: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    made = config(tmp_path, **keys)
    assert {key: made.get(key) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("arch", "keys", "message"),
    [
        ("gemma2", {}, "architecture 'gemma2' is not known; known: llama, qwen2, qwen3, qwen2moe, qwen3moe, olmoe"),
        ("llama", {"block_count": None}, "llama.block_count is None"),
        ("llama", {"block_count": "two"}, "llama.block_count is 'two'"),
        ("llama", {"feed_forward_length": [64, 32]}, "differs from layer to layer"),
        ("llama", {"logit_scale": 2.0}, "not understood: llama.logit_scale = 2.0"),
        ("llama", {"attention__key_length": 8, "attention__value_length": 4}, "must be one even number"),
        ("llama", {"rope__dimension_count": 4}, "4 of them rotated"),
        ("llama", {"rope__scaling__type": "longrope"}, "rope scaling 'longrope'"),
        ("llama", {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, "rope scaling 'yarn'"),
        ("llama", {"rope__scaling__attn_factor": 2.0}, "llama.rope.scaling.attn_factor"),
        ("llama", {"attention__causal": False}, "causal"),
        ("qwen2", {"attention__sliding_window": 16}, "sliding_window is 16"),
        ("llama", {"attention__head_count": 2}, "metadata's numbers of heads"),
    ],
)
def test_metadata_that_is_not_understood_is_refused(
    arch: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        config(tmp_path, arch=arch, **keys)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds a 'adapter', not a model"):
        opened(tmp_path, container([*model(), ("general.type", "adapter")], TENSORS))


def test_biases_are_seen(tmp_path: Path) -> None:
    made = config(tmp_path, plain("blk.0.attn_v.bias", 16), plain("blk.0.ffn_up.bias", 64))
    assert (made["attention_bias"], made["mlp_bias"]) == (True, True)


def frequencies(factor: float, low: float, high: float, context: int, theta: float, dim: int) -> list[float]:
    """What the converter writes, from the published formula of Llama 3.1."""
    found = []
    for frequency in 1 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim):
        length = 2 * math.pi / frequency.item()
        if length < context / high:
            found.append(1.0)
        elif length > context / low:
            found.append(factor)
        else:
            smooth = (context / length - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


def test_llama_3_scaling_is_told_from_its_frequencies(tmp_path: Path) -> None:
    told = llama3_scaling(tmp_path, frequencies(32, 1, 4, 8192, 5e5, 64), 5e5, 64)
    assert told == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for other in ((8, 2, 4, 8192, 5e5, 64), (8, 1, 4, 4096, 5e5, 64), (8, 1, 4, 8192, 1e4, 64)):
        with pytest.raises(CheckpointError, match="rope_freqs"):
            llama3_scaling(tmp_path, frequencies(*other), 5e5, 64)
    made = config(tmp_path, ("rope_freqs.weight", (1,), F32, struct.pack("<f", 1.0)))
    assert made["rope_scaling"] is None
    with pytest.raises(CheckpointError, match="rope_freqs"):
        config(tmp_path, ("rope_freqs.weight", (4,), F32, struct.pack("<4f", 1, 2, 3, 4)))
