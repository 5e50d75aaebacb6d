"""The router: by property against a formula written out, and against the routers of transformers; experts' products."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tpkit.errors import SpecError
from tpkit.feedforward import RoutingOptions
from tpkit.layers.routing import route


def options(**words: Any) -> RoutingOptions:
    return RoutingOptions(**{"score": "none", "top_k": 2, **words})


# by the formula -------------------------------------------------------------------------------------------------------


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    found = [math.exp(x - top) for x in row]
    return [x / sum(found) for x in found]


EACH: dict[str, Callable[[list[float]], list[float]]] = {
    "none": list, "score": list, "softmax": softmax, "sigmoid": lambda row: [sigmoid(x) for x in row],
}  # fmt: skip


def best(values: dict[int, float], count: int) -> list[int]:
    """Returns the keys of the largest values; a race that rounding may decide is no example."""
    order = sorted(values, key=lambda n: -values[n])
    assume(len(order) == count or values[order[count - 1]] - values[order[count]] > 1e-4)
    return order[:count]


def by_hand(row: list[float], knobs: RoutingOptions, correction: list[float] | None) -> dict[int, float]:
    """Returns the chosen experts of one token and their weights, step by step."""
    scores = EACH[knobs.score](row)
    rank = {n: score + (correction[n] if correction else 0.0) for n, score in enumerate(scores)}
    if knobs.groups is not None and knobs.top_groups is not None:
        size = len(row) // knobs.groups
        members = {g: range(g * size, (g + 1) * size) for g in range(knobs.groups)}
        counted = 1 if knobs.group_score == "max" else 2
        value = {g: sum(sorted((rank[n] for n in each), reverse=True)[:counted]) for g, each in members.items()}
        rank = {n: rank[n] for g in best(value, knobs.top_groups) for n in members[g]}
    chosen = best(rank, knobs.top_k)
    weights = EACH[knobs.weights]([scores[n] for n in chosen])
    if knobs.renormalize:
        weights = [w / sum(weights) for w in weights]
    return {n: w * knobs.scale for n, w in zip(chosen, weights, strict=True)}


SCORES, WEIGHTS = ("softmax", "sigmoid", "none"), ("score", "softmax", "sigmoid")
GROUPS = [
    (None, None, "max"),
    (3, 1, "max"),
    (3, 2, "top2_sum"),
    (6, 4, "max"),
    (12, 5, "top2_sum"),
    (1, 1, "top2_sum"),
]


@st.composite
def tables(draw: Any) -> list[list[float]]:
    """Logits of a few tokens for twelve experts; no two of a token are alike."""
    return [[x / 7 - 6 for x in draw(st.permutations(range(84)))[:12]] for _ in range(draw(st.integers(1, 3)))]


@pytest.mark.parametrize(("score", "weights"), list(product(SCORES, WEIGHTS)))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(tables(), st.sampled_from(GROUPS), st.integers(1, 4), st.booleans(), st.sampled_from([1.0, 2.5]), st.data())
def test_every_knob_does_what_the_formula_says(
    score: str,
    weights: str,
    rows: list[list[float]],
    groups: tuple[int | None, int | None, str],
    top_k: int,
    corrected: bool,
    scale: float,
    data: st.DataObject,
) -> None:
    words = {"score": score, "weights": weights, "top_k": top_k, "scale": scale}
    words |= dict(zip(("groups", "top_groups", "group_score"), groups, strict=True))
    # weights that may be negative can add up to zero: only those of a score are divided by their sum
    words["renormalize"] = (score, weights) != ("none", "score") and data.draw(st.booleans())
    correction = [n * 0.37 % 1 - 0.6 for n in data.draw(st.permutations(range(12)))] if corrected else None
    knobs = options(**words)
    found, chosen = route(torch.tensor(rows), knobs, None if correction is None else torch.tensor(correction))
    assert found.dtype == torch.float32 and chosen.dtype == torch.int64
    for row, w, n in zip(rows, found.tolist(), chosen.tolist(), strict=True):
        wanted = by_hand(row, knobs, correction)
        assert dict(zip(n, w, strict=True)) == pytest.approx(wanted, rel=2e-5, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_computed_in_float32(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]], dtype=dtype)
    weights, chosen = route(logits, options(score="softmax", renormalize=True))
    assert weights.dtype == torch.float32 and chosen.tolist() == [[1, 2]]
    assert weights[0].tolist() == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e)], rel=1e-6)


# of transformers ------------------------------------------------------------------------------------------------------

HIDDEN, EXPERTS = 12, 8


def theirs(name: str, **fields: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Returns a router with random parameters, inputs, and the logits that it computes of them."""
    from transformers import AutoConfig

    module = import_module(f"transformers.models.{name}.modeling_{name}")
    (kind,) = [v for k, v in vars(module).items() if k.lower().endswith("router") and isinstance(v, type)]
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": 3, "num_attention_heads": 4, "num_key_value_heads": 4}
    router = kind(AutoConfig.for_model({"llama4": "llama4_text"}.get(name, name), **sizes, **fields))
    torch.manual_seed(1)
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.data.copy_(torch.randn(tensor.shape))
    x = torch.randn(40, HIDDEN)
    return router, x, torch.nn.functional.linear(x, router.weight, getattr(router, "bias", None))


