"""Scalings of the rotary embedding against transformers' own, in float32."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    Gemma4TextConfig,
    Glm4MoeConfig,
    GlmConfig,
    GptOssConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    MiniMaxM2Config,
    Olmo3Config,
    Phi3Config,
    PhimoeConfig,
    Qwen2VLConfig,
)
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2RotaryEmbedding
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

from tpkit.distributed.group import TensorParallel
from tpkit.errors import SpecError
from tpkit.layers import ForwardContext, Rotary
from tpkit.layers.building import BuildContext
from tpkit.modules import RopeOptions
from tpkit.spec import check_scaling

CPU = torch.device("cpu")
HEAD = 16
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
#: pairs of short and long factors; the short ones are no ones, so that they tell too
SHORT = [1.0 + i / 7 for i in range(HEAD // 2)]
LONG = [2.0 + i * i / 3 for i in range(HEAD // 2)]


def made(head_dim: int = HEAD, **words: Any) -> Rotary:
    """The rotary embedding that a description with these words gives."""
    words["scaling"] = check_scaling(words.get("scaling"))
    options = RopeOptions.model_validate({"pairs": "half", "theta": 10000.0, **words})
    return BuildContext(tp=TensorParallel(), device=CPU).rotary(options, head_dim)


def ours(rotary: Rotary, length: int, past: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    cache: Any = SimpleNamespace(used=past)
    return rotary.angles(ForwardContext(length, CPU, cache), torch.float32)


def theirs(module: Any, length: int, past: int = 0, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the first of the two that turn together."""
    positions = torch.arange(past, past + length)[None]
    cos, sin = module(torch.zeros(1), positions, **more)
    return cos[0], sin[0]


def same(rotary: Rotary, module: Any, length: int, past: int = 0, **more: Any) -> None:
    """Angles are positions times frequencies: what one rounding of a frequency does grows with the position."""
    found, wanted = ours(rotary, length, past), theirs(module, length, past, **more)
    pairs = rotary.dims // 2
    for ours_, theirs_ in zip(found, wanted, strict=True):
        assert theirs_.shape[-1] in (pairs, 2 * pairs)
        torch.testing.assert_close(ours_, theirs_[:, :pairs], rtol=1e-5, atol=1e-6 + (past + length) * 1.5e-7)


def llama(scaling: dict[str, Any], max_length: int = 64) -> LlamaRotaryEmbedding:
    config = LlamaConfig(**SMALL, max_position_embeddings=max_length, rope_parameters={"rope_theta": 1e4, **scaling})
    return LlamaRotaryEmbedding(config)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn, two scales of scores": {"rope_type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn, one scale of scores": {"rope_type": "yarn", **YARN, "mscale": 0.7},
    "yarn, a scale of none": {"rope_type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 0},
    "yarn, its own factor": {"rope_type": "yarn", **YARN, "attention_factor": 1.3},
    "yarn, another ramp": {"rope_type": "yarn", **YARN, "beta_fast": 2.0, "beta_slow": 0.5},
    "yarn, a step": {"rope_type": "yarn", **YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn, not in whole numbers": {"rope_type": "yarn", **YARN, "beta_fast": 2.0, "truncate": False},
    "yarn, factor of the lengths": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str) -> None:
    rotary = made(scaling=KINDS[kind], original_length=None, max_length=64)
    for length, past in ((40, 0), (3, 37), (1, 63)):
        same(rotary, llama(KINDS[kind]), length, past)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "dynamic"])
def test_a_part_of_the_head(kind: str) -> None:
    config = GlmConfig(
        **SMALL,
        head_dim=HEAD,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.5, **KINDS[kind]},
    )
    rotary = made(scaling=KINDS[kind], partial=0.5, theta=500.0, max_length=64)
    assert rotary.dims == 8
    same(rotary, GlmRotaryEmbedding(config), 70)


def test_dynamic_follows_the_length_of_each_pass() -> None:
    rotary, module = made(scaling=KINDS["dynamic"], max_length=64), llama(KINDS["dynamic"])
    plain = made()
    for length, past in ((64, 0), (65, 0), (1, 65), (1, 66), (300, 0), (20, 0), (64, 0)):
        same(rotary, module, length, past)
        longer = length + past > 64
        assert torch.equal(ours(rotary, length, past)[0], ours(plain, length, past)[0]) is not longer
    assert rotary.turning(300)[0][1] < rotary.turning(65)[0][1] < rotary.turning(64)[0][1]


