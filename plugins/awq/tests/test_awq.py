"""AWQ: the conformance kit, linears that AutoRound wrote and GPTQModel decoded, configurations, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tpkit import CheckpointError, LoadError, PluginError
from tpkit.layers import ColumnParallelLinear, RowParallelLinear
from tpkit.quant import Header, Target
from tpkit.testing import QuantConformance
from tpkit_awq import Awq

DATA = Path(__file__).parent / "data" / "linears.safetensors"
#: the column that each nibble of a word holds, lowest first
COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]


def method(**config: Any) -> Awq:
    return Awq(Awq.Options(**Awq.read_config(config)))


def words(values: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(values.long(), (0, -values.shape[1] % 8)).unflatten(1, (-1, 8))
    found = sum(padded[:, :, column] << (4 * nibble) for nibble, column in enumerate(COLUMNS))
    return torch.where(found >= 1 << 31, found - (1 << 32), found).int()


def columns(packed: torch.Tensor, count: int) -> torch.Tensor:
    found = torch.zeros(packed.shape[0], packed.shape[1] * 8, dtype=torch.int64)
    for nibble, column in enumerate(COLUMNS):
        found[:, column::8] = (packed.long() >> (4 * nibble)) & 15
    return found[:, :count]


class Kit(QuantConformance):
    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        out, in_ = weight.shape
        size = in_ if self.method.options.group_size == -1 else self.method.options.group_size
        group = torch.arange(in_) // size
        scales = (0.2 + torch.rand(-(-in_ // size), out)).half()
        zeros = torch.randint(0, 16, scales.shape) if self.method.options.zero_point else torch.full(scales.shape, 8)
        codes = (weight.t() / scales[group] + zeros[group]).round().clamp(0, 15)
        return {"qweight": words(codes), "qzeros": words(zeros), "scales": scales}

    def decode(self, stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        size = in_ if self.method.options.group_size == -1 else self.method.options.group_size
        group = torch.arange(in_) // size
        zeros = columns(stored["qzeros"], out)[group] if "qzeros" in stored else 8
        return ((columns(stored["qweight"], out) - zeros) * stored["scales"].double()[group]).t().float()


class TestGroups(Kit):
    method = method(bits=4, group_size=16)


class TestOneGroup(Kit):
    method = method(w_bit=4, q_group_size=-1)


class TestWithoutZeroPoints(Kit):
    method = method(bits=4, group_size=12, zero_point=False)
    optional = ("qzeros",)


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
    wanted, quant = tensors.pop("decoded"), method(**NOTES[name])
    row = layer is RowParallelLinear
    flags = {"reduce_results": False} if row else {}
    for given in [tensors] + [{k: t for k, t in tensors.items() if k != "qzeros"}] * (name == "sym"):
        parts = []
        for rank in range(size):
            made = layer(*reversed(wanted.shape), bias=False, quant=quant, tp_rank=rank, tp_size=size, **flags)
            made.load(given)
            parts.append(quant.dequantize(made))
        torch.testing.assert_close(torch.cat(parts, int(row)), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("missing", ["qweight", "qzeros", "scales"])
def test_what_is_missing_is_said(missing: str) -> None:
    tensors = {key: t for key, t in CASES["g32"].items() if key not in ("decoded", missing)}
    made = ColumnParallelLinear(96, 40, bias=False, quant=method(**NOTES["g32"]), tp_rank=0, tp_size=1)
    with pytest.raises(LoadError, match=missing):
        made.load(tensors)


def test_zero_points_that_may_be_a_placeholder_are_refused() -> None:
    tensors = {key: t for key, t in CASES["g32"].items() if key != "decoded"}
    quant = method(**{**NOTES["g32"], "zero_point": False})
    made = ColumnParallelLinear(96, 40, bias=False, quant=quant, tp_rank=0, tp_size=1)
    made.load(tensors)
    with pytest.raises(CheckpointError, match="zero_point is false, and all 15 words of qzeros are 0"):
        made.load({**tensors, "qzeros": tensors["qzeros"] * 0})


# configurations

AUTOAWQ = {
    "bits": 4, "group_size": 128, "modules_to_not_convert": None, "version": "gemm", "zero_point": True,
    "backend": "autoawq", "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None, "modules_to_fuse": None,
}  # fmt: skip
QUANT_CONFIG = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
ROUND = {
    "amp": False, "autoround_version": "0.16.1", "bits": 4, "data_type": "int", "enable_quanted_input": False,
    "group_size": 32, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.up_proj"], "provider": "auto-round",
    "sym": True, "to_quant_block_names": "model.layers", "version": "gemm", "zero_point": False,
}  # fmt: skip
GPTQMODEL = {
    "bits": 4, "checkpoint_format": "gemm", "desc_act": False, "format": "gemm", "group_size": 32, "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:7.6.0"]}, "method": "awq", "pack_dtype": "int32", "sym": False,
    "zero_point": True,
}  # fmt: skip


def test_configs_of_the_known_writers() -> None:
    assert Awq.read_config(AUTOAWQ) == Awq.read_config(QUANT_CONFIG)
    assert Awq.read_config(AUTOAWQ) == {"bits": 4, "group_size": 128, "zero_point": True}
    assert method(**ROUND).options.zero_point is False
    assert method(**GPTQMODEL).label() == "4 bit g32"
    assert method(**{**AUTOAWQ, "group_size": -1}).label() == "4 bit all inputs"


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": "gemv"},
        {"version": "GEMV_FAST"},
        {"format": "llm-awq"},
        {"backend": "llm-awq"},
        {"version": "marlin"},
        {"pack_dtype": "int16"},
        {"method": "gptq"},
        {"q_group_size": 64},
    ],
)
def test_other_layouts_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(PluginError, match=str(next(iter(wrong.values())))):
        Awq.read_config({**AUTOAWQ, **wrong})


@pytest.mark.parametrize("wrong", [{"bits": 8}, {"group_size": 0}, {"dynamic": {"-:x": {}}}])
def test_what_is_not_known_is_left_for_the_options_to_refuse(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        method(**{**AUTOAWQ, **wrong})


def target(name: str, kind: Any = "linear", *stored: str) -> Target:
    return Target(name=name, kind=kind, stored={each: Header(dtype="int32", shape=(1,)) for each in stored})


def test_modules() -> None:
    listed = method(**ROUND)
    assert listed.for_module(target("model.layers.0.mlp.up_proj")) is None
    assert listed.for_module(target("model.layers.1.mlp.up_proj", "linear", "weight")) is listed  # it is said
    assert listed.for_module(target("lm_head", "head")) is None
    plain = Header(dtype="float16", shape=(4, 32))  # stored so, whatever the list calls it
    assert listed.for_module(Target(name="model.layers.1.block_sparse_moe.gate", stored={"weight": plain})) is None
    parts = method(**{**AUTOAWQ, "modules_to_not_convert": ["gate"]})
    assert parts.for_module(target("model.layers.0.block_sparse_moe.gate")) is None
    unsaid = method(**AUTOAWQ)
    assert unsaid.for_module(target("model.layers.0.mlp.gate", "linear", "weight", "bias")) is None
    assert unsaid.for_module(target("model.layers.0.mlp.up_proj", "linear", "qweight")) is unsaid
    assert unsaid.for_module(target("model.layers.0.mlp.up_proj")) is unsaid
    assert unsaid.for_module(target("lm_head", "head", "qweight")) is None
    assert unsaid.for_module(target("model.embed_tokens", "embedding", "weight")) is None
    head = method(**{**GPTQMODEL, "lm_head": True})
    assert head.for_module(target("lm_head", "head", "qweight")) is head
