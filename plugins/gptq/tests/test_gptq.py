"""GPTQ: the conformance kit, linears that other libraries wrote and decoded, configurations, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tpkit import CheckpointError, LoadError, PluginError
from tpkit.layers import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from tpkit.quant import Target
from tpkit.testing import QuantConformance
from tpkit_gptq import AutoRound, Gptq

DATA = Path(__file__).parent / "data" / "linears.safetensors"


def fields(words: torch.Tensor, bits: int, dim: int) -> np.ndarray:
    """Unpacks a bit stream, the lowest bits first."""
    last = np.ascontiguousarray(np.moveaxis(words.numpy(), dim, -1))
    stream = np.unpackbits(last.view(np.uint8), axis=-1, bitorder="little")
    whole = stream.shape[-1] // bits * bits
    values = stream[..., :whole].reshape(*stream.shape[:-1], -1, bits) @ (1 << np.arange(bits))
    return np.moveaxis(values, -1, dim)


def words(values: np.ndarray, bits: int, dim: int) -> torch.Tensor:
    """Packs into whole words, three of them at a time for 3 bits."""
    last = np.moveaxis(values, dim, -1)
    unit = 32 if bits == 3 else 32 // bits
    last = np.pad(last, [(0, 0)] * (last.ndim - 1) + [(0, -last.shape[-1] % unit)])
    stream = (last[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(*last.shape[:-1], -1)
    packed = np.packbits(stream, axis=-1, bitorder="little").view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed, -1, dim)))


def method(kind: type[Gptq] = Gptq, **config: Any) -> Gptq:
    return kind(kind.Options(**kind.read_config(config)))


class Kit(QuantConformance):
    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        options = self.method.options
        out, in_ = weight.shape
        top, size = (1 << options.bits) - 1, in_ if options.group_size == -1 else options.group_size
        groups = -(-in_ // size)
        g_idx = torch.arange(in_) // size
        g_idx = g_idx[torch.randperm(in_)] if options.desc_act else g_idx
        scales = (0.2 + torch.rand(groups, out)).half()
        zeros = torch.randint(0, top + 1, (groups, out))
        codes = (weight.t() / scales[g_idx] + zeros[g_idx]).round().clamp(0, top).long()
        less = 0 if options.checkpoint_format == "gptq_v2" else 1
        packed = words(((zeros - less) & top).numpy(), options.bits, 1)
        if options.borrowed:
            packed = words(zeros.numpy(), options.bits, 1) - sum(1 << n for n in range(0, 32, options.bits))
        made = {"qweight": words(codes.numpy(), options.bits, 0), "qzeros": packed, "scales": scales}
        return {**made, "g_idx": g_idx.int()} if options.desc_act else made

    def decode(self, stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        options = self.method.options
        codes = fields(stored["qweight"], options.bits, 0)[:in_]
        packed = stored["qzeros"].numpy()
        if options.borrowed:
            packed = packed + np.int32(sum(1 << n for n in range(0, 32, options.bits)))
        zeros = fields(torch.from_numpy(packed), options.bits, 1)[:, :out]
        if options.checkpoint_format == "gptq" and not options.borrowed:
            zeros = (zeros + 1) % (1 << options.bits)
        size = in_ if options.group_size == -1 else options.group_size
        g_idx = stored["g_idx"].numpy() if "g_idx" in stored else np.arange(in_) // size
        return torch.from_numpy((codes - zeros[g_idx]) * stored["scales"].double().numpy()[g_idx]).t().float()


class TestFourBits(Kit):
    method = method(bits=4, group_size=16)


class TestThreeBitsOfVersion2InActivationOrder(Kit):
    method = method(bits=3, group_size=12, checkpoint_format="gptq_v2", desc_act=True)


class TestOneGroupWithBorrows(Kit):
    method = method(bits=8, group_size=-1, meta={"quantizer": ["gptqmodel:7.6.0"]})


def recorded() -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    with safe_open(DATA, "pt") as file:
        notes = {name: json.loads(note) for name, note in sorted(file.metadata().items()) if note.startswith("{")}
        cases: dict[str, dict[str, torch.Tensor]] = {name: {} for name in notes}
        for key in file.keys():  # noqa: SIM118 - no mapping
            name, _, tensor = key.rpartition(".")
            cases[name][tensor] = file.get_tensor(key)
    return notes, cases


NOTES, CASES = recorded()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("size", [1, 3])
def test_equals_what_the_library_decodes(name: str, layer: Any, size: int) -> None:
    tensors = dict(CASES[name])
    wanted = tensors.pop("decoded")
    quant = method(AutoRound if name.startswith("round") else Gptq, **NOTES[name])
    row = layer is RowParallelLinear
    flags = {"reduce_results": False} if row else {}
    parts = []
    for rank in range(size):
        made = layer(*reversed(wanted.shape), bias=False, quant=quant, tp_rank=rank, tp_size=size, **flags)
        made.load(tensors)
        assert hasattr(made, "g_idx") == (name == "act_order")
        parts.append(quant.dequantize(made))
    torch.testing.assert_close(torch.cat(parts, int(row)), wanted, rtol=0, atol=0)


def test_the_recorded_zero_points_do_borrow() -> None:
    tensors = dict(CASES["w4_gptq"])
    wanted = tensors.pop("decoded")
    per_field = method(bits=4, group_size=16)
    made = ColumnParallelLinear(64, 32, bias=False, quant=per_field, tp_rank=0, tp_size=1)
    made.load(tensors)
    assert not torch.equal(per_field.dequantize(made), wanted)


def test_parts_of_a_merged_layer_have_an_order_each() -> None:
    tensors = {f"{part}.{key}": t for part in ("gate_proj", "up_proj") for key, t in CASES["act_order"].items()}
    wanted = tensors.pop("gate_proj.decoded"), tensors.pop("up_proj.decoded")
    turned = torch.randperm(64)
    tensors["up_proj.g_idx"] = tensors["up_proj.g_idx"][turned]
    codes = fields(tensors["up_proj.qweight"], 4, 0)[turned.numpy()]
    tensors["up_proj.qweight"] = words(codes, 4, 0)
    for rank in range(3):
        quant = method(**NOTES["act_order"])
        made = MergedColumnParallelLinear(64, [32, 32], bias=False, quant=quant, tp_rank=rank, tp_size=3)
        made.load(tensors)
        (a, b), (c, d) = made.sharded.layer.bounds(made.sharded.layer.spec.out, rank)
        assert torch.equal(quant.dequantize(made), torch.cat([wanted[0][a:b], wanted[1][c:d][:, turned]]))


@pytest.mark.parametrize("size", [1, 2])
def test_an_order_that_the_config_denies_is_refused_on_every_rank(size: int) -> None:
    tensors = {key: t for key, t in CASES["w4_gptq_v2"].items() if key != "decoded"}
    tensors["g_idx"] = torch.arange(64, dtype=torch.int32).flip(0) // 16  # in each half the groups are whole
    for rank in range(size):
        made = RowParallelLinear(
            64, 32, bias=False, quant=method(**NOTES["w4_gptq_v2"]), tp_rank=rank, tp_size=size, reduce_results=False,
            prefix="model.down_proj",
        )  # fmt: skip
        with pytest.raises(CheckpointError, match=r"model\.down_proj: g_idx puts input 0 into group 3.* in 0") as error:
            made.load(tensors)
        assert "desc_act: true" in (error.value.hint or "")


def test_an_index_that_was_never_filled_in_is_none() -> None:
    tensors = {key: t for key, t in CASES["w4_gptq_v2"].items() if key != "decoded"}
    quant = method(**NOTES["w4_gptq_v2"])
    made = ColumnParallelLinear(64, 32, bias=False, quant=quant, tp_rank=0, tp_size=1)
    made.load({**tensors, "g_idx": torch.zeros(64, dtype=torch.int32)})
    assert torch.equal(quant.dequantize(made), CASES["w4_gptq_v2"]["decoded"])
    made.load(tensors)  # and again, without
    assert torch.equal(quant.dequantize(made), CASES["w4_gptq_v2"]["decoded"])


def test_an_order_that_was_never_filled_in_is_refused() -> None:
    tensors = {key: t for key, t in CASES["act_order"].items() if key != "decoded"}
    made = ColumnParallelLinear(64, 32, bias=False, quant=method(**NOTES["act_order"]), tp_rank=0, tp_size=1)
    with pytest.raises(CheckpointError, match="all 64 inputs of this rank into group 0 of 4"):
        made.load({**tensors, "g_idx": tensors["g_idx"] * 0})


def test_an_index_beyond_the_groups_is_refused() -> None:
    tensors = {key: t for key, t in CASES["act_order"].items() if key != "decoded"}
    made = ColumnParallelLinear(64, 32, bias=False, quant=method(**NOTES["act_order"]), tp_rank=0, tp_size=1)
    with pytest.raises(CheckpointError, match="there are 4 groups"):
        made.load({**tensors, "g_idx": tensors["g_idx"] + 1})


@pytest.mark.parametrize("missing", ["qweight", "qzeros", "scales", "g_idx"])
def test_what_is_missing_is_said(missing: str) -> None:
    tensors = {key: t for key, t in CASES["act_order"].items() if key not in ("decoded", missing)}
    made = ColumnParallelLinear(64, 32, bias=False, quant=method(**NOTES["act_order"]), tp_rank=0, tp_size=1)
    with pytest.raises(LoadError, match=missing):
        made.load(tensors)


# configurations

GPTQMODEL = {
    "bits": 4, "checkpoint_format": "gptq", "desc_act": False, "format": "gptq", "group_size": 32, "lm_head": False,
    "meta": {"act_group_aware": True, "quantizer": ["gptqmodel:7.6.0"], "uri": "https://github.com/modelcloud/gptqmodel"},
    "method": "gptq", "pack_dtype": "int32", "sym": True,
}  # fmt: skip
AUTOGPTQ = {
    "bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "static_groups": False, "sym": True,
    "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model",
}  # fmt: skip
ROUND = {
    "amp": False, "autoround_version": "0.16.1", "bits": 4, "block_name_to_quantize": "model.layers",
    "data_type": "int", "enable_quanted_input": False, "group_size": 32, "packing_format": "auto_round:auto_gptq",
    "sym": True, "extra_config": {
        ".*experts.*": {"bits": 8, "group_size": 64},
        "model.layers.0.mlp.gate": {"bits": 16, "data_type": "fp"},
        "model.layers.1.mlp.experts.0.up_proj": {"bits": 2, "act_bits": 16},
        "lm_head": {"bits": 8, "group_size": -1, "sym": True, "data_type": "int", "act_bits": None},
    },
}  # fmt: skip


def target(name: str, kind: Any = "linear", *stored: str) -> Target:
    from tpkit.quant import Header

    return Target(name=name, kind=kind, stored={each: Header(dtype="int32", shape=(1,)) for each in stored})


def test_configs_of_the_known_writers() -> None:
    read = Gptq.read_config(GPTQMODEL)
    assert read.pop("borrowed") is True
    assert read == {
        "bits": 4, "checkpoint_format": "gptq", "desc_act": False, "group_size": 32, "lm_head": False, "sym": True,
    }  # fmt: skip
    assert Gptq.read_config(AUTOGPTQ) == {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    assert "borrowed" not in Gptq.read_config({**GPTQMODEL, "format": "gptq_v2", "checkpoint_format": "gptq_v2"})
    assert method(**AUTOGPTQ).label() == "4 bit g128"
    assert method(**{**AUTOGPTQ, "group_size": -1, "desc_act": True}).label() == "4 bit all inputs act-order"


@pytest.mark.parametrize(
    "wrong",
    [
        {"checkpoint_format": "marlin"},
        {"format": "gptq_p"},
        {"checkpoint_format": "gptq", "format": "gptq_v2"},
        {"is_marlin_format": True},
        {"pack_dtype": "int64"},
        {"method": "qqq"},
    ],
)
def test_other_layouts_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(PluginError, match=str(next(iter(wrong.values())))):
        Gptq.read_config({**AUTOGPTQ, **wrong})


@pytest.mark.parametrize(
    "wrong", [{"bits": 5}, {"group_size": 0}, {"rotation": "hadamard"}, {"dynamic": {"+:x": {"format": "gptq_p"}}}]
)
def test_what_is_not_known_is_left_for_the_options_to_refuse(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        method(**{**AUTOGPTQ, **wrong})


def test_rules_by_module() -> None:
    quant = method(
        **AUTOGPTQ,
        dynamic={r"-:.*\.gate$": {}, r"+:.*\.0\..*down": {"bits": 8, "group_size": 32}, r".*\.0\.": {"desc_act": True}},
    )
    assert quant.for_module(target("model.layers.0.mlp.gate")) is None
    down = quant.for_module(target("model.layers.0.mlp.down_proj"))
    assert down is not None and down.label() == "8 bit g32"  # the first rule alone
    up = quant.for_module(target("model.layers.0.mlp.up_proj"))
    assert up is not None and up.label() == "4 bit g128 act-order"
    assert quant.for_module(target("model.layers.1.mlp.gate_proj")) is quant
    assert quant.for_module(target("lm_head", "head")) is None
    assert quant.for_module(target("model.embed_tokens", "embedding")) is None
    with_head = method(**AUTOGPTQ, lm_head=True)
    assert with_head.for_module(target("lm_head", "head")) is with_head
    with pytest.raises(PluginError, match="regular expression"):
        method(**AUTOGPTQ, dynamic={"+:*": {}}).for_module(target("a"))


def test_lists_of_modules_and_the_checkpoint_itself() -> None:
    listed = method(
        **AUTOGPTQ, modules_in_block_to_quantize=[["self_attn.q_proj", "self_attn.k_proj"], ["mlp.up_proj"]]
    )
    assert listed.for_module(target("model.layers.0.mlp.up_proj")) is listed
    assert listed.for_module(target("model.layers.0.mlp.gate_up_proj")) is None
    assert listed.for_module(target("model.layers.0.self_attn.q_proj", "linear", "weight")) is listed  # it is said
    blocks = method(**AUTOGPTQ, block_name_to_quantize="model.layers, model.more")
    assert blocks.for_module(target("model.more.0.x")) is blocks
    assert blocks.for_module(target("vision.layers.0.x")) is None
    plain = method(**AUTOGPTQ)
    assert plain.for_module(target("model.layers.0.gate", "linear", "weight")) is None
    assert plain.for_module(target("model.layers.0.up", "linear", "qweight", "scales")) is plain


def test_auto_round() -> None:
    quant = method(AutoRound, **ROUND)
    assert quant.for_module(target("vision.layers.0.x")) is None
    assert quant.for_module(target("model.layers.0.mlp.gate")) is None
    assert quant.for_module(target("model.layers.0.mlp.gate_proj")) is quant
    labels = {
        "model.layers.0.mlp.experts.0.up_proj": "8 bit g64",
        "model.layers.1.mlp.experts.0.up_proj": "2 bit g32",  # by name before by pattern
    }
    for name, label in labels.items():
        chosen = quant.for_module(target(name))
        assert chosen is not None and chosen.label() == label
    head = quant.for_module(target("lm_head", "head"))
    assert head is not None and head.label() == "8 bit all inputs"
    plain = method(AutoRound, **{key: value for key, value in ROUND.items() if key != "extra_config"})
    assert plain.for_module(target("lm_head", "head")) is None
    assert method(AutoRound, bits=4, packing_format="auto_round").options.checkpoint_format == "gptq_v2"


def test_a_backend_in_place_of_a_packing_format_is_not_guessed_from() -> None:
    """Early exports stored zero points as they are; later ones less one."""
    said = {key: value for key, value in ROUND.items() if key != "packing_format"}
    with pytest.raises(PluginError, match=r"no packing_format, and backend is 'auto_round:exllamav2'"):
        AutoRound.read_config({**said, "backend": "auto_round:exllamav2"})
    assert AutoRound.read_config({**said, "backend": "auto"})


@pytest.mark.parametrize("wrong", [{"packing_format": "auto_round:auto_awq"}, {"act_bits": 8}, {"data_type": "mx_fp"}])
def test_other_kinds_of_auto_round_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(PluginError, match=str(next(iter(wrong.values())))):
        AutoRound.read_config({**ROUND, **wrong})
