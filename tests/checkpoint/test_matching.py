"""Description and checkpoint are compared in both directions, and everything that does not fit is one error."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tpkit.checkpoint.findings
import tpkit.checkpoint.matching
import tpkit.division as division
from tests.families import fuse
from tests.small import CONFIG, description, on_rank, plan, weights, write
from tpkit import CheckpointError, LoadError, SpecError
from tpkit.checkpoint.plan import plan_load
from tpkit.layout import LayerSpec, Source, View
from tpkit.params import In, Out, ParamSpec
from tpkit.partition import Features
from tpkit.report import plan_text

L0, L1 = "model.layers.0", "model.layers.1"


def findings(folder: Path, **options: Any) -> tuple[dict[str, tuple[str, ...]], str]:
    with pytest.raises(LoadError) as caught:
        plan(folder, **options)
    return dict(caught.value.groups), str(caught.value)


def test_everything_that_does_not_fit_is_one_error_in_groups(tmp_path: Path) -> None:
    tensors = weights()
    del tensors[f"{L1}.input_layernorm.weight"], tensors[f"{L0}.self_attn.v_proj.weight"]
    tensors[f"{L0}.mlp.up_proj.weight"] = torch.zeros(63, 32)
    tensors[f"{L0}.mlp.down_proj.weight"] = torch.zeros(32, 64, dtype=torch.int8)
    tensors[f"{L1}.mlp.gate_up_proj.weight"] = torch.zeros(128, 32)
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(64, 32)
    groups, text = findings(write(tmp_path, tensors))
    assert {heading: len(lines) for heading, lines in groups.items()} == {
        "missing": 2,
        "wrong shape": 1,
        "wrong type": 1,
        "stored both fused and apart": 1,
        "not in the description": 2,
    }
    assert str(tmp_path) in text and "llama.yaml" in text
    for needed in (
        "model.layers.1.input_layernorm.weight",
        "v_proj.weight (for model.layers.0.self_attn.qkv_proj.weight)",
        "up_proj.weight is [63, 32] in model.safetensors, model.layers.0.mlp.gate_up_proj needs [64, 32]",
        "down_proj.weight is int8 in model.safetensors, model.layers.0.mlp.down_proj holds float32",
        "model.layers.2.mlp.up_proj.weight float32 [64, 32]",
        "gate_up_proj",
    ):
        assert needed in text, needed


def test_a_name_a_letter_off_is_seen_from_both_sides(tmp_path: Path) -> None:
    tensors = weights()
    tensors["model.nrom.weight"] = tensors.pop("model.norm.weight")
    groups, _ = findings(write(tmp_path, tensors))
    assert "did you mean 'model.nrom.weight'" in groups["missing"][0]
    assert "did you mean 'model.norm.weight'" in groups["not in the description"][0]


def test_long_lists_are_cut_but_counted(tmp_path: Path) -> None:
    tensors = weights() | {f"extra.x{i}.weight": torch.zeros(1) for i in range(50)}
    groups, text = findings(write(tmp_path, tensors))
    assert len(groups["not in the description"]) == 50
    assert "not in the description (50)" in text and "and 30 more kinds" in text and len(text.splitlines()) < 30


def test_what_is_wrong_in_every_layer_is_said_once(tmp_path: Path) -> None:
    _, text = findings(write(tmp_path, {f"x.{name}": t for name, t in weights(num_hidden_layers=8).items()}))
    assert text.count("q_proj.weight (for") == 1 and "self_attn.qkv_proj.weight) (did you mean" in text
    assert "(and 7 more like it)" in text and "missing (21)" in text and len(text.splitlines()) < 30


def test_names_like_it_are_looked_for_only_where_they_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole large model under another prefix must not take an hour to refuse."""
    looked = []
    for module in (tpkit.checkpoint.matching, tpkit.checkpoint.findings):
        monkeypatch.setattr(module, "did_you_mean", lambda *names: looked.append(names) or "")
    groups, _ = findings(
        write(tmp_path, {f"x.{name}": tensor for name, tensor in weights(num_hidden_layers=8).items()})
    )
    assert len(groups["missing"]) == 21 and len(groups["not in the description"]) == 75
    assert len(looked) <= 40