def dense(weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(weights), EXPERTS).scatter(-1, chosen, weights)


LIMITED = {"n_group": 4, "topk_group": 2, "n_routed_experts": EXPERTS}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": EXPERTS}, {"score": "softmax", "renormalize": True}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": EXPERTS}, {"score": "none", "weights": "softmax"}),
    "granitemoe": ("granitemoe", {"num_local_experts": EXPERTS}, {"score": "none", "weights": "softmax"}),
    "deepseek_v2-greedy": (
        "deepseek_v2", {**LIMITED, "topk_method": "greedy", "routed_scaling_factor": 16.0},
        {"score": "softmax", "scale": 16.0},
    ),
    "deepseek_v2-groups": (
        "deepseek_v2", {**LIMITED, "topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0},
        {"score": "softmax", "groups": 4, "top_groups": 2, "group_score": "max", "scale": 3.0},
    ),
    "deepseek_v3": (
        "deepseek_v3", {**LIMITED, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        {"score": "sigmoid", "groups": 4, "top_groups": 2, "renormalize": True, "scale": 2.5},
    ),
    "deepseek_v3-plain": (
        "deepseek_v3", {**LIMITED, "n_group": 2, "topk_group": 1, "norm_topk_prob": False},
        {"score": "sigmoid", "groups": 2, "top_groups": 1, "scale": 2.5},
    ),
    "glm4_moe": (
        "glm4_moe", {**LIMITED, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
        {"score": "sigmoid", "groups": 4, "top_groups": 2, "renormalize": True, "scale": 1.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "words"), CASES.values(), ids=list(CASES))
def test_experts_and_weights_are_those_of_transformers(
    name: str, fields: dict[str, Any], words: dict[str, Any]
) -> None:
    """Under a correction that makes every score negative as well: whoever loses must not count as zero."""
    router, x, logits = theirs(name, **fields)
    correction = getattr(router, "e_score_correction_bias", None)
    for shift in (0.0,) if correction is None else (0.0, -5.0):
        if correction is not None:
            correction += shift
            assert shift == 0.0 or correction.max() < -1
        with torch.no_grad():
            _, weights, chosen = router(x)
            ours = route(logits, options(top_k=3, **words), correction)
        assert torch.allclose(dense(*ours), dense(weights, chosen), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("top_k", [1, 3])
def test_sigmoid_weights_of_the_best_logits_are_those_of_transformers(top_k: int) -> None:
    router, x, logits = theirs("llama4", num_local_experts=EXPERTS)
    router.top_k = top_k
    with torch.no_grad():
        ours = route(logits, options(top_k=top_k, weights="sigmoid", apply_to="input"))
        assert torch.allclose(dense(*ours), router(x)[0], rtol=1e-5, atol=1e-7)


def test_a_correction_without_groups_is_that_of_transformers() -> None:
    router, x, logits = theirs("minimax_m2", num_local_experts=EXPERTS)
    correction = torch.randn(EXPERTS)
    with torch.no_grad():
        _, weights, chosen = router(x, correction)
        ours = route(logits, options(top_k=3, score="sigmoid", renormalize=True), correction)
        assert torch.allclose(dense(*ours), dense(weights, chosen), rtol=1e-5)


# what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"groups": 2}, "groups 2 and top_groups None: give both, or neither"),
        ({"top_groups": 2}, "groups None and top_groups 2: give both, or neither"),
        ({"groups": 2, "top_groups": 3}, "top_groups 3 of 2 groups"),
        ({"groups": 0, "top_groups": 0}, "greater than 0"),
        ({"score": "tanh"}, "softmax"),
        ({"top_k": 0}, "greater than 0"),
        ({"apply_to": "router"}, "output"),
    ],
)
def test_knobs_that_contradict_each_other_are_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        options(**words)


@pytest.mark.parametrize(
    ("words", "experts", "said"),
    [
        ({"groups": 3, "top_groups": 1}, 8, "8 experts do not come in 3 groups of equal size"),
        ({"top_k": 9}, 8, "top_k 9, but a token chooses among 8 of 8 experts"),
        ({"top_k": 3, "groups": 4, "top_groups": 1}, 8, "top_k 3, but a token chooses among 2 of 8 experts"),
    ],
)
def test_knobs_that_do_not_fit_the_experts_are_refused(words: dict[str, Any], experts: int, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        options(**words).check(experts)
