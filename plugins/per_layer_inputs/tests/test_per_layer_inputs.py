"""The layers against transformers' own, their plan for many ranks, and what is refused; real ranks are elsewhere."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tpkit
from tpkit import SpecError
from tpkit.layers import ForwardContext
from tpkit_per_layer_inputs.layer import INPUTS

HIDDEN, WIDTH, LAYERS, VOCAB, ROWS = 20, 7, 2, 13, 11
DESCRIPTION: dict[str, Any] = {
    "schema": 1,
    "family": "inputs",
    "architectures": ["Inputs"],
    "model_types": ["inputs"],
    "config": {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "rms_norm_eps": 1e-6, "width": WIDTH,
        "rows": ROWS,
    },
    "tree": {
        "embedding": {
            "module": "per_layer_embedding",
            "inline": True,
            "width": "width",
            "scale": "2 ** -0.5",
            "tokens": {"module": "embedding", "style": "vocab", "scale": "hidden_size ** 0.5"},
            "table": {
                "module": "embedding", "style": "vocab", "rows": "rows", "width": "num_hidden_layers * width",
                "scale": "width ** 0.5",
            },
            "in_proj": {"style": "replicated", "scale": "hidden_size ** -0.5"},
            "norm": {"norm": "rms", "over": "layer"},
        },
        "layers": {
            "repeat": "num_hidden_layers",
            "forward": ["x + own(x)", "scaled(x)"],
            "own": {
                "module": "per_layer_input",
                "width": "width",
                "activation": "gelu_pytorch_tanh",
                "gate_proj": {"style": "column"},
                "out_proj": {"style": "row"},
            },
            "scaled": {"module": "multiply", "inline": True, "layer_scalar": {"role": "factor", "parameter": [1]}},
        },
        "head": {"style": "vocab"},
    },
}  # fmt: skip
OURS = {
    "embed_tokens.weight": "tokens.weight", "embed_tokens_per_layer.weight": "table.weight",
    "per_layer_model_projection.weight": "in_proj.weight", "per_layer_projection_norm.weight": "norm.weight",
}  # fmt: skip


def described(*changes: tuple[str, Any]) -> dict[str, Any]:
    """Returns the description with values set at dotted paths of its tree; ``...`` removes what is there."""
    found = copy.deepcopy(DESCRIPTION)
    for path, value in changes:
        *above, last = path.split(".")
        node = found["tree"]
        for name in above:
            node = node[name]
        if value is ...:
            del node[last]
        else:
            node[last] = value
    return found


def theirs() -> Any:
    """Returns transformers' model whose layers have inputs, with random weights."""
    from transformers import Gemma4TextConfig, Gemma4TextModel

    torch.manual_seed(0)
    config = Gemma4TextConfig(
        hidden_size=HIDDEN, hidden_size_per_layer_input=WIDTH, num_hidden_layers=LAYERS, vocab_size=VOCAB,
        vocab_size_per_layer_input=ROWS, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1, head_dim=4,
        global_head_dim=4, pad_token_id=None,
    )  # fmt: skip
    model = Gemma4TextModel(config).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.ndim:
                tensor.copy_(torch.randn_like(tensor))
    return model


def written(model: Any, folder: Path) -> Path:
    """Returns a checkpoint of what the description has."""
    state = model.state_dict()
    tensors = {ours: state[name] for name, ours in OURS.items()}
    for n in range(LAYERS):
        stem = f"layers.{n}"
        tensors[f"{stem}.own.gate_proj.weight"] = state[f"{stem}.per_layer_input_gate.weight"]
        tensors[f"{stem}.own.out_proj.weight"] = state[f"{stem}.per_layer_projection.weight"]
        tensors[f"{stem}.layer_scalar"] = state[f"{stem}.layer_scalar"]
    tensors["head.weight"] = torch.eye(VOCAB, HIDDEN)
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "inputs"}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(theirs(), tmp_path_factory.mktemp("inputs") / "model")


def built(folder: Path, *changes: tuple[str, Any]) -> Any:
    return tpkit.build(tpkit.load_spec(described(*changes), config=folder), checkpoint=folder)


IDS = torch.arange(10).reshape(2, 5) * 3 % ROWS


def test_inputs_are_those_of_transformers(folder: Path) -> None:
    model, reference = built(folder), theirs()
    context = ForwardContext(IDS.shape[1], IDS.device)
    with torch.inference_mode():
        x = model.embedding(IDS, context)
        embedded = reference.embed_tokens(IDS)
        wanted = reference.project_per_layer_inputs(embedded, reference.get_per_layer_inputs(IDS))
    torch.testing.assert_close(x, embedded)
    assert context.left(INPUTS).shape == (*IDS.shape, LAYERS, WIDTH)
    torch.testing.assert_close(context.left(INPUTS), wanted)


