"""What quant methods may do with a layer once it is loaded, and when: repack, drop, hold, load again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tpkit
from tests.quant.methods import Rows, quantised, registry
from tests.small import description, weights, write
from tpkit.layers import ColumnParallelLinear, ParallelLMHead, RowParallelLinear, VocabParallelEmbedding
from tpkit.quant import Blob, In, LinearSpec, Out, ParamSpec, QuantMethod, Target


class Online(QuantMethod):
    """Rounds rows of a float weight to int8 while loading; a rank gets whole rows, so that all round alike."""

    seen: tuple[str, ...] = ()

    def for_module(self, target: Target) -> QuantMethod | None:
        return self

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        whole = In(per=layer.in_features, cells=layer.in_features)
        return {"weight": ParamSpec(layer.dtype_of("weight", layer.dtype), dims=(Out(), whole))}

    def process_weights_after_loading(self, layer: Any) -> None:
        type(self).seen = (*self.seen, layer.sharded.layer.spec.path)
        scale = layer.weight.abs().amax(1, keepdim=True).float() / 127
        codes = (layer.weight.float() / scale).round().to(torch.int8)
        layer.hold("codes", layer.trim("weight", codes).contiguous())
        layer.hold("scale", scale)
        layer.drop("weight")

    def dequantize(self, layer: Any) -> torch.Tensor:
        return layer.codes * layer.scale  # type: ignore[no-any-return]


def rounded(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax(1, keepdim=True).float() / 127
    return (weight.float() / scale).round() * scale


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_quantising_while_loading_is_the_same_for_any_number_of_ranks(size: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(12, 37), torch.randn(3, 37)
    total = torch.zeros(3, 12)
    for rank in range(size):
        layer = RowParallelLinear(
            37,
            12,
            bias=False,
            quant=Online(),
            reduce_results=False,
            input_is_parallel=False,
            tp_rank=rank,
            tp_size=size,
        )
        layer.load({"weight": weight})
        assert layer.codes.shape[1] == layer.in_features < (38 if size == 1 else 37)
        assert "weight" not in dict(layer.named_parameters())
        total += layer(x)
    torch.testing.assert_close(total, x @ rounded(weight).t(), rtol=1e-5, atol=1e-5)


def test_a_layer_can_be_loaded_again_after_it_was_repacked() -> None:
    torch.manual_seed(0)
    one, two, x = torch.randn(9, 8), torch.randn(9, 8), torch.randn(2, 8)
    layer = ColumnParallelLinear(8, 9, bias=False, quant=Online())
    for weight in (one, two, one):
        layer.load({"weight": weight})
        torch.testing.assert_close(layer(x), x @ rounded(weight).t())
        assert set(dict(layer.named_parameters())) == {"codes", "scale"}


def test_pieces_are_repacked_too() -> None:
    weight = torch.randn(9, 8)
    layer = ColumnParallelLinear(8, 9, bias=False, quant=Online(), tp_rank=1, tp_size=2)
    start = sum(ColumnParallelLinear(8, 9, bias=False, tp_rank=0, tp_size=2).out_sizes)
    layer.load({"weight": weight[start:]}, sharded=True)
    torch.testing.assert_close(layer.quant_method.dequantize(layer), rounded(weight)[start:])


def test_what_is_declared_follows_from_the_stored_headers() -> None:
    layer = ColumnParallelLinear(8, 6, bias=False, quant=Online(), dtype=torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    layer.load({"weight": (weight := torch.randn(6, 8, dtype=torch.float32))})
    torch.testing.assert_close(layer.quant_method.dequantize(layer), rounded(weight))


def test_a_tied_head_computes_with_what_became_of_the_embedding() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(10, 8), torch.randn(2, 8)
    embedding = VocabParallelEmbedding(10, 8, quant=Online())
    head = ParallelLMHead(10, 8, tied=embedding)
    embedding.load({"weight": weight})
    torch.testing.assert_close(head(x), x @ rounded(weight).t())
    torch.testing.assert_close(embedding(torch.tensor([3, 9])), rounded(weight)[[3, 9]])
    assert set(dict(head.named_parameters())) == {"codes", "scale"}
    assert head.codes is embedding.codes


def test_every_layer_is_repacked_before_the_next_is_read(tmp_path: Path) -> None:
    """Only then the memory of what a method drops is free for the layers to come."""
    folder = write(tmp_path, weights())
    found = registry(("online", Online))
    read: list[str] = []

    class Watching(tpkit.checkpoint.MappedReader):
        def read(self, name: str, *rest: Any) -> torch.Tensor:
            read.append(name)
            done = [path for path in Online.seen if path]
            finished.append(len(done))
            return super().read(name, *rest)

    finished: list[int] = []
    Online.seen = ()
    source = description(quant="online")
    spec = tpkit.load_spec(source, config=folder, registry=found)
    model = tpkit.build(spec, checkpoint=folder, registry=found, reader=Watching())
    assert finished[-1] >= 8  # of 10 layers with a method: not all at the end
    assert sorted(set(Online.seen)) == sorted(Online.seen)
    assert model.param_bytes() < 0.35 * sum(t.numel() * 4 for t in weights().values())


def test_parameters_take_no_memory_before_they_are_loaded(tmp_path: Path) -> None:
    folder = write(tmp_path, quantised(), quantization_config={"quant_method": "rows"})
    found = registry()
    spec = tpkit.load_spec("llama", config=folder, registry=found)
    plan = tpkit.plan_model(spec, ranks=1, checkpoint=tpkit.open_checkpoint(folder), registry=found)
    from tpkit.distributed.group import TensorParallel
    from tpkit.model import Model

    model = Model(plan, TensorParallel(rank=0, size=1), torch.device("cpu"), found)
    assert model.model.layers[0].mlp.down_proj.weight.is_meta
    assert not model.model.norm.weight.is_meta


class Blobs(Rows):
    """The scale is a small tensor of any length, handed over per source."""

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        note = ParamSpec("uint8", dims=(Blob(),), stored="weight.note.x__y")
        return {"weight": ParamSpec("int8", dims=(Out(), In())), "note": note}

    def dequantize(self, layer: Any) -> torch.Tensor:
        factors = torch.tensor([held.numel() for held in layer.blobs["note"].values()])
        return layer.weight * factors[layer.segment_of_row()].unsqueeze(1)  # type: ignore[no-any-return]


def test_blobs_and_names_on_disk_with_dots() -> None:
    from tpkit.layers import MergedColumnParallelLinear

    layer = MergedColumnParallelLinear(4, [3, 5], names=["a", "b"], bias=False, quant=Blobs(), tp_rank=1, tp_size=2)
    codes = {"a": torch.randint(-5, 5, (3, 4), dtype=torch.int8), "b": torch.randint(-5, 5, (5, 4), dtype=torch.int8)}
    tensors = {f"{name}.weight": each for name, each in codes.items()}
    tensors |= {
        "a.weight.note.x__y": torch.zeros(2, dtype=torch.uint8),
        "b.weight.note.x__y": torch.zeros(7).to(torch.uint8),
    }
    layer.load(tensors)
    wanted = torch.cat([codes["a"][2:] * 2, codes["b"][3:] * 7])
    assert torch.equal(layer.quant_method.dequantize(layer), wanted)
    del tensors["b.weight.note.x__y"]
    with pytest.raises(tpkit.LoadError, match=r"b\.weight\.note\.x__y"):
        layer.load(tensors)


def test_kernels_are_chosen_by_size_device_dtype_and_cuts() -> None:
    def kernel(in_: int, dtype: torch.dtype = torch.float32, **setting: Any) -> str:
        return ColumnParallelLinear(
            in_, 8, bias=False, quant=Rows(Rows.Options(group=6)), dtype=dtype, **setting
        ).kernel

    assert kernel(48) == "even"
    assert kernel(50) == ""
    rows = [
        RowParallelLinear(
            48, 8, bias=False, quant=Rows(Rows.Options(group=size)), reduce_results=False, tp_rank=0, tp_size=3
        ).kernel
        for size in (16, 48)
    ]
    assert rows == ["even", ""]  # of 48 in one group each rank holds a third


def test_no_attribute_of_a_layer_can_be_the_name_of_a_parameter() -> None:
    """A parameter called output_scale would multiply the output."""
    layers = [
        ColumnParallelLinear(8, 8, tp_rank=0, tp_size=2), RowParallelLinear(8, 8, tp_rank=0, tp_size=2, bias=False),
        VocabParallelEmbedding(8, 8), ParallelLMHead(8, 8), ColumnParallelLinear(8, 8, quant=Rows()),
    ]  # fmt: skip
    own = {name for layer in layers for name in vars(layer) if not name.startswith("_")}
    for name in sorted(own | {"output_scale", "parts", "forward", "load", "hold"}):

        class Named(Rows):
            taken = name

            def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
                return {**super().create_weights(layer), self.taken: ParamSpec("float32", dims=(Out(),))}

        with pytest.raises(tpkit.PluginError, match=f"names a parameter '{name}', which a layer uses itself"):
            ColumnParallelLinear(8, 8, quant=Named())


@pytest.mark.parametrize(
    ("dtype", "value"), [("float32", float("nan")), ("float16", float("inf")), ("float8_e4m3fn", float("nan"))]
)
def test_scales_that_are_no_numbers(dtype: str, value: float) -> None:
    class Scaled(Rows):
        def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
            return {"weight": ParamSpec("int8", dims=(Out(), In())), "scale": ParamSpec(dtype, dims=(Out(),))}

    scale = torch.ones(6)
    scale[3] = value
    layer = ColumnParallelLinear(8, 6, bias=False, quant=Scaled())
    with pytest.raises(tpkit.CheckpointError, match=r"ColumnParallelLinear\.scale: 1 of 6 values on rank 0 are NaN"):
        layer.load({"weight": torch.ones(6, 8, dtype=torch.int8), "scale": scale.to(getattr(torch, dtype))})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_looked_up_has_the_model_s_dtype(dtype: torch.dtype) -> None:
    embedding = VocabParallelEmbedding(10, 8, quant=Online(), dtype=dtype)
    embedding.load({"weight": torch.randn(10, 8)})
    assert embedding(torch.tensor([3, 9])).dtype == dtype


@pytest.mark.parametrize(
    ("kind", "default"), [("int32", 1.5), ("uint8", 300), ("float16", 1e6), ("float32", float("nan")), ("int8", "x")]
)
def test_defaults_that_are_no_values_of_the_type(kind: str, default: Any) -> None:
    with pytest.raises(tpkit.PluginError, match=r"default .*"):
        ParamSpec(kind, dims=(Out(),), default=default)
    with pytest.raises(tpkit.PluginError, match=r"default 1 of a blob"):
        ParamSpec(kind, dims=(Blob(),), default=1)
    with pytest.raises(tpkit.PluginError, match=r"whole numbers"):
        In(pack=2.0)  # type: ignore[arg-type]


def test_a_piece_of_a_fused_tensor_has_one_value_for_all_parts() -> None:
    from tests.quant.formats import fp8_tensor
    from tpkit import Registry
    from tpkit.layers import MergedColumnParallelLinear

    torch.manual_seed(0)
    stored, dense = fp8_tensor(12, 8)
    method = Registry.default().load("quant method", "fp8")()
    layer = MergedColumnParallelLinear(8, [6, 6], bias=False, quant=method, tp_rank=1, tp_size=2)
    stored = {"weight": stored["weight"], "weight_scale": stored["weight_scale"]}
    rows = torch.tensor([3, 4, 5, 9, 10, 11])
    layer.load({"weight": stored["weight"][rows], "weight_scale": stored["weight_scale"]}, sharded=True)
    torch.testing.assert_close(layer.quant_method.dequantize(layer), dense[rows])
