"""Each rank asks for the bytes it keeps, and for no others; counted by a reader that is not tpkit's."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import tpkit.checkpoint.load
import tpkit.checkpoint.memory
from tests.families import fuse
from tests.small import CONFIG, BoxReader, on_rank, plan, weights, write
from tpkit import CheckpointError
from tpkit.checkpoint.memory import AnonymousMemory

ODD = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 67, "vocab_size": 97}
#: for 2 ranks and for 5: (query heads, kv heads) of each rank
HEADS = {
    2: [((0, 4), (0, 2)), ((4, 6), (2, 3))],
    5: [((0, 1), (0, 1)), ((1, 2), (0, 1)), ((2, 3), (1, 2)), ((3, 4), (1, 2)), ((4, 6), (2, 3))],
}
#: (ffn, vocabulary)
RUNS = {
    2: [((0, 34), (0, 49)), ((34, 67), (49, 97))],
    5: [((0, 14), (0, 20)), ((14, 28), (20, 40)), ((28, 41), (40, 59)), ((41, 54), (59, 78)), ((54, 67), (78, 97))],
}


def elements(rows: tuple[int, int], columns: tuple[int, int]) -> set[tuple[int, ...]]:
    return set(product(range(*rows), range(*columns)))


def wanted(tp: int, rank: int) -> dict[str, set[tuple[int, ...]]]:
    """Which elements of layer 0 and of the vocabulary a rank needs."""
    (q, kv), (ffn, vocab) = HEADS[tp][rank], RUNS[tp][rank]
    heads, groups, every = (q[0] * 8, q[1] * 8), (kv[0] * 8, kv[1] * 8), (0, 32)
    layer = "model.layers.0"
    return {
        f"{layer}.self_attn.q_proj.weight": elements(heads, every),
        f"{layer}.self_attn.k_proj.weight": elements(groups, every),
        f"{layer}.self_attn.v_proj.weight": elements(groups, every),
        f"{layer}.self_attn.o_proj.weight": elements(every, heads),
        f"{layer}.mlp.gate_proj.weight": elements(ffn, every),
        f"{layer}.mlp.up_proj.weight": elements(ffn, every),
        f"{layer}.mlp.down_proj.weight": elements(every, ffn),
        f"{layer}.input_layernorm.weight": {(i,) for i in range(32)},
        "model.embed_tokens.weight": elements(vocab, every),
        "lm_head.weight": elements(vocab, every),
    }


@pytest.mark.parametrize("fields", [{}, {"files": 3}], ids=["one file", "index"])
@pytest.mark.parametrize(("tp", "rank"), [(tp, rank) for tp in HEADS for rank in range(tp)])
def test_a_rank_asks_for_its_own_elements_once(tp: int, rank: int, fields: dict[str, Any], tmp_path: Path) -> None:
    names = sorted(weights())
    folder = write(tmp_path, files=[names[:7], names[7:8], names[8:]] if fields else (), **ODD)
    reader = BoxReader()
    model = on_rank(folder, rank, tp, reader=reader)
    for name, needed in wanted(tp, rank).items():
        assert reader.elements(name) == needed, name
    assert reader.asked.keys() == weights(**ODD).keys()
    assert model.loaded is not None
    assert model.loaded.bytes_read == reader.bytes_read == model.param_bytes()
    assert model.plan.load.checkpoint_bytes(rank) == reader.bytes_read


def test_a_buffer_that_is_used_again_does_no_harm(tmp_path: Path) -> None:
    folder = write(tmp_path)
    state = on_rank(folder, reader=BoxReader()).state_dict()
    for name, tensor in fuse(weights()).items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_conversions_are_exact_and_stated(dtype: str, tmp_path: Path) -> None:
    folder = write(tmp_path, weights(torch.bfloat16))
    reader = BoxReader()
    model = on_rank(folder, dtype=dtype, reader=reader)
    assert model.plan.load.conversions == {("bfloat16", dtype): len(weights())}
    assert reader.bytes_read == 2 * sum(tensor.numel() for tensor in weights().values())
    for name, tensor in fuse(weights(torch.bfloat16)).items():
        assert torch.equal(model.get_parameter(name), tensor.to(getattr(torch, dtype))), name


def test_a_large_tensor_is_copied_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpkit.checkpoint.load, "CHUNK", 100)
    folder = write(tmp_path)
    reader, told = BoxReader(), []
    model = on_rank(folder, 1, 2, reader=reader, progress=lambda done, whole: told.append((done, whole)))
    assert max(len(boxes) for boxes in reader.asked.values()) > 10
    whole = on_rank(folder, 1, 2)
    for name, parameter in whole.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    assert reader.elements("lm_head.weight") == elements((48, 96), (0, 32))
    assert told == sorted(told) and told[-1] == (model.param_bytes(), model.param_bytes())


def test_bytes_that_are_checked_are_counted(tmp_path: Path) -> None:
    tensors = weights() | {"model.layers.0.self_attn.o_proj.bias": torch.zeros(32)}
    reader = BoxReader()
    model = on_rank(write(tmp_path, tensors), 0, 2, reader=reader)
    assert reader.bytes_read == model.param_bytes() + 32 * 4
    assert model.loaded is not None and model.loaded.bytes_read == reader.bytes_read


def test_a_reader_that_gives_too_little_is_noticed(tmp_path: Path) -> None:
    class Short(BoxReader):
        def read(self, name: str, *arguments: Any) -> torch.Tensor:
            return super().read(name, *arguments)[:1]

    with pytest.raises(CheckpointError, match=r": \[1, 32\] read for \[96, 32\]"):
        on_rank(write(tmp_path), reader=Short())


def test_every_element_of_a_model_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    folder = write(tmp_path, **ODD)
    for tp in (1, 2, 3, 7):
        for rank in range(tp):
            for name, parameter in on_rank(folder, rank, tp).named_parameters():
                assert not parameter.isnan().any(), f"{name} on rank {rank} of {tp}"


@pytest.mark.parametrize("tp", [2, 3, 4, 5])
def test_only_what_cannot_be_divided_is_held_more_than_once(tp: int, tmp_path: Path) -> None:
    planned = plan(write(tmp_path, **ODD), tp)
    layers = CONFIG["num_hidden_layers"]
    norms = (2 * layers + 1) * 32 * (tp - 1)
    kv_replicas = layers * 2 * 8 * 32 * max(0, tp - 3)
    assert planned.load.replicated_bytes() == 4 * (norms + kv_replicas)
    for name in ("mlp.gate_up_proj", "mlp.down_proj"):
        layer = planned.layers[f"model.layers.0.{name}"]
        side = layer.spec.out if "gate" in name else layer.spec.in_
        held = [layer.sizes(side, rank)[0] for rank in range(tp)]
        assert max(held) - min(held) <= 1 and sum(held) == 67
    vocab = [planned.layers["lm_head"].sizes(planned.layers["lm_head"].spec.out, rank)[0] for rank in range(tp)]
    assert max(vocab) - min(vocab) <= 1 and sum(vocab) == 97


# memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "peak"),
    [([100, 150, 300, 120], 200), ([100, 90, 80, 70], 0), ([None, 5, 5, 5], None), ([7, None, 9, 8], 2)],
)
def test_peak_is_the_largest_rise_over_the_first_value(
    seen: list[int | None], peak: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = iter(seen)
    monkeypatch.setattr(tpkit.checkpoint.memory, "anonymous_bytes", lambda: next(values))
    with AnonymousMemory(interval=3600) as memory:
        memory.sample()
        memory.sample()
    assert memory.peak == peak


def test_a_thread_looks_between_samples() -> None:
    import threading

    looked = threading.Event()

    class Watched(AnonymousMemory):
        def sample(self) -> None:
            looked.set()

    with Watched(interval=0.001) as memory:
        if memory.first is not None:
            assert looked.wait(60)


def test_memory_is_looked_at_after_every_copy_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def look(self: AnonymousMemory) -> None:
        nonlocal looks
        looks += 1

    monkeypatch.setattr(AnonymousMemory, "sample", look)
    on_rank(write(tmp_path / "small"))
    assert looks <= 4  # a few kilobytes are not worth it
    monkeypatch.setattr(tpkit.checkpoint.load, "UNSEEN", 0)
    model = on_rank(write(tmp_path))
    assert looks >= len(list(model.plan.load.transfers(0)))