def test_both_forms_of_one_layer_are_named(tmp_path: Path) -> None:
    both = weights() | fuse(weights())
    groups, _ = findings(write(tmp_path, both))
    line = next(line for line in groups["stored both fused and apart"] if f"{L0}.self_attn" in line)
    assert "k_proj" in line and "q_proj" in line and f"{L0}.self_attn.qkv_proj" in line


def test_layers_may_be_stored_in_different_forms(tmp_path: Path) -> None:
    fused = fuse({name: tensor for name, tensor in weights().items() if name.startswith(L0)})
    mixed = fused | {name: tensor for name, tensor in weights().items() if not name.startswith(L0)}
    model, apart = (on_rank(write(tmp_path / str(i), t), 1, 3) for i, t in enumerate((mixed, weights())))
    for name, parameter in apart.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int32, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_a_type_that_needs_a_scale_is_not_cast(dtype: torch.dtype, tmp_path: Path) -> None:
    name = f"{L0}.mlp.down_proj.weight"
    groups, _ = findings(write(tmp_path, weights() | {name: torch.ones(32, 64).to(dtype)}))
    assert set(groups) == {"wrong type"}
    assert name in groups["wrong type"][0] and "quant method" in groups["wrong type"][0]


def test_a_scale_is_never_overlooked(tmp_path: Path) -> None:
    groups, _ = findings(write(tmp_path, weights() | {f"{L0}.mlp.down_proj.weight_scale": torch.ones(1)}))
    assert groups.keys() == {"not in the description"}


# biases ---------------------------------------------------------------------------------------------------------------


def test_a_bias_of_zeros_is_accepted_with_a_note(tmp_path: Path) -> None:
    extra = {f"{L0}.self_attn.o_proj.bias": torch.zeros(32), f"{L1}.self_attn.q_proj.bias": torch.zeros(32)}
    folder = write(tmp_path, weights() | extra)
    planned = plan(folder)
    assert sorted(planned.load.zero) == sorted(extra)
    assert "accepted if they are all zero: 2" in plan_text(planned)
    on_rank(folder, 1, 2)


def test_a_bias_that_would_be_left_out_is_refused(tmp_path: Path) -> None:
    bias = torch.zeros(32)
    bias[7] = 0.5
    folder = write(tmp_path, weights() | {f"{L0}.self_attn.o_proj.bias": bias})
    for rank in range(2):
        with pytest.raises(CheckpointError, match=f"{L0}.self_attn.o_proj.bias in model.safetensors") as caught:
            on_rank(folder, rank, 2)
        assert "1 of its 32 values are not zero" in str(caught.value)


def test_a_bias_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, weights() | {f"{L0}.self_attn.o_proj.bias": torch.full((32,), float("nan"))})
    with pytest.raises(CheckpointError, match="32 of its 32 values are not zero"):
        on_rank(folder)


def test_a_declared_bias_must_be_there(tmp_path: Path) -> None:
    groups, _ = findings(write(tmp_path, attention_bias=True))
    assert len(groups["missing"]) == 8 and "beside it: weight" in groups["missing"][0]


def test_a_bias_of_nothing_is_unexpected(tmp_path: Path) -> None:
    groups, _ = findings(write(tmp_path, weights() | {"model.extra.bias": torch.zeros(4)}))
    assert groups.keys() == {"not in the description"}


# tied heads -----------------------------------------------------------------------------------------------------------

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_tied_without_a_head_shares_the_embedding(tmp_path: Path) -> None:
    model = on_rank(write(tmp_path, tie_word_embeddings=True), 1, 3)
    assert model.get_parameter(HEAD) is model.get_parameter(EMBED)