@pytest.mark.parametrize("alpha", [50.0, 1000.0])
def test_a_fixed_base_of_dynamic(alpha: float) -> None:
    scaling = {"alpha": alpha, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = HunYuanDenseV1Config(
        **SMALL,
        head_dim=HEAD,
        max_position_embeddings=64,
        rope_parameters={"type": "dynamic", "rope_theta": 1e4, **scaling},
    )
    rotary = made(scaling={"type": "dynamic", **scaling})
    for length in (20, 100):
        same(rotary, HunYuanDenseV1RotaryEmbedding(config), length)


def longrope(extra: dict[str, Any], max_length: int = 64) -> Phi3RotaryEmbedding:
    given = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, **extra}
    return Phi3RotaryEmbedding(
        Phi3Config(
            **SMALL,
            max_position_embeddings=max_length,
            original_max_position_embeddings=16,
            rope_parameters={"rope_theta": 1e4, **given},
            pad_token_id=0,
        )
    )


@pytest.mark.parametrize("extra", [{}, {"factor": 8.0}, {"attention_factor": 1.4}])
@pytest.mark.parametrize("max_length", [64, 16])
def test_longrope_takes_the_long_factors_beyond_the_original_length(extra: dict[str, Any], max_length: int) -> None:
    scaling = {"type": "su", "short_factor": SHORT, "long_factor": LONG, **extra}
    rotary, module = made(scaling=scaling, original_length=16, max_length=max_length), longrope(extra, max_length)
    for length, past in ((16, 0), (17, 0), (1, 15), (1, 16), (4, 30), (5, 0)):
        same(rotary, module, length, past)
    assert rotary.turning(16)[0] is rotary.frequencies
    assert rotary.turning(17)[0] is rotary.long_frequencies


def test_longrope_with_a_factor_for_each_length() -> None:
    scaling = {
        "type": "longrope", "short_factor": SHORT, "long_factor": LONG, "short_mscale": 1.1, "long_mscale": 1.3,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    config = PhimoeConfig(**SMALL, max_position_embeddings=64, rope_parameters={"rope_theta": 1e4, **scaling})
    rotary = made(scaling=scaling)
    same(rotary, PhimoeRotaryEmbedding(config), 16)
    # transformers takes the short factors in long passes of this family, its authors' code the long ones
    positions = torch.arange(17)[:, None] * rotary.turning(17)[0]
    torch.testing.assert_close(ours(rotary, 17)[0], positions.cos() * 1.3)


def test_families_of_yarn() -> None:
    scaling = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
               "original_max_position_embeddings": 4096}  # fmt: skip
    config = GptOssConfig(head_dim=64, rope_parameters={"rope_theta": 150000.0, **scaling})
    same(made(64, scaling=scaling, theta=150000.0), GptOssRotaryEmbedding(config), 50, 9)
    scaling = {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2079441541679836, "beta_fast": 32,
               "beta_slow": 1, "original_max_position_embeddings": 8192}  # fmt: skip
    config = Olmo3Config(**{**SMALL, "num_hidden_layers": 4}, rope_scaling=scaling, rope_theta=500000)
    module = Olmo3RotaryEmbedding(config)
    same(made(scaling=scaling, theta=500000.0), module, 50, 9, layer_type="full_attention")
    same(made(scaling=None, theta=500000.0), module, 50, 9, layer_type="sliding_attention")


def test_only_some_pairs_of_a_whole_head_turn() -> None:
    ropes = {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = Gemma4TextConfig(**SMALL, head_dim=HEAD, global_head_dim=32, rope_parameters=ropes)
    rotary = made(32, scaling=ropes["full_attention"], partial=0.25, theta=1e6)
    assert rotary.dims == 32 and int((rotary.frequencies != 0).sum()) == 4
    same(rotary, Gemma4TextRotaryEmbedding(config), 50, layer_type="full_attention")
    halved = made(32, scaling={"rope_type": "proportional", "factor": 2.0}, partial=0.25, theta=1e6)
    assert torch.equal(halved.frequencies, rotary.frequencies / 2)


def test_how_many_features_turn() -> None:
    sin, cos = create_sinusoidal_positions(40, 6).chunk(2, dim=-1)
    found = ours(made(dims=6, pairs="interleaved"), 40)
    torch.testing.assert_close(found[0], cos, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], sin, rtol=1e-5, atol=1e-5)
    config = MiniMaxM2Config(**SMALL, head_dim=HEAD, rotary_dim=8)
    same(made(dims=8, theta=config.rope_parameters["rope_theta"]), MiniMaxM2RotaryEmbedding(config), 9)
    config = Glm4MoeConfig(**SMALL, head_dim=12)
    rotary = made(12, partial=0.5, theta=config.rope_parameters["rope_theta"])
    same(rotary, Glm4MoeRotaryEmbedding(config), 9)
    assert made(80, partial=0.4).dims == 32 and made(dims=None).dims == HEAD


