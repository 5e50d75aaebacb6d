"""Quantised experts on 1 to 5 real ranks, in one to five groups: the logits of their decoded weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tpkit
from tests.quant.experts import FORMS, PHASES, SHORT, Case, case_of, differences, some_ids, write
from tests.ranks import Ranks

TOLERANCE = 1e-3
EVERY = [("gpt_oss", "mxfp4"), *((family, form) for family in ("mixtral", "qwen3_moe") for form in FORMS)]


def check(case: Case, ranks: Ranks, phases: list[list[range]], groups: tuple[int, ...]) -> None:
    seen: set[tuple[int, int]] = set()
    for found in ranks(5).run(differences, case, phases, groups):
        assert max(found.values()) < TOLERANCE, found
        seen |= found.keys()
    sizes = {len(members) for phase in phases for members in phase}
    assert seen == {(size, ep) for size in sizes for ep in groups if ep <= size}


@pytest.mark.parametrize(("family", "form"), [("mixtral", "fp8_block"), ("qwen3_moe", "ct_int4"), ("gpt_oss", "mxfp4")])
def test_two_and_three_ranks_in_two_groups(family: str, form: str, tmp_path: Path, ranks: Ranks) -> None:
    check(case_of(family, form, tmp_path), ranks, SHORT, (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form"), EVERY)
def test_one_to_five_ranks_in_any_number_of_groups(family: str, form: str, tmp_path: Path, ranks: Ranks) -> None:
    check(case_of(family, form, tmp_path), ranks, PHASES, (1, 2, 3, 4, 5))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_quantised_while_loading(family: str, tmp_path: Path, ranks: Ranks) -> None:
    """Every number of ranks and groups rounds alike: the logits of one rank."""
    folder = write(family, tmp_path / "plain")
    for quant in (
        "online_int8",
        {"method": "online_int4", "group_size": 32},
        {"method": "online_fp8", "block": [32, 32]},
    ):
        spec = tpkit.load_spec(family, config=folder, overrides={"quant": quant})
        logits = tpkit.build(spec, checkpoint=folder, dtype=torch.float32)(some_ids())
        check(Case(family, folder, some_ids(), logits, {"quant": quant}), ranks, PHASES, (1, 2))


def test_a_part_of_every_expert_is_left_out_and_all_of_a_layer_by_their_names(tmp_path: Path, ranks: Ranks) -> None:
    """Gate and up are then parts of their own; what a list says of each expert by name is said of all."""
    down = [f"model.layers.0.mlp.experts.{number}.down_proj" for number in range(7)]
    case = case_of("qwen3_moe", "ct_int4", tmp_path, ["re:.*experts\\.\\d+\\.up_proj", *down])
    plan = tpkit.plan_model(
        tpkit.load_spec("qwen3_moe", config=case.folder), ranks=2, checkpoint=tpkit.open_checkpoint(case.folder)
    )
    experts = "model.layers.0.mlp.experts"
    assert plan.planned[f"{experts}.gate_up_proj"].parts == (
        f"{experts}.gate_up_proj.gate_proj",
        f"{experts}.gate_up_proj.up_proj",
    )
    check(case, ranks, SHORT, (1, 2))


@pytest.mark.parametrize(
    "rule",
    [
        "model.layers.0.mlp.experts.3.down_proj",
        "re:.*\\.3\\.down_proj",
        "re:.*experts\\.[1-6]\\..*",
        "re:.*[3-5]\\.up_proj",
    ],
)
def test_one_expert_alone_cannot_be_left_out(rule: str, tmp_path: Path) -> None:
    case = case_of("qwen3_moe", "ct_int4", tmp_path, [rule])
    spec = tpkit.load_spec("qwen3_moe", config=case.folder)
    with pytest.raises(tpkit.SpecError, match=r"treats expert [13] otherwise than expert 0"):
        tpkit.plan_model(spec, ranks=2, checkpoint=tpkit.open_checkpoint(case.folder))
