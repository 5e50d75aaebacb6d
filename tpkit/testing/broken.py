"""Quant methods with one fault each, and the reason for which the kit must refuse them: the tests of the kit itself.

The two of `tpkit.testing.sound` store weights as most formats do; every class here changes one thing of them.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from pydantic import BaseModel
from torch.nn.functional import linear

from tpkit.quant import LinearSpec, ParamSpec, QuantMethod, QuantOptions, Segment
from tpkit.quant.codes import unpack
from tpkit.testing.conformance import QuantConformance
from tpkit.testing.sound import GROUP, PerTensor, PerTensorTest, Words, WordsTest

__all__ = ["BROKEN", "SOUND"]

# what it declares


class AnswersInTurn(Words):
    """Remembers what it was asked, and answers otherwise the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        self.asked.append(layer.name)
        specs = super().create_weights(layer)
        return specs if len(self.asked) % 2 else dict(reversed(specs.items()))


class LenientOptions(Words):
    """Takes any option, so that a misspelt one changes nothing."""

    class Options(BaseModel):
        group_size: int = GROUP


class HoldsAFunction(Words):
    """Cannot go to a spawned rank."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = lambda codes: codes.float() - 128


class ReadsTheEnvironment(Words):
    """Cuts by itself, by the rank that a launcher tells."""

    def dequantize(self, layer: Any) -> torch.Tensor:
        return super().dequantize(layer).roll(int(os.environ.get("RANK", "0")), 0)


class TakesAnyType(PerTensor):
    """Declares whatever type the file has, a float's bytes under an integer's name too."""

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        header = layer.header("scale")
        specs = super().create_weights(layer)
        return {**specs, "scale": ParamSpec(header.dtype if header else "float32", dims=(Segment(),))}


class ScaleOfOne(PerTensor):
    """Takes a checkpoint without scales for one whose scales are 1."""

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        specs = super().create_weights(layer)
        return {**specs, "scale": ParamSpec(specs["scale"].dtype, dims=(Segment(),), default=1.0)}


class RoundsScales(Words):
    """Holds scales in half precision, whatever a checkpoint has."""

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        specs = super().create_weights(layer)
        return {**specs, "scales": ParamSpec("float16", dims=specs["scales"].dims)}


class ScalesInTheModelsDtype(Words):
    """Rounds stored scales to bfloat16 in bfloat16 models."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if layer.sharded.dtype == "bfloat16":
            layer.hold("scales", layer.scales.to(torch.bfloat16))


# what it computes


class FirstScale(PerTensor):
    """Takes q's scale for k and v."""

    def dequantize(self, layer: Any) -> torch.Tensor:
        weight: torch.Tensor = layer.weight.float() * layer.scale.float()[0]
        return weight


class FromTheFirstBlock(Words):
    """Repeats scales from the start of the shard: right where cuts fall between groups."""

    def dequantize(self, layer: Any) -> torch.Tensor:
        codes = layer.trim("qweight", unpack(layer.qweight, 8)).float() - 128
        weight: torch.Tensor = codes * layer.scales.float().repeat_interleave(GROUP, 1)[:, : layer.in_features]
        return weight


class KeepsNeighbours(Words):
    """Takes the first elements of the words for its own."""

    def dequantize(self, layer: Any) -> torch.Tensor:
        codes = unpack(layer.qweight, 8)[:, : layer.in_features].float() - 128
        weight: torch.Tensor = codes * layer.expand("scales").float()
        return weight


class DropsBias(Words):
    """Forgets the bias."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return super().apply(layer, x, None)


class AddsBiasTwice(Words):
    """Adds the bias for each row of a batch, and once more for the batch."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = super().apply(layer, x, bias)
        return y + bias if bias is not None and x.ndim == 3 else y