def test_sections_are_nothing_to_text() -> None:
    scaling = {"type": "mrope", "mrope_section": [2, 3, 3]}
    config = Qwen2VLConfig(text_config={**SMALL, "rope_scaling": scaling, "rope_theta": 1e4}).text_config
    positions = torch.arange(9)[None, None].expand(3, 1, 9)
    cos, _ = Qwen2VLRotaryEmbedding(config)(torch.zeros(1), positions)
    assert check_scaling(scaling) is None
    torch.testing.assert_close(ours(made(scaling=scaling), 9)[0], cos[0, :, : HEAD // 2])


def test_cosine_and_sine_are_rounded_last() -> None:
    rotary = made(scaling=KINDS["yarn"])
    context = ForwardContext(40, CPU)
    exact = rotary.angles(context, torch.float32)
    for low, high in zip(rotary.angles(context, torch.bfloat16), exact, strict=True):
        assert torch.equal(low, high.bfloat16())
    factor = 1 + 0.1 * torch.log(torch.tensor(4.0))
    torch.testing.assert_close(exact[0][0], factor.expand(HEAD // 2))


def test_frequencies_are_copied_and_no_part_of_the_state() -> None:
    scaling = {"type": "su", "short_factor": SHORT, "long_factor": LONG}
    for rotary in (
        made(scaling=scaling, original_length=16, max_length=64),
        made(scaling=KINDS["dynamic"], max_length=9),
    ):
        assert not rotary.state_dict()
        for twin in (copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary))):
            assert torch.equal(ours(twin, 20)[1], ours(rotary, 20)[1])


LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"scaling": KINDS["dynamic"]}, "'dynamic' has no max_length"),
        ({"scaling": LONGROPE}, "'longrope' has no original_length and no original_max_position_embeddings of its own"),
        ({"scaling": LONGROPE, "original_length": 16}, "'longrope' has no max_length and no factor"),
        ({"scaling": LONGROPE, "original_length": 1, "max_length": 2}, "must be more than 1, not 1"),
        ({"scaling": {"type": "yarn", "factor": 2}}, "'yarn' has no original_length"),
        (
            {"scaling": {"type": "yarn", "original_max_position_embeddings": 16}, "max_length": 8},
            "max_length 8 is less than original_max_position_embeddings 16",
        ),
        (
            {"scaling": {"type": "yarn", **YARN}, "original_length": 32},
            "says original_max_position_embeddings 16, but original_length is 32",
        ),
        ({"dims": 8, "partial": 0.5}, "dims 8 and partial 0.5"),
        ({"dims": 32}, "turns 32 features of a head of 16: dims 32"),
        ({"dims": 7}, "7 of them do not pair up"),
        ({"partial": 1.5}, "less than or equal to 1"),
        (
            {"scaling": {**LONGROPE, "attention_factor": 1.0}, "original_length": 16, "partial": 0.5},
            "short_factor has 8 numbers, but 8 features are turned, 4 pairs",
        ),
        ({"scaling": KINDS["dynamic"], "max_length": 9, "dims": 2}, "needs more than one pair of features to turn"),
        ({"scaling": KINDS["yarn"], "theta": 1.0}, "needs a theta above 1, not 1.0"),
        ({"scaling": {"type": "proportional"}, "partial": 0.1}, "0 pairs turn, of the 8 that 16 features make"),
    ],
)
def test_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        made(**words)
    assert said in str(caught.value)


def test_the_layer_knows_no_other_kind() -> None:
    with pytest.raises(SpecError, match="'foo' is not supported"):
        Rotary(8, 1e4, scaling={"rope_type": "foo"})
