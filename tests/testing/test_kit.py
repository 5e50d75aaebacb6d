"""The conformance kit: it accepts sound methods, and refuses each broken one for its own reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tpkit.quant import Flat, In, Kernel, LinearSpec, Out, ParamSpec, QuantMethod, Unquantized
from tpkit.quant.codes import unpack
from tpkit.testing import REASONS, Finding, QuantConformance, check, computing
from tpkit.testing.broken import (
    BROKEN,
    SOUND,
    KeepsNeighbours,
    PerTensor,
    PerTensorTest,
    ScalesInTheModelsDtype,
    Words,
    WordsTest,
)
from tpkit.testing.finding import is_raw

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("conformance", SOUND)
def test_sound_methods_are_accepted(conformance: type[QuantConformance]) -> None:
    assert check(conformance) == []


@pytest.mark.parametrize("conformance", BROKEN, ids=lambda c: c.__name__.removesuffix("Test"))
def test_broken_methods_are_refused_for_their_reason(conformance: type[QuantConformance]) -> None:
    found = check(conformance)
    assert {finding.reason for finding in found} == {BROKEN[conformance]}, "\n".join(map(str, found))


@pytest.mark.parametrize("name", ["FirstScale", "FromTheFirstBlock", "KeepsNeighbours", "KeepsScalesItself"])
def test_a_layer_of_experts_alone_shows_faults_of_cuts_and_of_what_is_shared(name: str) -> None:
    conformance = next(test for test in BROKEN if test.__name__ == f"{name}Test")
    with pytest.raises(Finding, match="3 experts") as found:
        computing.experts(conformance.subject())
    assert found.value.reason == BROKEN[conformance]


def test_ten_faults_at_least_are_known() -> None:
    assert len(set(BROKEN.values())) >= 10
    assert set(BROKEN.values()) <= set(REASONS)


# other ways to store


class UnquantizedTest(QuantConformance):
    method = Unquantized()
    dtype_matters = True

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"weight": weight}

    def decode(self, stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        return stored["weight"]


class Running(QuantMethod):
    """Nibbles, and a scale for 64 of them, along the flattened weight."""

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        absmax = ParamSpec("float32", dims=(Flat(block=64),), stored="weight.absmax")
        return {"weight": ParamSpec("uint8", dims=(Flat(pack=2),)), "absmax": absmax}

    def dequantize(self, layer: Any) -> torch.Tensor:
        codes = layer.trim("weight", unpack(layer.weight, 4)).float() - 8
        weight: torch.Tensor = (codes * layer.expand("absmax")).view(layer.out_features, layer.in_features)
        return weight


class RunningTest(QuantConformance):
    method = Running()

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        count = weight.numel()
        codes = torch.randint(0, 256, (-(-count // 2),), dtype=torch.uint8)
        return {"weight": codes, "weight.absmax": torch.rand(-(-count // 64)) + 0.1}

    def decode(self, stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        codes = torch.stack([stored["weight"] & 15, stored["weight"] >> 4], 1).flatten()[: out * in_].double() - 8
        return (codes * stored["weight.absmax"][torch.arange(out * in_) // 64]).view(out, in_)


class Squares(QuantMethod):
    """Blocks of 40 outputs and 32 inputs."""

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        scale = ParamSpec(layer.dtype_of("scale", "float32"), dims=(Out(block=40), In(block=32)))
        return {"weight": ParamSpec("int8", dims=(Out(), In())), "scale": scale}

    def dequantize(self, layer: Any) -> torch.Tensor:
        weight: torch.Tensor = layer.weight.float() * layer.expand("scale").float()
        return weight


class SquaresTest(QuantConformance):
    method = Squares()
    resident = 1.1

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        out, in_ = weight.shape
        scale = torch.rand(-(-out // 40), -(-in_ // 32)) + 0.1
        return {"weight": torch.randint(-9, 9, (out, in_), dtype=torch.int8), "scale": scale}

    def decode(self, stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        rows, columns = torch.arange(out) // 40, torch.arange(in_) // 32
        return stored["weight"] * stored["scale"][rows][:, columns]


class Repacked(Words):
    """Keeps a kernel's own form of the words where cuts are whole, and the stored form elsewhere."""

    kernels = (Kernel(name="rows", in_multiple=4),)

    def process_weights_after_loading(self, layer: Any) -> None:
        if layer.kernel:
            layer.hold("packed", layer.qweight.t().contiguous())
            layer.hold("scales", layer.scales.contiguous())
            layer.drop("qweight")

    def dequantize(self, layer: Any) -> torch.Tensor:
        if not layer.kernel:
            return super().dequantize(layer)
        weight: torch.Tensor = (unpack(layer.packed.t(), 8).float() - 128) * layer.expand("scales").float()
        return weight