class WrongFromSixteenRows(Words):
    """Has a second way, from 16 rows on, that nobody compared with the first."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = self.dequantize(layer)
        if x.numel() // max(x.shape[-1], 1) >= 16:
            weight = weight * 1.1
        return linear(x, weight.to(x.dtype), bias)


class LosesRepeatedIds(Words):
    """Looks up each row once, and gives it to the first that asked."""

    def for_module(self, target: Any) -> QuantMethod | None:
        return self

    def embedding(self, layer: Any, ids: torch.Tensor) -> torch.Tensor:
        rows = super().embedding(layer, ids)
        repeated = torch.zeros(ids.numel(), dtype=torch.bool)
        repeated[1:] = ids.flatten().diff() == 0
        return rows.masked_fill(repeated.view(*ids.shape, 1), 0)


class AlwaysFloat32(Words):
    """Computes in float32 and leaves it at that."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x.float(), self.dequantize(layer), None if bias is None else bias.float())


class ScalesTheInput(PerTensor):
    """Multiplies x in place."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return super().apply(layer, x.mul_(2), None if bias is None else bias * 2) / 2


class KeepsTheDenseWeight(Words):
    """Dequantises once and for all, beside what it was given."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.dense = super().dequantize(layer)

    def dequantize(self, layer: Any) -> torch.Tensor:
        dense: torch.Tensor = layer.dense
        return dense


class ProcessesOnce(PerTensor):
    """Thinks that a layer that was repacked stays so."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if not hasattr(layer, "rows"):
            layer.rows = layer.scale.float()[layer.segment_of_row()]

    def dequantize(self, layer: Any) -> torch.Tensor:
        weight: torch.Tensor = layer.weight.float() * layer.rows.unsqueeze(1)
        return weight


class KeepsScalesItself(PerTensor):
    """Keeps on the method what belongs to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = None

    def process_weights_after_loading(self, layer: Any) -> None:
        self.scale = layer.scale.float()[layer.segment_of_row()]

    def dequantize(self, layer: Any) -> torch.Tensor:
        weight: torch.Tensor = layer.weight.float() * self.scale.unsqueeze(1)
        return weight


class OneScaleForAllExperts(PerTensor):
    """Keeps scales under the names of layers: all experts of one have the same."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: dict[Any, torch.Tensor] = {}

    def process_weights_after_loading(self, layer: Any) -> None:
        self.scales[layer.sharded.linear.name or id(layer)] = layer.scale.float()[layer.segment_of_row()]

    def dequantize(self, layer: Any) -> torch.Tensor:
        weight: torch.Tensor = layer.weight.float()
        return weight * self.scales[layer.sharded.linear.name or id(layer)].unsqueeze(1)


class _ForgivingOptions(QuantOptions):
    bits: int = 8


class IgnoresTheConfig(Words):
    """Picks from config.json what it knows, and never sees the rest."""

    Options = _ForgivingOptions

    @classmethod
    def read_config(cls, config: Any) -> dict[str, Any]:
        return {name: config[name] for name in ("bits",) if name in config}


def _tests(made: dict[type[QuantMethod], str]) -> dict[type[QuantConformance], str]:
    found: dict[type[QuantConformance], str] = {}
    for method, reason in made.items():
        base = WordsTest if issubclass(method, Words) else PerTensorTest
        found[type(f"{method.__name__}Test", (base,), {"method": method(), "__module__": __name__})] = reason
    return found


#: classes that the kit must accept
SOUND: tuple[type[QuantConformance], ...] = (WordsTest, PerTensorTest)

#: classes that the kit must refuse -> the only reason
BROKEN = _tests(
    {
        AnswersInTurn: "impure",
        LenientOptions: "options",
        IgnoresTheConfig: "options",
        HoldsAFunction: "pickle",
        ReadsTheEnvironment: "rank",
        TakesAnyType: "dtype-accepted",
        ScaleOfOne: "missing-accepted",
        RoundsScales: "stored-dtype",
        ScalesInTheModelsDtype: "stored-dtype",
        FirstScale: "segments",
        FromTheFirstBlock: "expand",
        KeepsNeighbours: "trim",
        DropsBias: "bias",
        AddsBiasTwice: "bias",
        WrongFromSixteenRows: "input-shape",
        LosesRepeatedIds: "embedding",
        AlwaysFloat32: "output-dtype",
        ScalesTheInput: "mutates-input",
        KeepsTheDenseWeight: "resident",
        ProcessesOnce: "reload",
        KeepsScalesItself: "shared-state",
        OneScaleForAllExperts: "shared-state",
    }
)
