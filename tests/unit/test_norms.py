"""Norms that stand alone, against torch's own; and words of a norm that mean nothing together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional as F

from tpkit.layers import LayerNorm, RMSNorm
from tpkit.spec.words import LayerNormOptions, NormOptions


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_is_torchs(bias: bool) -> None:
    torch.manual_seed(0)
    norm, x = LayerNorm(12, 1e-3, bias=bias), torch.randn(3, 12)
    torch.nn.init.normal_(norm.weight)
    if bias:
        torch.nn.init.normal_(norm.get_parameter("bias"))
    wanted = F.layer_norm(x, (12,), norm.weight, norm.bias, 1e-3)
    torch.testing.assert_close(norm(x), wanted)


def test_rms_norm_is_torchs() -> None:
    torch.manual_seed(0)
    norm, x = RMSNorm(12, 1e-3), torch.randn(3, 12)
    torch.nn.init.normal_(norm.weight)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (12,), norm.weight, 1e-3))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ({"weight": "per_head"}, "weight: per_head is of a norm over: head"),
        ({"weight": "per_head", "over": "all_heads"}, "weight: per_head is of a norm over: head"),
        ({"after": "rope", "over": "all_heads"}, "after: rope is of a norm over: head"),
        ({"affine": False, "zero_centered": True}, "has neither zero_centered nor weight"),
    ],
)
@pytest.mark.parametrize("kind", [NormOptions, LayerNormOptions])
def test_words_that_mean_nothing_together(kind: type[NormOptions], words: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        kind.model_validate({"norm": "rms", "eps": 1e-5, **words})
