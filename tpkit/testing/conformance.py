"""The test class that a quant method's author derives from, and the same checks without pytest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar
from unittest import SkipTest

import torch

from tpkit.quant import QuantMethod
from tpkit.testing import computing, contract, loading
from tpkit.testing.finding import Finding, told
from tpkit.testing.subject import Subject

__all__ = ["QuantConformance", "check"]


class QuantConformance:
    """Tests of a quant method, inherited by a class whose name begins with ``Test``.

    Attributes:
        method: the instance under test. For several sets of options write several classes.
        dtype: of the models that it is tried in. Give a method with a kernel for one dtype a second class with that.
        step_in, step_out: features are multiples of these, where the format needs it.
        tolerance: largest error allowed, over the largest value; of outputs in a lower dtype the kit allows more.
        resident: bytes that may stay after loading, over the stored ones.
        fused: the format's tensors may hold several parts (gate and up, q, k and v) as one.
        optional: names on disk that may be absent although they change the result (a permutation, a zero point).
        config: a quantization_config, without quant_method, that means the options of `method`.
        dtype_matters: the format itself depends on the model's dtype (scales made while loading are kept in it, say):
            `dequantize` need not return the same weight in models of each dtype.

    Example:
        >>> class TestMine(QuantConformance):
        ...     method = Mine(Mine.Options(bits=4))
        ...     encode, decode = staticmethod(encode), staticmethod(decode)
    """

    method: ClassVar[QuantMethod]
    dtype: ClassVar[torch.dtype] = torch.float32
    step_in: ClassVar[int] = 1
    step_out: ClassVar[int] = 1
    tolerance: ClassVar[float] = 1e-5
    resident: ClassVar[float] = 1.35
    fused: ClassVar[bool] = True
    optional: ClassVar[Sequence[str]] = ()
    config: ClassVar[Mapping[str, Any] | None] = None
    dtype_matters: ClassVar[bool] = False
    _subject: ClassVar[Subject]  # of each class its own

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the tensors, by name on disk, that a checkpoint holds for a float32 weight ``[out, in]``."""
        raise NotImplementedError(f"{type(self).__name__} needs encode(self, weight)")

    def decode(self, stored: dict[str, torch.Tensor], out: int, in_: int) -> torch.Tensor:
        """Returns the weight ``[out, in]`` that stored tensors mean, by other code than the method's own."""
        raise NotImplementedError(f"{type(self).__name__} needs decode(self, stored, out, in_)")

    @classmethod
    def subject(cls) -> Subject:
        """Returns what the checks work on; one for all tests of a class, so that examples are made once."""
        if "_subject" not in cls.__dict__:
            if not hasattr(cls, "method"):
                raise Finding("method", f"{cls.__name__} has no `method`")
            test = cls()
            cls._subject = Subject(
                cls.method,
                test.encode,
                test.decode,
                dtype=cls.dtype,
                step_in=cls.step_in,
                step_out=cls.step_out,
                tolerance=cls.tolerance,
                resident=cls.resident,
                fused=cls.fused,
                optional=cls.optional,
                config=cls.config,
                dtype_matters=cls.dtype_matters,
            )
        made: Subject = cls.__dict__["_subject"]
        return made

    # what it declares

    def test_is_a_method(self) -> None:
        contract.is_a_method(self.subject())

    def test_create_weights_is_pure(self) -> None:
        contract.create_weights_is_pure(self.subject())

    def test_create_weights_needs_no_headers(self) -> None:
        contract.create_weights_needs_no_headers(self.subject())

    def test_for_module_answers(self) -> None:
        contract.for_module_answers(self.subject())

    def test_knows_no_rank(self) -> None:
        contract.knows_no_rank(self.subject())

    def test_options_are_strict(self) -> None:
        contract.options_are_strict(self.subject())

    def test_pickles(self) -> None:
        contract.pickles(self.subject())

    def test_unused_is_unused(self) -> None:
        contract.unused_is_unused(self.subject())

    # what it computes

    def test_one_rank(self) -> None:
        computing.one_rank(self.subject())

    def test_column(self) -> None:
        computing.column(self.subject())

    def test_row(self) -> None:
        computing.row(self.subject())

    def test_merged(self) -> None:
        computing.merged(self.subject())

    def test_merged_fused(self) -> None:
        computing.merged_fused(self.subject())

    def test_qkv(self) -> None:
        computing.qkv(self.subject())

    def test_qkv_fused(self) -> None:
        computing.qkv_fused(self.subject())

    def test_qkv_few_kv_heads(self) -> None:
        computing.qkv_few_kv_heads(self.subject())

    def test_head(self) -> None:
        computing.head(self.subject())

    def test_embedding(self) -> None:
        computing.embedding(self.subject())

    def test_experts(self) -> None:
        computing.experts(self.subject())

    def test_uses_bias(self) -> None:
        computing.uses_bias(self.subject())

    def test_keeps_dtype(self) -> None:
        computing.keeps_dtype(self.subject())

    def test_applies_to_any_shape(self) -> None:
        computing.applies_to_any_shape(self.subject())

    def test_leaves_input_and_weights(self) -> None:
        computing.leaves_input_and_weights(self.subject())

    # what it lets through

    def test_refuses_missing(self) -> None:
        loading.refuses_missing(self.subject())

    def test_refuses_extra(self) -> None:
        loading.refuses_extra(self.subject())

    def test_refuses_other_shapes(self) -> None:
        loading.refuses_other_shapes(self.subject())

    def test_refuses_other_types(self) -> None:
        loading.refuses_other_types(self.subject())

    def test_keeps_stored_dtype(self) -> None:
        loading.keeps_stored_dtype(self.subject())

    def test_loads_again(self) -> None:
        loading.loads_again(self.subject())

    def test_stays_small(self) -> None:
        loading.stays_small(self.subject())


def check(conformance: type[QuantConformance]) -> list[Finding]:
    """Runs the whole kit on a class, without pytest.

    Args:
        conformance: what an author's test class would be.

    Returns:
        what was found, in the order of the tests; empty for a method that keeps the contract.
    """
    findings = []
    for name in [name for name in vars(QuantConformance) if name.startswith("test_")]:
        test: Callable[[], None] = getattr(conformance(), name)
        try:
            test()
        except Finding as finding:
            findings.append(finding)
        except SkipTest:
            continue
        except Exception as error:
            made = Finding("fails", f"{name}: {told(error)}")
            made.__cause__ = error
            findings.append(made)
    return findings