class RepackedTest(WordsTest):
    method = Repacked()


class RepackedWrongly(Repacked):
    """Its kernel has another offset."""

    def dequantize(self, layer: Any) -> torch.Tensor:
        return super().dequantize(layer) + (1 if layer.kernel else 0)


class Embeds(PerTensor):
    def for_module(self, target: Any) -> QuantMethod | None:
        return self

    def embedding(self, layer: Any, ids: torch.Tensor) -> torch.Tensor:
        return super().embedding(layer, ids)


class EmbedsTheWrongRows(Embeds):
    def embedding(self, layer: Any, ids: torch.Tensor) -> torch.Tensor:
        return super().embedding(layer, ids - 1)


@pytest.mark.parametrize("conformance", [UnquantizedTest, RunningTest, SquaresTest, RepackedTest])
def test_other_ways_to_store_are_accepted(conformance: type[QuantConformance]) -> None:
    assert [str(finding) for finding in check(conformance)] == []


def reasons(base: type[QuantConformance], **attributes: Any) -> set[str]:
    return {finding.reason for finding in check(type("OtherTest", (base,), attributes))}


def test_a_kernel_is_tried_and_so_is_doing_without() -> None:
    assert reasons(WordsTest, method=RepackedWrongly()) == {"values"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_another_dtype(dtype: torch.dtype) -> None:
    assert reasons(WordsTest, dtype=dtype) == set()
    assert reasons(WordsTest, dtype=dtype, method=KeepsNeighbours()) == {"trim"}


def test_a_format_may_depend_on_the_dtype_of_the_model_if_it_says_so() -> None:
    assert reasons(WordsTest, method=ScalesInTheModelsDtype(), dtype_matters=True) == set()


def test_embeddings_are_tried_where_a_method_takes_them() -> None:
    assert reasons(PerTensorTest, method=Embeds()) == set()
    assert reasons(PerTensorTest, method=EmbedsTheWrongRows()) == {"embedding"}


def test_the_reference_and_the_class_are_checked_too() -> None:
    def encode(self: object, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"weight": weight.to(torch.int8)}

    assert reasons(PerTensorTest, encode=lambda self, weight: [weight]) == {"reference"}
    assert reasons(PerTensorTest, decode=lambda self, stored, out, in_: torch.zeros(out, in_)) == {"reference"}
    assert "names" in reasons(PerTensorTest, encode=encode, decode=lambda self, stored, out, in_: stored["weight"])
    assert reasons(PerTensorTest, method=PerTensor) == {"method"}
    with pytest.raises(Finding, match="no `method`"):
        QuantConformance.subject()


def test_a_size_step_is_respected() -> None:
    seen = set()

    class Watching(WordsTest):
        step_in, step_out = 32, 8

        def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
            seen.update((rows % 8, width % 32) for rows, width in [weight.shape])
            return super().encode(weight)

    assert check(Watching) == []
    assert seen == {(0, 0)}


def test_an_error_that_nobody_meant_is_told_from_one_that_was() -> None:
    from tpkit.errors import PluginError

    wrapped = PluginError("create_weights failed")
    wrapped.__cause__ = KeyError("scales")
    assert is_raw(KeyError("scales"))
    assert is_raw(wrapped)
    assert not is_raw(PluginError("group_size 12 does not divide 64"))


AUTHORS = """
from tpkit.testing.broken import BROKEN, WordsTest
from tpkit.testing.broken import DropsBias

class TestSound(WordsTest):
    pass

class TestDropsBias(WordsTest):
    method = DropsBias()

def test_of_the_author_s_own():
    pass
"""


def test_pytest_collects_the_kit_and_reports_a_finding_shortly(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(AUTHORS)
    flags = [
        "-p",
        "no:tpkit",
        "-p",
        "tpkit.testing.plugin",
        "-p",
        "no:cacheprovider",
        "--strict-markers",
        "-m",
        "conformance",
    ]
    command = [sys.executable, "-m", "pytest", "-q", *flags, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    said = done.stdout
    assert done.returncode == 1, said + done.stderr
    assert "1 failed" in said
    assert "1 deselected" in said
    assert "the bias is not added; it is left out" in said
    assert "what to do: apply adds `bias`" in said
    assert "computing.uses_bias" not in said  # where in the kit it was found is nothing to an author


def test_the_kit_is_imported_when_it_is_used() -> None:
    code = "import sys, tpkit.testing, tpkit.testing.finding; print(sorted({'torch', 'pytest'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
