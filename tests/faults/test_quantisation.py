"""Faults of quantised weights: scales that are cut, collapsed, cast away, missing or contradicted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tpkit
from tests.quant.formats import FORMATS, Encoded, Format, Tensors, encode_all, fp8_block, fp8_tensor
from tests.small import on_rank, plan, weights, write
from tpkit import LoadError, PluginError, Registry, SpecError
from tpkit.layers import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from tpkit.quant import QuantMethod

L0 = "model.layers.0"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def method(name: str, **options: Any) -> QuantMethod:
    kind = Registry.default().load("quant method", name)
    return kind(kind.Options(**options))  # type: ignore[no-any-return]


def words(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Packs codes into int32 words along a dimension, lowest bits first."""
    packed = (codes.movedim(dim, -1).unflatten(-1, (-1, 32 // bits)) << (bits * torch.arange(32 // bits))).sum(-1)
    return (packed - (packed >> 31 << 32)).to(torch.int32).movedim(-1, dim).contiguous()


def gptq(out: int, in_: int, bits: int = 4, group: int = 32, g_idx: torch.Tensor | None = None) -> Encoded:
    """Zero points are stored less one."""
    top, groups = 1 << bits, in_ // group
    codes, zeros = torch.randint(0, top, (in_, out)), torch.randint(1, top, (groups, out))
    scales = (torch.rand(groups, out) + 0.1).half()
    order = torch.arange(in_) // group if g_idx is None else g_idx.long()
    stored = {"qweight": words(codes, bits, 0), "qzeros": words(zeros - 1, bits, 1), "scales": scales}
    return stored | ({} if g_idx is None else {"g_idx": g_idx}), ((codes - zeros[order]) * scales.float()[order]).t()


def quantised(form: str, plain: Callable[[str], bool] = lambda stem: False) -> tuple[Tensors, Tensors]:
    """Returns `weights` with all projections in a format but those that are plain; and the same decoded."""
    return encode_all(weights(), lambda stem: FORMATS[form] if "_proj" in stem and not plain(stem) else None)


def exact(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def check(kind: Any, quant: QuantMethod, stored: Tensors, dense: torch.Tensor, tp: int) -> list[Any]:
    """The ranks' shards, which are returned, stand for the dense weight when they are put together."""
    flags, layers = {"reduce_results": False} if kind is RowParallelLinear else {}, []
    for rank in range(tp):
        layers.append(kind(*reversed(dense.shape), bias=False, quant=quant, tp_rank=rank, tp_size=tp, **flags))
        layers[-1].load(stored)
    exact(torch.cat([quant.dequantize(layer) for layer in layers], 1 if flags else 0), dense)
    return layers


def check_parts(layer: Any, parts: dict[str, Encoded], rank: int) -> None:
    """Loads a packed layer from its parts; a rank's shard stands for its rows of each."""
    layer.load({f"{name}.{key}": t for name, (held, _) in parts.items() for key, t in held.items()})
    bounds = layer.sharded.layer.bounds(layer.sharded.layer.spec.out, rank)
    wanted = [dense[a:b] for (_, dense), (a, b) in zip(parts.values(), bounds, strict=True)]
    exact(layer.quant_method.dequantize(layer), torch.cat(wanted))


def check_model(folder: Path, dense: Tensors, tp: int, **how: Any) -> tpkit.Model:
    """Every projection of every rank stands for its part of the dense weights; returns the last rank's model."""
    for rank in range(tp):
        model = on_rank(folder, rank, tp, **how)
        for path, planned in model.plan.planned.items():
            if planned.parts or not planned.spec.in_ or path == "model.embed_tokens":
                continue
            layer: Any = model.get_submodule(path)
            divided, above = layer.sharded.layer, path.partition("_proj")[0].rpartition(".")[0]
            ((left, right),) = divided.bounds(divided.spec.in_, rank)
            wanted = [
                dense[f"{above}.{part.name}_proj.weight" if part.name else f"{path}.weight"][a:b, left:right]
                for part, (a, b) in zip(divided.spec.out, divided.bounds(divided.spec.out, rank), strict=True)
            ]
            exact(layer.quant_method.dequantize(layer), torch.cat(wanted))
    return model


# groups and blocks that ranks cut -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("kind", "out", "in_"), [(RowParallelLinear, 32, 96), (RowParallelLinear, 8, 32), (ColumnParallelLinear, 24, 32)]
)
def test_groups_and_packed_words_that_ranks_cut(kind: Any, out: int, in_: int, tp: int) -> None:
    """Three groups of inputs or one for several ranks, and 24 outputs with their zero points in words of eight."""
    stored, dense = gptq(out, in_)
    assert in_ == 32 or [list(t.shape) for t in stored.values()] == [[12, 32], [3, 4], [3, 32]]
    check(kind, method("gptq", group_size=32), stored, dense, tp)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_inputs_in_activation_order_find_their_group_on_every_rank(tp: int) -> None:
    """Each rank's eight inputs are of any of the four groups."""
    stored, dense = gptq(8, 16, group=4, g_idx=torch.tensor([1, 3, 2, 1, 3, 3, 2, 1, 0, 0, 2, 3, 0, 1, 2, 0]).int())
    layers = check(RowParallelLinear, method("gptq", group_size=4, desc_act=True), stored, dense, tp)
    assert all(torch.equal(layer.scales, stored["scales"]) for layer in layers)


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize(("divided", "block"), [(96, 32), (32, 32), (20, 32), (32, 128)])
def test_blocks_that_ranks_cut(divided: int, block: int, kind: Any, tp: int) -> None:
    """96 in blocks of 32 for two ranks end inside a block; where there is one block all ranks share its scale."""
    out, in_ = (divided, 40) if kind is ColumnParallelLinear else (40, divided)
    stored, dense = fp8_block(out, in_, block)
    layers = check(kind, method("fp8", weight_block_size=[block, block]), stored, dense, tp)
    if divided <= block:
        assert all(torch.equal(layer.weight_scale, stored["weight_scale_inv"]) for layer in layers)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_blocks_of_merged_parts_that_ranks_cut(tp: int) -> None:
    parts = {name: fp8_block(48, 40) for name in ("gate_proj", "up_proj")}
    quant = method("fp8", weight_block_size=[32, 32])
    for rank in range(tp):
        layer = MergedColumnParallelLinear(40, [48, 48], bias=False, quant=quant, tp_rank=rank, tp_size=tp)
        check_parts(layer, parts, rank)


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize(("heads", "block"), [(2, 16), (4, 24), (2, 128)])
def test_rows_of_block_scales_that_straddle_kv_groups(heads: int, block: int, tp: int, tmp_path: Path) -> None:
    """Stripes of q, k, v for each kv head, 24 rows each: three rows of scales, not one for each stripe."""
    fields: dict[str, Any] = {"num_attention_heads": heads, "num_hidden_layers": 1}
    tensors = weights(**fields)
    for part in "qkv":
        del tensors[f"{L0}.self_attn.{part}_proj.weight"]
    stored, fused = fp8_block(8 * heads + 32, 32, block)
    q, k, v = fused.unflatten(0, (2, -1)).split([4 * heads, 8, 8], dim=1)
    dense = tensors | {
        f"{L0}.self_attn.{n}_proj.weight": t.flatten(0, 1) for n, t in zip("qkv", (q, k, v), strict=True)
    }
    tensors |= {f"{L0}.self_attn.qkv_proj.{key}": t for key, t in stored.items()}
    said = FP8 | {"weight_block_size": [block, block]}
    folder = write(tmp_path, tensors, quantization_config=said, **fields)
    word = {"style": "qkv", "fused": {"per": "kv_head", "order": ["q", "k", "v"]}}
    check_model(folder, dense, tp, overrides={"tree.model.layers.self_attn.qkv_proj": word}, dtype=torch.float32)


# scales of parts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_scales_of_parts_are_kept_apart(tp: int) -> None:
    """The largest scale for all three would be wrong by a factor of 5 for q and of 276 for k."""
    made = {"q_proj": torch.randn(32, 32), "k_proj": torch.randn(16, 32) * 0.02, "v_proj": torch.randn(16, 32) * 5}
    parts: dict[str, Encoded] = {}
    for name, weight in made.items():
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        parts[name] = {"weight": codes, "weight_scale": scale}, codes.float() * scale
        assert (parts[name][1] - weight).norm() <= 0.04 * weight.norm()
    for rank in range(tp):
        layer = QKVParallelLinear(32, 8, 4, 2, bias=False, quant=method("fp8"), tp_rank=rank, tp_size=tp)
        check_parts(layer, parts, rank)


# lists of modules -----------------------------------------------------------------------------------------------------

SKIPPED: dict[str, tuple[list[str], Callable[[str], bool]]] = {
    "the fused name": ([".layers.0.mlp.gate_up_proj"], lambda stem: "0.mlp.gate" in stem or "0.mlp.up" in stem),
    "both parts": (["gate_proj", "up_proj"], lambda stem: "gate" in stem or "up" in stem),
    "one part": (["gate_proj"], lambda stem: "gate" in stem),
    "all but o_proj": (["q_proj", "k_proj", "v_proj", "mlp"], lambda stem: "o_proj" not in stem),
    "nothing, and one is plain": ([], lambda stem: stem == f"{L0}.mlp.gate_proj"),
}


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("case", SKIPPED)
def test_what_is_not_quantised_is_never_guessed_from_its_siblings(case: str, tp: int, tmp_path: Path) -> None:
    rules, plain = SKIPPED[case]
    stored, dense = quantised("fp8_tensor", plain)
    folder = write(tmp_path, stored, quantization_config=FP8 | {"modules_to_not_convert": rules})
    check_model(folder, dense, tp, dtype=torch.float32)


@pytest.mark.parametrize("name", ["gate_proj", "gate_up_proj", "mlp", f"{L0}.mlp.gate_proj"])
def test_a_list_that_denies_what_is_stored_is_an_error(name: str, tmp_path: Path) -> None:
    stored, _ = quantised("fp8_tensor")
    folder = write(tmp_path, stored, quantization_config=FP8 | {"modules_to_not_convert": [name]})
    with pytest.raises(LoadError, match=r"0\.mlp\.gate_proj\.weight is float8_e4m3fn in model\S+ \S+ holds float32"):
        plan(folder)


# bytes and scales -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
@pytest.mark.parametrize(
    "name", ["model.norm", f"{L0}.input_layernorm", "model.embed_tokens", "lm_head", f"{L0}.self_attn.o_proj"]
)
def test_bytes_are_not_cast_beside_quantised_modules(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    stored, _ = quantised("fp8_tensor", lambda stem: "mlp" not in stem)
    stored[f"{name}.weight"] = stored[f"{name}.weight"].to(dtype)
    folder = write(tmp_path, stored, quantization_config=FP8)
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(LoadError, match=rf"{name}\.weight is {kind} in model\.safetensors|{name}\.weight_scale"):
        plan(folder)


@pytest.mark.parametrize("said", [{}, {"quantization_config": FP8}])
def test_no_rule_drops_the_scale_of_a_weight(said: dict[str, Any], tmp_path: Path) -> None:
    stored, _ = quantised("fp8_tensor")
    folder = write(tmp_path, stored, **said)
    for rule in ("**.weight_scale", f"{L0}.mlp.down_proj.weight_scale", "**.mlp.*.*"):
        with pytest.raises((SpecError, LoadError), match=r"cannot leave out what belongs|covers .*declared parameter"):
            plan(folder, overrides={"ignore": [rule]})


LOST = [
    ("fp8_tensor", "weight_scale", "scale_weight"), ("fp8_tensor", "weight_scale", None),
    ("fp8_block", "weight_scale_inv", "scale"), ("ct_int4", "weight_scale", "weight_scale_inv"),
    ("nvfp4", "weight_scale", "weight_scale_inv"), ("nvfp4", "weight_scale_2", "weight_scale2"),
    ("gptq_act_order", "scales", "scale"), ("awq", "scales", "weight_scale"), ("nf4", "weight.absmax", "weight.absmx"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "scale", "other"), LOST)
def test_a_scale_that_is_missing_is_named_with_what_lies_beside(
    form: str, scale: str, other: str | None, tmp_path: Path
) -> None:
    chosen, name = FORMATS[form], f"{L0}.mlp.down_proj"
    stored, _ = quantised(form)
    lost = stored.pop(f"{name}.{scale}")
    if other:
        stored[f"{name}.{other}"] = lost
    folder = write(tmp_path, stored, quantization_config={"quant_method": chosen.method, **chosen.config})
    with pytest.raises(LoadError) as caught:
        plan(folder)
    (line,) = caught.value.groups["missing"]
    assert line.startswith(f"{name}.{scale}") and "; beside it: " in line
    assert (other or "weight").rpartition(".")[2] in line.partition(";")[2]
    strangers = " ".join(caught.value.groups.get("not in the description", ()))
    assert bool(other) is (f"{name}.{other} " in strangers)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("which", ["input_scale", "weight_scale"])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_scalars_in_any_shape_of_one_element(tp: int, which: str, kind: Any) -> None:
    """A scalar has no dimension to cut, and a longer vector is not its first element."""
    stored, dense = fp8_tensor(12, 20)
    scalars = {"input_scale": torch.tensor(0.5), "weight_scale": stored["weight_scale"]}
    quant = method("fp8", activation_scheme="static")
    for shape in ((), (1,), (1, 1)):
        check(kind, quant, stored | scalars | {which: scalars[which].reshape(shape)}, dense, tp)
    with pytest.raises(LoadError, match=rf"{which} is \[3\].* needs \[(12, 1)?\]"):
        check(kind, quant, stored | scalars | {which: torch.ones(3)}, dense, tp)


# who says what --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_a_config_that_says_quantised_of_plain_weights_is_an_error(form: str, tmp_path: Path) -> None:
    config = {"quant_method": FORMATS[form].method, **FORMATS[form].config}
    said = (
        r"config\.json quantization_config names a quant method, but no module gets it",
        rf"{L0}\.self_attn\.q_proj is stored as bfloat16 \[32, 32\], config_groups say int4 g32",
        rf"{L0}\.mlp\.down_proj\.\w+; beside it: weight",
    )
    with pytest.raises((SpecError, LoadError, PluginError), match="|".join(said)):
        plan(write(tmp_path, weights(torch.bfloat16), quantization_config=config))


@pytest.mark.parametrize("form", FORMATS)
def test_quantised_weights_of_which_no_config_speaks_are_an_error(form: str, tmp_path: Path) -> None:
    stored, _ = quantised(form)
    with pytest.raises(LoadError, match=r"looks quantised, but nothing says how(.|\n)*--quant"):
        plan(write(tmp_path, stored))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}


@pytest.mark.parametrize(
    ("config", "beside", "quant", "said"),
    [
        (GPTQ, None, "awq", [r"--quant says awq", r"config\.json .*quantization_config says gptq"]),
        (GPTQ, {"quant_algo": "FP8"}, None, ["quantization_config says gptq", r"hf_quant_config\.json says modelopt"]),
        (None, {"quant_algo": "FP8"}, "fp8", ["--quant says fp8", r"hf_quant_config\.json says modelopt"]),
        (GPTQ, None, {"method": "gptq", "bits": 8}, ["gptq bits: --quant says 8", "quantization_config says 4"]),
    ],
)
def test_sources_that_disagree_are_quoted(
    config: Any, beside: Any, quant: Any, said: list[str], tmp_path: Path
) -> None:
    stored, _ = quantised("gptq_act_order")
    for inner in ("", "text_config"):
        folder = write(tmp_path / (inner or "top"), stored)
        whole = json.loads((folder / "config.json").read_text()) | ({"quantization_config": config} if config else {})
        (folder / "config.json").write_text(json.dumps({inner: whole} if inner else whole))
        if beside:
            content = {"producer": {"name": "modelopt", "version": "1"}, "quantization": beside}
            (folder / "hf_quant_config.json").write_text(json.dumps(content))
        with pytest.raises(SpecError, match="disagree") as caught:
            spec = tpkit.load_spec("llama", config=folder, quant=quant)
            tpkit.plan_model(spec, ranks=2, checkpoint=tpkit.open_checkpoint(folder))
        for each in said:
            assert re.search(each, str(caught.value)), each


# bits and groups of their own -----------------------------------------------------------------------------------------


def mixed(wide: Callable[[str], bool]) -> tuple[Tensors, Tensors]:
    """Returns 4 bits in groups of 32, or 8 bits in groups of 16; and the same decoded."""
    forms = [Format("gptq", {}, partial(gptq, bits=bits, group=group)) for bits, group in ((4, 32), (8, 16))]
    return encode_all(weights(), lambda stem: forms[wide(stem)] if "_proj" in stem else None)


def test_bits_and_groups_that_differ_between_layers_and_inside_packed_ones(tmp_path: Path) -> None:
    """Layer 0 has 4 bits in groups of 32, layer 1 8 bits in groups of 16; k_proj of layer 0 is as layer 1."""
    rules = {r"+:.*layers\.1\.": {"bits": 8, "group_size": 16}, r"+:.*0\.self_attn\.k": {"bits": 8, "group_size": 16}}
    stored, dense = mixed(lambda stem: ".1." in stem or "k_proj" in stem)
    folder = write(tmp_path, stored, quantization_config=GPTQ | {"dynamic": rules})
    for tp in (1, 2, 3):
        model = check_model(folder, dense, tp, dtype=torch.float32)
    planned = model.plan.planned
    names = [f"{L0}.self_attn.qkv_proj.{part}" for part in ("q_proj", "k_proj")] + ["model.layers.1.self_attn.qkv_proj"]
    assert [str(planned[name].choice) for name in names] == ["gptq 4 bit g32", "gptq 8 bit g16", "gptq 8 bit g16"]


def test_one_setting_for_layers_that_differ_is_an_error_with_both_sizes(tmp_path: Path) -> None:
    with pytest.raises(LoadError) as caught:
        plan(write(tmp_path, mixed(lambda stem: ".1." in stem)[0], quantization_config=GPTQ))
    said = " ".join(caught.value.groups["wrong shape"])
    assert r"model.layers.1.mlp.down_proj.qweight is [16, 32] in model.safetensors" in said and "needs [8, 32]" in said
    assert "layers.0" not in said
