"""The layer against transformers' own, and the plan for many ranks; tests/model/test_recurrent.py has real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tpkit
from tpkit import SpecError

HIDDEN, KERNEL, VOCAB = 20, 3, 11


def described(**conv: Any) -> dict[str, Any]:
    """Returns a model of nothing but the layer between an embedding and a head."""
    mixer = {
        "module": "short_conv",
        "kernel": "kernel",
        "in_proj": {"style": "merged_column", "fused": ["B", "C", "x"], "bias": "bias"},
        "conv": {"style": "column", "bias": "bias", "quant": "none", **conv},
        "out_proj": {"style": "row", "bias": "bias"},
    }
    return {
        "schema": 1,
        "family": "conv",
        "architectures": ["Conv"],
        "model_types": ["conv"],
        "config": {"vocab_size": VOCAB, "hidden_size": HIDDEN, "kernel": KERNEL, "bias": False},
        "tree": {
            "embed": {"module": "embedding", "style": "vocab"},
            "mixer": mixer,
            "head": {"style": "vocab"},
        },
    }


def theirs(bias: bool) -> torch.nn.Module:
    from transformers import Lfm2Config
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    torch.manual_seed(0)
    config = Lfm2Config(
        hidden_size=HIDDEN, conv_L_cache=KERNEL, conv_bias=bias, num_hidden_layers=1, layer_types=["conv"]
    )
    return Lfm2ShortConv(config, 0)


def written(layer: torch.nn.Module, folder: Path, **fields: Any) -> Path:
    """Returns a checkpoint of it whose embedding and head are the identity, as far as they go."""
    tensors = {f"mixer.{name}": tensor.contiguous() for name, tensor in layer.state_dict().items()}
    tensors |= {"embed.weight": torch.randn(VOCAB, HIDDEN), "head.weight": torch.randn(VOCAB, HIDDEN)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "conv", **fields}))
    return folder


@pytest.mark.parametrize("bias", [False, True])
def test_it_computes_what_transformers_does_in_any_pieces(bias: bool, tmp_path: Path) -> None:
    layer = theirs(bias)
    folder = written(layer, tmp_path, bias=bias)
    model = tpkit.build(tpkit.load_spec(described(), config=folder), checkpoint=folder)
    ids = torch.arange(18).reshape(2, 9) * 5 % VOCAB
    with torch.inference_mode():
        wanted = model.head(layer(model.embed(ids)))
        torch.testing.assert_close(model(ids), wanted)
        for sizes in ([9], [1] * 9, [1, 2, 6], [7, 1, 1]):
            cache = model.new_cache(2, 9)
            found = torch.cat([model(piece, cache) for piece in ids.split(sizes, dim=1)], dim=1)
            torch.testing.assert_close(found, wanted)
            assert [tuple(state.shape) for state in cache.states] == [(2, HIDDEN, KERNEL - 1)]


def test_ranks_divide_the_channels(tmp_path: Path) -> None:
    folder = written(theirs(False), tmp_path)
    spec = tpkit.load_spec(described(), config=folder)
    for ranks in (1, 3, 23):  # more than there are channels
        plan = tpkit.plan_model(spec, ranks=ranks, checkpoint=tpkit.open_checkpoint(folder))
        for rank in range(ranks):
            conv, into, out = (plan.layers[f"mixer.{name}"] for name in ("conv", "in_proj", "out_proj"))
            (channels,) = conv.bounds(conv.spec.out, rank)
            assert into.bounds(into.spec.out, rank) == [channels] * 3
            assert out.bounds(out.spec.in_, rank) == [channels]
        assert sum(conv.sizes(conv.spec.out, rank)[0] for rank in range(ranks)) == HIDDEN


def test_a_quantised_convolution_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tpkit_online")
    folder = written(theirs(False), tmp_path)
    spec = tpkit.load_spec(described(quant="online_int8"), config=folder)
    with pytest.raises(SpecError, match=r"mixer\.conv: a convolution is not quantised"):
        tpkit.build(spec, checkpoint=folder)
