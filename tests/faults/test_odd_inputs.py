"""Inputs that a stranger tried: each gives the right value, or an error that names what is wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import tpkit
from tests.ranks import Ranks
from tests.small import CONFIG, description, on_rank, weights, write
from tpkit.errors import CheckpointError, PluginError, SpecError, UsageError
from tpkit.layers import (
    ColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    Rotary,
    VocabParallelEmbedding,
)
from tpkit.params import In, LinearSpec, Out, ParamSpec
from tpkit.quant import QuantMethod, Unquantized


def _twice() -> dict[str, Any]:
    tree = description()["tree"]
    layers = tree["model"]["layers"] | {
        "forward": ["x + self_attn(self_attn(input_layernorm(x)))", "x + mlp(post_attention_layernorm(x))"]
    }
    return description(tree=tree | {"model": tree["model"] | {"layers": layers}})


def test_attention_called_twice_works_without_a_cache_and_is_refused_with_one(tmp_path: Path) -> None:
    model, ids = on_rank(write(tmp_path), source=_twice()), torch.tensor([[1, 2, 3]])
    assert model(ids).isfinite().all()
    with pytest.raises(UsageError, match="attention layer 0 is called twice in one pass"):
        model(ids, model.new_cache(1, 8))


@pytest.mark.parametrize("size", [1, 2])
def test_an_embedding_refuses_rows_that_it_does_not_have(size: int) -> None:
    layer = VocabParallelEmbedding(96, 8, tp_rank=0, tp_size=size)
    with pytest.raises(UsageError, match="token ids from -5 to 500; the table has rows 0 to 95"):
        layer(torch.tensor([-5, 500, 3]))


@pytest.mark.parametrize(
    "fields",
    [{"is_causal": False}, {"alibi": True}, {"num_local_experts": 8}, {"qk_layernorm": True}, {"rotary_pct": 0.5}],
)
def test_a_field_that_changes_the_model_and_is_not_read_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"{next(iter(fields))}: is .* changes what the model computes"):
        tpkit.load_spec("llama", config=CONFIG | fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "llama", "architectures": ["GPT2LMHeadModel"]}, "is of llama, GPT2LMHeadModel"),
        (
            {"model_type": None, "architectures": ["MistralForCausalLM"], "sliding_window": 3},
            "is of MistralForCausalLM",
        ),
    ],
)
def test_a_config_json_of_something_else_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        tpkit.load_spec("llama", config=CONFIG | fields)


def test_a_config_json_that_may_be_of_several_models_is_refused() -> None:
    with pytest.raises(SpecError, match="names no model_type"):
        tpkit.load_spec("falcon", config=CONFIG | {"model_type": None, "architectures": ["FalconForCausalLM"]})


def test_an_infinite_field_is_refused() -> None:
    with pytest.raises(SpecError, match="finite"):
        tpkit.load_spec("llama", config=CONFIG | {"rms_norm_eps": float("inf")})


@pytest.mark.parametrize("how", ["changed", "removed", "emptied"])
def test_a_file_that_is_another_one_by_the_time_it_is_read_is_told(how: str, tmp_path: Path) -> None:
    folder = write(tmp_path)
    file, opened = folder / "model.safetensors", tpkit.open_checkpoint(folder)
    if how == "changed":
        write(folder, {**weights(), "x": torch.zeros(3)})
        os.utime(file, ns=(1, 1))
    elif how == "removed":
        file.unlink()
    else:
        file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors (was changed|cannot be read)"):
        opened.check_unchanged()


@pytest.mark.parametrize(("stored", "held"), [(torch.float64, torch.float32), (torch.float32, torch.bfloat16)])
def test_no_conversion_makes_a_value_infinite(stored: torch.dtype, held: torch.dtype) -> None:
    large = {torch.float64: 1e300, torch.float32: 3.4e38}[stored]
    layer = ColumnParallelLinear(2, 2, bias=False, dtype=held, tp_rank=0, tp_size=1)
    values = torch.tensor([[large, float("inf")], [1, 2]], dtype=stored)
    for sharded in (False, True):
        with pytest.raises(CheckpointError, match="1 values beyond"):
            layer.load({"weight": values}, sharded=sharded)


def test_decoding_stops_at_logits_that_are_not_numbers(tmp_path: Path) -> None:
    tensors = weights()
    tensors["model.layers.0.mlp.down_proj.weight"].fill_(float("nan"))
    with pytest.raises(CheckpointError, match="the logits are not numbers"):
        tpkit.generate(on_rank(write(tmp_path, tensors)), [1, 2])


def test_a_norm_that_is_no_number_is_refused_while_loading(tmp_path: Path) -> None:
    tensors = weights()
    tensors["model.norm.weight"][3] = float("nan")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: 1 of 32 values on rank 0 are NaN"):
        on_rank(write(tmp_path, tensors))


def test_a_cache_of_another_model_is_refused(tmp_path: Path) -> None:
    one, other = (
        on_rank(write(tmp_path / "a")),
        on_rank(write(tmp_path / "b", weights(num_hidden_layers=1), num_hidden_layers=1)),
    )
    with pytest.raises(UsageError, match="of another model"):
        one(torch.tensor([[1]]), other.new_cache(1, 4))
    with pytest.raises(UsageError, match=r"length 3\.5"):
        one.new_cache(1, 3.5)  # type: ignore[arg-type]


def test_a_tree_without_a_head_is_refused(tmp_path: Path) -> None:
    tree = {"model": description()["tree"]["model"]}
    config = {k: v for k, v in description()["config"].items() if k != "tie_word_embeddings"}
    tensors = {name: t for name, t in weights().items() if name != "lm_head.weight"}
    with pytest.raises(SpecError, match="one head"):
        on_rank(write(tmp_path, tensors), source=description(tree=tree, config=config))


def _autocast(folder: Path) -> torch.Tensor:
    model = tpkit.build(tpkit.load_spec("llama", config=folder), checkpoint=folder, device="cpu")
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        return model(torch.tensor([[1, 2, 3]])).float()


def test_autocast_with_empty_shards(ranks: Ranks, tmp_path: Path) -> None:
    fields = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 1}
    folder = write(tmp_path, **fields)
    results = ranks(3).run(_autocast, folder)
    assert all(torch.equal(result, results[0]) for result in results) and results[0].isfinite().all()


def test_layers_alone_refuse_what_contradicts_itself() -> None:
    embedding = VocabParallelEmbedding(96, 8, tp_rank=0, tp_size=1)
    for arguments, extra in (((100, 8), {}), ((96, 9), {}), ((96, 8), {"bias": True})):
        with pytest.raises(UsageError, match="cannot share an embedding"):
            ParallelLMHead(*arguments, tied=embedding, **extra)
    with pytest.raises(UsageError, match="no bias"):
        VocabParallelEmbedding(96, 8, bias=True)
    with pytest.raises(ValueError, match="0 groups"):
        QKVParallelLinear(32, 8, 4, 0)
    with pytest.raises(UsageError, match="normalises 32 features, the input has 1"):
        RMSNorm(32)(torch.randn(2, 1))
    with pytest.raises(SpecError, match="pairs 'bogus'"):
        Rotary(8, 1e4, pairs="bogus")  # type: ignore[arg-type]


@pytest.mark.parametrize("split", [[1, 1], [-1], [float("nan")], []])
def test_a_split_is_checked_for_one_rank_too(split: list[float], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a positive weight for each rank"):
        on_rank(write(tmp_path), split=split)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"device": "cuda"}, "no CUDA device"), ({"device": "bogus"}, "bogus"), ({"dtype": "int8"}, "cannot compute")],
)
def test_devices_and_dtypes_that_are_not_there(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    if torch.cuda.is_available() and options.get("device") == "cuda":
        pytest.skip("there is one")
    with pytest.raises(UsageError, match=said):
        on_rank(write(tmp_path), **options)


class _Named(Unquantized):
    name = "tp"

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        return {self.name: ParamSpec(layer.dtype, dims=(Out(), In()))}


class _Raises(QuantMethod):
    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        raise KeyError("oops")


class _Narrow(Unquantized):
    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return super().apply(layer, x, bias)[..., :-1]


@pytest.mark.parametrize("name", ["tp", "sharded", "forward", "load", "training", "_parameters"])
def test_a_plugin_s_parameter_cannot_take_a_name_that_a_layer_uses(name: str) -> None:
    method = _Named()
    method.name = name
    with pytest.raises(PluginError, match=f"names a parameter '{name}'"):
        ColumnParallelLinear(4, 4, bias=False, quant=method)


def test_what_a_plugin_raises_or_returns_is_told_as_its_own() -> None:
    with pytest.raises(PluginError, match=r"create_weights of _Raises failed .* KeyError: 'oops'"):
        ColumnParallelLinear(4, 4, quant=_Raises())
    layer = ColumnParallelLinear(4, 4, bias=False, quant=_Narrow(), tp_rank=0, tp_size=1)
    layer.load({"weight": torch.eye(4)})
    with pytest.raises(PluginError, match=r"apply of _Narrow gave \[2, 3\] for an input of \[2, 4\]; 4 output"):
        layer(torch.zeros(2, 4))


def test_a_child_cannot_have_a_name_that_its_container_uses(tmp_path: Path) -> None:
    tree = description()["tree"]
    renamed = {"plan": tree["model"], "lm_head": {"style": "vocab"}}
    config = {k: v for k, v in description()["config"].items() if k != "tie_word_embeddings"}
    tensors = {name.replace("model.", "plan.", 1): t for name, t in weights().items()}
    with pytest.raises(SpecError, match="a Model uses the name 'plan' itself"):
        on_rank(write(tmp_path, tensors), source=description(tree=renamed, config=config, ignore=[]))
