"""Language models inside multimodal ones: other prefixes, a config below text_config, parts of vision left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import tpkit
from tests.families import Families, Made, Tiny, rewrite, tensors_of
from tests.model.test_families import TOLERANCE, differences
from tests.ranks import Ranks
from tpkit import LoadError


class Wrapper(NamedTuple):
    """A model of several parts, of which one is a family's.

    Attributes:
        family: of the language model.
        architecture, model_type: of the whole.
        prefix: where the language model's ``model`` and ``lm_head`` are found.
        vision: names of tensors of the other parts.
    """

    family: str
    architecture: str
    model_type: str
    prefix: dict[str, str]
    vision: tuple[str, ...]


INSIDE = {"model": "language_model.model", "lm_head": "language_model.lm_head"}
TOWER = ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", "multi_modal_projector.linear_1.bias")
WRAPPERS = {
    "gemma3": Wrapper("gemma3_text", "Gemma3ForConditionalGeneration", "gemma3", INSIDE, TOWER),
    "gemma3-new": Wrapper(
        "gemma3_text", "Gemma3ForConditionalGeneration", "gemma3", {"model": "model.language_model"},
        tuple(f"model.{name}" for name in TOWER),
    ),
    "mistral3": Wrapper("mistral", "Mistral3ForConditionalGeneration", "mistral3", INSIDE, TOWER),
    "llama4": Wrapper(
        "llama4_text", "Llama4ForConditionalGeneration", "llama4", INSIDE,
        ("vision_model.class_embedding", "multi_modal_projector.linear_1.weight"),
    ),
}  # fmt: skip


def tiny(wrapper: Wrapper) -> Tiny:
    return Tiny(family=wrapper.family, heads=9, kv=3, ffn=136, vocab=257, hidden=144, tied="gemma" in wrapper.family)


def moved(tensors: dict[str, torch.Tensor], prefix: dict[str, str]) -> dict[str, torch.Tensor]:
    """Returns the tensors under other prefixes."""
    found = {}
    for name, tensor in tensors.items():
        first, _, rest = name.partition(".")
        found[f"{prefix.get(first, first)}.{rest}"] = tensor
    return found


def wrapped(
    families: Families, wrapper: Wrapper, folder: Path, *, config: bool = True, names: bool = True, vision: bool = True
) -> Made:
    """Returns a model with its config below text_config (`config`), under the wrapper's prefixes (`names`)."""
    made = families.make(tiny(wrapper))
    copied = families.copy(made.tiny, folder)
    tensors = tensors_of(copied)
    tensors = moved(tensors, wrapper.prefix) if names else tensors
    rewrite(copied, tensors | ({name: torch.randn(3, 5) for name in wrapper.vision} if vision else {}))
    if config:
        own = json.loads((copied / "config.json").read_text())
        own.pop("architectures")
        whole = {"architectures": [wrapper.architecture], "model_type": wrapper.model_type, "text_config": own}
        whole |= {"vision_config": {"model_type": "a_tower", "hidden_size": 5, "num_hidden_layers": 1}}
        (copied / "config.json").write_text(json.dumps(whole))
    return Made(made.tiny, copied, made.ids, made.logits)


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=list(WRAPPERS))
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="whole"),
        pytest.param({"config": False, "vision": False}, id="flat-config"),
        pytest.param({"names": False, "vision": False}, id="plain-names", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_logits_are_those_of_the_language_model(
    wrapper: Wrapper, how: dict[str, Any], tp: int, tmp_path: Path, families: Families, ranks: Ranks
) -> None:
    made = wrapped(families, wrapper, tmp_path / "wrapped", **how)
    for found in ranks(tp).run(differences, made):
        assert max(found) < TOLERANCE


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=list(WRAPPERS))
def test_the_description_is_found_and_vision_is_left_out(wrapper: Wrapper, tmp_path: Path, families: Families) -> None:
    made = wrapped(families, wrapper, tmp_path / "wrapped")
    checkpoint = tpkit.open_checkpoint(made.folder)
    plan = tpkit.plan_model(tpkit.load_spec(wrapper.family, config=made.folder), ranks=2, checkpoint=checkpoint)
    assert plan.load.ignored.keys() == set(wrapper.vision)
    for layer in plan.load.layers:  # all of it is read from where the wrapper has it
        assert all(source.name.startswith(tuple(wrapper.prefix.values())) for source in layer.form)


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=list(WRAPPERS))
def test_other_parts_that_nothing_names_are_refused(wrapper: Wrapper, tmp_path: Path, families: Families) -> None:
    made = wrapped(families, wrapper, tmp_path / "wrapped")
    rewrite(made.folder, tensors_of(made.folder) | {"audio_tower.conv1.weight": torch.zeros(2, 2)})
    spec = tpkit.load_spec(wrapper.family, config=made.folder)
    with pytest.raises(LoadError, match=r"audio_tower\.conv1\.weight") as caught:
        tpkit.plan_model(spec, ranks=2, checkpoint=tpkit.open_checkpoint(made.folder))
    assert caught.value.groups.keys() == {"not in the description"}