def test_tied_with_an_equal_head_shares_the_embedding(tmp_path: Path) -> None:
    tensors = weights() | {HEAD: weights()[EMBED].clone()}
    folder = write(tmp_path, tensors, tie_word_embeddings=True)
    for rank in range(3):
        model = on_rank(folder, rank, 3)
        assert model.get_parameter(HEAD) is model.get_parameter(EMBED)
    assert f"{HEAD} is stored though lm_head is tied" in plan_text(plan(folder))


def test_tied_with_another_head_is_refused_by_the_rank_that_sees_it(tmp_path: Path) -> None:
    other = weights()[EMBED].clone()
    other[90] += 1
    folder = write(tmp_path, weights() | {HEAD: other}, tie_word_embeddings=True)
    on_rank(folder, 0, 2)
    with pytest.raises(CheckpointError, match=r"is not equal to the weight of model\.embed_tokens") as caught:
        on_rank(folder, 1, 2)
    text = str(caught.value)
    assert f"{HEAD} in model.safetensors" in text and "tie_word_embeddings to false" in text


def test_tied_with_a_head_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, weights() | {HEAD: torch.zeros(95, 32)}, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"lm_head.weight.*\[95, 32\].*\[96, 32\]"):
        on_rank(folder)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            {"tree.lm_head.disable_tp": True},
            "[96, 32] vocab, whole on every rank and [96, 32] vocab, divided over ranks",
        ),
        (
            {"tree.model.embed_tokens.style": "replicated"},
            "[96, 32] vocab, divided over ranks and [96, 32] replicated, whole on every rank",
        ),
        ({"tree.model.embed_tokens.rows": 100}, "[96, 32] vocab, divided over ranks and [100, 32] vocab"),
    ],
)
def test_a_head_that_cannot_share_the_embedding(overrides: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        plan(write(tmp_path, tie_word_embeddings=True), overrides=overrides)


def test_untied_by_an_override(tmp_path: Path) -> None:
    folder = write(tmp_path, tie_word_embeddings=True)
    write(folder, weights(), tie_word_embeddings=True)
    model = on_rank(folder, overrides={"config.tie_word_embeddings": False})
    assert torch.equal(model.get_parameter(HEAD), weights()[HEAD])


def test_untied_without_a_head_says_what_to_do(tmp_path: Path) -> None:
    tensors = weights()
    del tensors[HEAD]
    groups, text = findings(write(tmp_path, tensors))
    assert groups.keys() == {"missing"} and HEAD in groups["missing"][0]
    assert "tie_word_embeddings" in text


def test_untied_with_a_head_loads_both(tmp_path: Path) -> None:
    model = on_rank(write(tmp_path))
    assert torch.equal(model.get_parameter(HEAD), weights()[HEAD])
    assert torch.equal(model.get_parameter(EMBED), weights()[EMBED])


@pytest.mark.parametrize("tied", [True, False])
def test_the_flag_is_the_text_model_s(tied: bool, tmp_path: Path) -> None:
    text = CONFIG | {"tie_word_embeddings": tied}
    tensors = weights(tie_word_embeddings=tied)
    folder = write(tmp_path, tensors, text_config=text, tie_word_embeddings=not tied)
    model = on_rank(folder)
    assert (model.get_parameter(HEAD) is model.get_parameter(EMBED)) == tied


# what is left out -----------------------------------------------------------------------------------------------------


def test_an_ignore_rule_prints_what_it_drops(tmp_path: Path) -> None:
    extra = {
        f"{L0}.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        f"{L1}.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    planned = plan(write(tmp_path, weights() | extra))
    assert set(planned.load.ignored) == set(extra)
    assert "left out by ignore rules model.layers.*.self_attn.rotary_emb.inv_freq: 2 tensors, 32 B" in plan_text(
        planned
    )
    groups, _ = findings(write(tmp_path / "b", weights() | {"model.rotary_emb.inv_freq": torch.zeros(4)}))
    assert groups.keys() == {"not in the description"}


@pytest.mark.parametrize("rule", ["model.**", "lm_head.*", "model.layers.{num_hidden_layers - 1}.**", "**"])
def test_an_ignore_rule_cannot_cover_a_declared_parameter(rule: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="declared parameter"):
        plan(write(tmp_path), source=description(ignore=[rule]))


def test_layers_beyond_the_last_are_ignored_by_number(tmp_path: Path) -> None:
    folder = write(tmp_path, weights(num_hidden_layers=3))
    planned = plan(folder, source=description(ignore=["model.layers.{num_hidden_layers}.**"]))
    assert len(planned.load.ignored) == 9


# other places and orders on disk --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["model.language_model", "language_model.model", ""])
def test_the_tree_is_found_under_a_prefix(prefix: str, tmp_path: Path) -> None:
    moved = {
        (f"{prefix}.{name.removeprefix('model.')}".removeprefix(".") if name.startswith("model.") else name): tensor
        for name, tensor in weights().items()
    }
    source = description(stored_as=[{"prefix": {"model": prefix}}])
    for number, tensors in enumerate((moved, weights())):
        folder = write(tmp_path / str(number), tensors)
        state = on_rank(folder, source=source).state_dict()
        for name, tensor in fuse(weights()).items():
            assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_weights_stored_transposed(tp: int, tmp_path: Path) -> None:
    words = {"self_attn": ["qkv_proj", "o_proj"], "mlp": ["gate_up_proj", "down_proj"]}
    overrides = {f"tree.model.layers.{m}.{p}.transposed": True for m, names in words.items() for p in names}
    turned = {name: tensor.T.contiguous() if "_proj" in name else tensor for name, tensor in weights().items()}
    folders = write(tmp_path / "a", turned), write(tmp_path / "b", fuse(weights())), write(tmp_path / "c")
    for rank in range(tp):
        wanted = dict(on_rank(folders[2], rank, tp).named_parameters())
        model = on_rank(folders[0], rank, tp, overrides=overrides)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, wanted[name]), name
    groups, _ = findings(folders[0])
    assert all("it looks transposed: say `transposed: true`" in line for line in groups["wrong shape"])
    assert any("down_proj" in line for line in groups["wrong shape"])


# the proof ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bend", "heading", "said"),
    [
        (
            lambda copies: copies[1:],
            "not written exactly once",
            r"on rank 1: [1-9]\d* elements not written, 0 written more",
        ),
        (
            lambda copies: (*copies, copies[0]),
            "not written exactly once",
            r"on rank 1: 0 elements not written, [1-9]\d* written",
        ),
    ],
    ids=["missed", "doubled"],
)
@pytest.mark.parametrize("layer", [f"{L0}.self_attn.qkv_proj", f"{L1}.mlp.down_proj", "model.norm"])
def test_a_plan_that_misses_or_doubles_an_element_is_refused(
    layer: str, bend: Any, heading: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = division.localize

    def wrong(spec: Any, out: Any, in_: Any, form: Any, out_shares: Any, in_shares: Any) -> Any:
        made = right(spec, out, in_, form, out_shares, in_shares)
        first = any(share is not None and share.start == 0 for share in (*out_shares, *in_shares))
        return made if first else replace(made, copies=bend(made.copies))

    folder = write(tmp_path)
    monkeypatch.setattr(division, "localize", wrong)
    groups, text = findings(folder)
    assert any(re.search(f"{layer}.weight {said}", line) for line in groups[heading]), text


def test_a_stored_element_that_no_rank_reads_is_found() -> None:
    """A layout that leaves out two of six rows."""
    side, wide = (Features(name="", unit=4),), (Features(name="", unit=3),)
    source = Source(name="a.b", views=(("", View(0, (4,), (1,))),), size=6)
    params = (("weight", ParamSpec("float32", (Out(), In()))),)
    spec = LayerSpec(path="a.b", out=side, in_=wide, forms=((source,),), params=params)
    with pytest.raises(LoadError, match=r"6 elements of a\.b\.weight"):
        plan_load(division.divide_layers([(spec, (source,))], 2), [], 2, None)
