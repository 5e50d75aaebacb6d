"""What the top of a tree says is done, and what packs of one name are told apart by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.small import description, on_rank, weights, write
from tpkit.errors import CheckpointError, SpecError


def _tree(**changes: Any) -> dict[str, Any]:
    return description(tree=description()["tree"] | changes)


def test_a_formula_at_the_top_is_computed(tmp_path: Path) -> None:
    folder, ids = write(tmp_path), torch.tensor([[1, 2, 3]])
    plain = on_rank(folder)(ids)
    halved = on_rank(folder, source=_tree(forward=["0.5 * lm_head(model(x))"]))
    torch.testing.assert_close(halved(ids), plain * 0.5)
    torch.testing.assert_close(halved(ids, last_only=True), plain[:, -1:] * 0.5)


def test_repeated_children_stand_in_formulas_by_one_name(tmp_path: Path) -> None:
    folder, ids = write(tmp_path), torch.tensor([[1, 2, 3]])
    tree = description()["tree"]
    model = tree["model"] | {"forward": ["norm(layers(embed_tokens(x)))"]}
    torch.testing.assert_close(on_rank(folder, source=_tree(model=model))(ids), on_rank(folder)(ids))


def test_a_tied_projection_with_a_bias_is_refused(tmp_path: Path) -> None:
    head = description()["tree"]["lm_head"] | {"bias": True}
    with pytest.raises(SpecError, match=r"lm_head: a projection that is tied has no bias of its own"):
        on_rank(write(tmp_path), source=_tree(lm_head=head), overrides={"config.tie_word_embeddings": True})


def test_a_value_beyond_float16_is_told_with_its_tensor(tmp_path: Path) -> None:
    tensors = weights(torch.bfloat16)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = 1e6
    folder = write(tmp_path, tensors)
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight .* 1 values beyond 65504, where float16 ends"
    ):
        on_rank(folder, dtype=torch.float16)
    on_rank(folder, dtype=torch.bfloat16)


def test_an_infinite_weight_stays_what_it_is(tmp_path: Path) -> None:
    tensors = weights(torch.bfloat16)
    tensors["model.norm.weight"][0] = float("inf")
    assert on_rank(write(tmp_path, tensors), dtype=torch.float16).get_parameter("model.norm.weight")[0] == float("inf")


def test_an_index_stands_for_its_folder(tmp_path: Path) -> None:
    names = list(weights())
    folder = write(tmp_path, files=[names[:5], names[5:]])
    model = on_rank(folder)
    import tpkit

    again = tpkit.build(model.spec, checkpoint=folder / "model.safetensors.index.json")
    assert torch.equal(again(torch.tensor([[4]])), model(torch.tensor([[4]])))