def test_layers_use_their_own_input_as_transformers_does(folder: Path) -> None:
    model, reference = built(folder), theirs()
    with torch.inference_mode():
        x = reference.embed_tokens(IDS)
        inputs = reference.project_per_layer_inputs(x, reference.get_per_layer_inputs(IDS))
        for n, layer in enumerate(reference.layers):
            gated = layer.act_fn(layer.per_layer_input_gate(x)) * inputs[:, :, n]
            x = (x + layer.per_layer_projection(gated)) * layer.layer_scalar
        torch.testing.assert_close(model(IDS), x[..., :VOCAB])


def test_ranks_divide_tables_by_rows_and_inputs_by_features(folder: Path) -> None:
    spec = tpkit.load_spec(described(), config=folder)
    for ranks in (1, 3, 9):  # more than there are features
        plan = tpkit.plan_model(spec, ranks=ranks, checkpoint=tpkit.open_checkpoint(folder))
        for rank in range(ranks):
            gate, back = (plan.layers[f"layers.1.own.{name}"] for name in ("gate_proj", "out_proj"))
            assert gate.bounds(gate.spec.out, rank) == back.bounds(back.spec.in_, rank)
            whole = plan.layers["in_proj"]
            assert whole.sizes(whole.spec.out, rank) == [LAYERS * WIDTH]
        for path, size in (("layers.1.own.gate_proj", WIDTH), ("table", ROWS), ("tokens", VOCAB)):
            layer = plan.layers[path]
            assert sum(layer.sizes(layer.spec.out, rank)[0] for rank in range(ranks)) == size


def test_projections_that_say_disable_tp_are_whole(folder: Path) -> None:
    alone = [(f"layers.own.{name}.disable_tp", True) for name in ("gate_proj", "out_proj")]
    spec = tpkit.load_spec(described(*alone), config=folder)
    plan = tpkit.plan_model(spec, ranks=3, checkpoint=tpkit.open_checkpoint(folder))
    gate = plan.layers["layers.0.own.gate_proj"]
    assert [gate.sizes(gate.spec.out, rank) for rank in range(3)] == [[WIDTH]] * 3


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("embedding.table", ...), "needs a child for its role 'table'"),
        (("embedding.norm", {"norm": "rms", "over": "head"}), "the module around it offers: layer"),
        (("embedding.in_proj.style", "column"), "takes style replicated, not style 'column'"),
        (("layers.own.gate_proj.style", "row"), "takes style column, not style 'row'"),
        (("layers.own.activation", "swiglu"), "'swiglu' is not one of"),
        (("layers.own.index", -1), "index"),
        (("layers.own.width", ...), "needs 'width'"),
        (("layers.scaled.layer_scalar", ...), "needs a child for its role 'factor'"),
    ],
)
def test_descriptions_that_are_not_right(change: tuple[str, Any], problem: str, folder: Path) -> None:
    with pytest.raises(SpecError, match=problem):
        tpkit.load_spec(described(change), config=folder)


TWO = {"parameter": [2], "role": "factor"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("embedding.table.width", WIDTH), r"table: rows of 7 features; as table they have 14"),
        (("embedding.norm", {"norm": "rms"}), "its norm is an rms norm over: layer"),
        (("embedding.norm", {"norm": "layer", "over": "layer", "eps": 1e-6, "bias": False}), "an rms norm"),
        (("layers.own.activation", "child"), "an activation by its name is needed"),
        (("layers.scaled.layer_scalar", TWO), "its factor is a parameter of one number"),
    ],
)
def test_modules_that_cannot_be_made(change: tuple[str, Any], problem: str, folder: Path) -> None:
    spec = tpkit.load_spec(described(change), config=folder)
    with pytest.raises(SpecError, match=problem):
        tpkit.build(spec, dummy_weights=True)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ([("layers.own.index", LAYERS)], "needs input 2, of 7 features; there are 2, of 7"),
        ([("layers.own.width", 6)], "needs input 0, of 6 features; there are 2, of 7"),
        ([("embedding", {"module": "embedding", "rows": "rows"})], "per_layer_inputs, which none before it leaves"),
    ],
)
def test_inputs_that_are_not_there(changes: list[tuple[str, Any]], problem: str, folder: Path) -> None:
    spec = tpkit.load_spec(described(*changes), config=folder)
    model = tpkit.build(spec, dummy_weights=True)
    with pytest.raises(SpecError, match=problem), torch.inference_mode():
        model(IDS)


def test_a_pass_has_one_set_of_inputs(folder: Path) -> None:
    model, context = built(folder), ForwardContext(IDS.shape[1], IDS.device)
    with torch.inference_mode():
        model.embedding(IDS, context)
        with pytest.raises(SpecError, match="two modules of one pass leave per_layer_inputs"):
            model.embedding(IDS, context)
