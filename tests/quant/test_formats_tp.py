"""Formats of real checkpoints on 1 to 5 real ranks: the logits that transformers computes from the decoded weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import tpkit
from tests.families import Families, Tiny, rewrite, tensors_of
from tests.quant.formats import FORMATS, Format, encode_all
from tests.ranks import Ranks

TOLERANCE = 1e-3
#: groups of ranks that work at the same time: every size from 1 to 5 once
PHASES = [[range(5)], [range(4), range(4, 5)], [range(3), range(3, 5)]]
#: 9 query heads in 3 groups; widths that blocks of 32 do not divide on most ranks, ffn by nothing above 16
UNEVEN = Tiny(family="llama", heads=9, kv=3, ffn=176, vocab=257, hidden=144)


@dataclass(frozen=True)
class Case:
    """A quantised checkpoint with its reference."""

    folder: Path
    ids: torch.Tensor
    logits: torch.Tensor
    overrides: dict[str, Any]


def differences(case: Case) -> dict[int, float]:
    """Builds the model on groups of 1 to 5 ranks; returns this rank's largest difference for each size it was in."""
    found = {}
    spec = tpkit.load_spec("llama", config=case.folder, overrides=case.overrides)
    for phase in PHASES:
        groups = [(members, dist.new_group(list(members))) for members in phase]
        group = next(group for members, group in groups if dist.get_rank() in members)
        model = tpkit.build(spec, checkpoint=case.folder, dtype=torch.float32, tp=group)
        logits = model(case.ids)
        found[model.tp.size] = float((logits - case.logits).abs().max() / case.logits.abs().max())
    return found


def make(
    families: Families,
    folder: Path,
    choose: Callable[[str], Format | None],
    tiny: Tiny = UNEVEN,
    overrides: dict[str, Any] | None = None,
    **config: Any,
) -> Case:
    from transformers import AutoModelForCausalLM

    plain = families.copy(tiny, folder / "dense")
    stored, dense = encode_all(tensors_of(plain), lambda stem: choose(stem) if "_proj" in stem else None)
    rewrite(plain, dense)
    quantised = rewrite(families.copy(tiny, folder / "quantised"), stored, quantization_config=config)
    ids = families.make(tiny).ids
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
        return Case(quantised, ids, model(ids).logits, overrides or {})


def check(case: Case, ranks: Ranks) -> None:
    sizes: set[int] = set()
    for found in ranks(5).run(differences, case):
        assert max(found.values()) < TOLERANCE, found
        sizes |= found.keys()
    assert sizes == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_decoded_weights(name: str, tmp_path: Path, families: Families, ranks: Ranks) -> None:
    form = FORMATS[name]
    check(make(families, tmp_path, lambda stem: form, quant_method=form.method, **form.config), ranks)


def test_methods_mixed_per_layer_and_inside_packed_modules(tmp_path: Path, families: Families, ranks: Ranks) -> None:
    """config.json says compressed-tensors for some parts; the description names another method for other modules."""
    others = {
        "o_proj": FORMATS["awq"], "gate_proj": FORMATS["gptq_act_order"], "up_proj": FORMATS["gptq_act_order"],
        "down_proj": FORMATS["fp8_block"],
    }  # fmt: skip

    def choose(stem: str) -> Format | None:
        if stem.endswith("0.self_attn.v_proj") or "1.self_attn.q_proj" in stem:
            return None
        return others.get(stem.rpartition(".")[2], FORMATS["ct_int4"])

    words = {
        "self_attn.o_proj": {"method": "awq", "group_size": 32},
        "mlp.gate_up_proj": {"method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False,
                             "checkpoint_format": "gptq_v2"},
        "mlp.down_proj": {"method": "fp8", "weight_block_size": [32, 32]},
    }  # fmt: skip
    form = FORMATS["ct_int4"]
    config = {
        **form.config,
        "ignore": ["lm_head", "re:.*layers\\.0\\.self_attn\\.v_proj", "model.layers.1.self_attn.q_proj"],
    }
    overrides = {f"tree.model.layers.{path}.quant": word for path, word in words.items()}
    case = make(families, tmp_path, choose, overrides=overrides, quant_method=form.method, **config)
    check(case, ranks)


def test_quantised_while_loading(tmp_path: Path, families: Families, ranks: Ranks) -> None:
    """Every number of ranks rounds alike: the logits of one rank."""
    folder = families.copy(UNEVEN, tmp_path / "plain")
    ids = families.make(UNEVEN).ids
    for quant in (
        "online_int8",
        {"method": "online_int4", "group_size": 32},
        {"method": "online_fp8", "block": [32, 32]},
    ):
        spec = tpkit.load_spec("llama", config=folder, overrides={"quant": quant})
        reference = tpkit.build(spec, checkpoint=folder, dtype=torch.float32)(ids)
        check(Case(folder, ids, reference, {"quant": quant}), ranks)


def test_nothing_below_a_quantised_projection_may_be_missing(tmp_path: Path, families: Families) -> None:
    for name, form in FORMATS.items():
        stored, _ = encode_all(
            tensors_of(families.make(UNEVEN).folder), lambda stem, form=form: form if "_proj" in stem else None
        )
        folder = rewrite(
            families.copy(UNEVEN, tmp_path / name), quantization_config={"quant_method": form.method, **form.config}
        )
        for lost in [key for key in stored if "layers.1.mlp.down_proj" in key and "shape" not in key]:
            for file in folder.glob("*.safetensors"):
                file.unlink()
            save_file({k: v.contiguous() for k, v in stored.items() if k != lost}, folder / "model.safetensors")
            spec = tpkit.load_spec("llama", config=folder)
            with pytest.raises(tpkit.TpkitError, match=r"layers\.1\.mlp\.down_proj"):
                tpkit.plan_model(spec, ranks=2, checkpoint=tpkit.open_checkpoint(folder))
