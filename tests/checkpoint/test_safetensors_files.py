"""Which files count, and what is said of those that are not what they should be."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from tests.small import on_rank, weights, write
from tpkit import CheckpointError, open_checkpoint
from tpkit.checkpoint.reader import MappedReader
from tpkit.layout import Run

INDEX = "model.safetensors.index.json"
NAMES = sorted(weights())
HALVES = (NAMES[:9], NAMES[9:])


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """Returns the bytes of a file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


GOOD = save({"a": torch.arange(12.0).reshape(3, 4)})
A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}

DAMAGED = {
    "git-lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
        r"is a git-lfs pointer \(70 bytes\).*git lfs pull",
    ),
    "web page": (b"<!DOCTYPE html><html>not found</html>", r"is a web page \(37 bytes\)"),
    "empty": (b"", r"is empty \(0 bytes\)"),
    "a few bytes": (b"\x10\0\0", "the file is 3 bytes, too few"),
    "end cut off": (GOOD[:-10], f"the file is {len(GOOD) - 10} bytes, its header needs {len(GOOD)}"),
    "header cut off": (GOOD[:20], f"announce a header of {GOOD[0]} bytes, the file is 20 bytes"),
    "foreign": (b"PK\x03\x04" + bytes(100), "not a safetensors file, or cut short"),
    "header too large": (raw({}, bytes(100), 200_000_000), "announce a header of 200000000 bytes"),
    "header no JSON": (raw(b"{nonsense}"), "header is not readable"),
    "header no text": (raw(b"\xff\xfe{}"), "header is not readable"),
    "header a list": (raw([1, 2]), "header is not readable"),
    "header nested without end": (raw(b"[" * 100_000), "header is not readable"),
    "name twice": (raw(b'{"a":%b,"a":%b}' % ((json.dumps(A).encode(),) * 2), bytes(8)), "a name occurs twice"),
    "entry no mapping": (raw({"a": 3}), "entry for a is not one: 3"),
    "entry without dtype": (raw({"a": {"shape": [], "data_offsets": [0, 4]}}), "entry for a is not one"),
    "dtype a list": (raw({"a": {**A, "dtype": ["F32"]}}, bytes(8)), "entry for a is not one"),
    "unknown dtype": (raw({"a": {**A, "dtype": "F4"}}, bytes(8)), "a has dtype F4; known: F64, F32"),
    "shape a text": (raw({"a": {**A, "shape": "2"}}, bytes(8)), "entry for a is not one"),
    "shape of fractions": (raw({"a": {**A, "shape": [2.0]}}, bytes(8)), "entry for a is not one"),
    "shape without end": (raw(b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}}', bytes(8)), "is not one"),
    "negative shape": (raw({"a": {**A, "shape": [-1, -2]}}, bytes(8)), "entry for a is not one"),
    "negative offset": (raw({"a": {**A, "data_offsets": [-8, 0]}}, bytes(8)), "entry for a is not one"),
    "three offsets": (raw({"a": {**A, "data_offsets": [0, 8, 16]}}, bytes(16)), "entry for a is not one"),
    "other size": (raw({"a": {**A, "shape": [3]}}, bytes(8)), r"a F32 \[3\] needs 12 bytes, its entry has 8"),
    "overlap": (raw({"a": A, "b": {**A, "data_offsets": [4, 12]}}, bytes(12)), "bytes of b overlap those of a"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_named_with_what_is_wrong(kind: str, tmp_path: Path) -> None:
    content, said = DAMAGED[kind]
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert re.search(said, str(caught.value), re.DOTALL)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_one_damaged_shard_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, files=HALVES)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors: the file is \d+ bytes, its header"):
        open_checkpoint(folder)


@pytest.mark.parametrize("padding", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_data_at_any_byte_is_read(padding: int, dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.arange(30).reshape(5, 6).to(dtype)
    name = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}[dtype]
    data = bytes(values.view(torch.uint8).flatten().tolist())
    header = json.dumps({"a": {"dtype": name, "shape": [5, 6], "data_offsets": [0, len(data)]}}) + " " * padding
    (tmp_path / "model.safetensors").write_bytes(raw(header.encode(), data))
    stored = open_checkpoint(tmp_path).tensors["a"]
    with MappedReader() as reader:
        piece = reader.read("a", stored, (5, 6), (Run(1, 2, 2), Run(2, 3)))
        assert torch.equal(piece, values[1:4:2, 2:5])
        assert piece.data_ptr() % values.element_size() == 0, "not every processor reads a number at any address"
        assert reader.bytes_read == 6 * values.element_size()


def test_scalars_empty_tensors_and_a_big_header(tmp_path: Path) -> None:
    many = {f"t{i}": torch.tensor([i]) for i in range(3000)}
    tensors = {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "bool": torch.tensor([True]), **many}
    file = tmp_path / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt", "note": "x" * 100_000})
    opened = open_checkpoint(file).tensors
    assert opened.keys() == tensors.keys()
    with MappedReader() as reader:
        assert reader.read("scalar", opened["scalar"], (), ()).item() == 2.5
        assert reader.read("scalar", opened["scalar"], (1,), (Run(0, 1),)).tolist() == [2.5]
        assert reader.read("empty", opened["empty"], (0, 4), (Run(0, 0), Run(0, 4))).shape == (0, 4)
        assert reader.read("t2999", opened["t2999"], (1,), (Run(0, 1),)).item() == 2999


def test_a_file_cut_short_after_its_header_was_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(GOOD)
    stored = open_checkpoint(file).tensors["a"]
    file.write_bytes(GOOD[:-10])
    with (
        MappedReader() as reader,
        pytest.raises(CheckpointError, match=f"a ends at byte {len(GOOD)} of {len(GOOD) - 10}"),
    ):
        reader.read("a", stored, (3, 4), (Run(0, 3), Run(0, 4)))


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path)

    def refuse(self: Path, *arguments: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: Permission denied"):
        open_checkpoint(folder)


# which files count ----------------------------------------------------------------------------------------------------


def test_the_index_decides_where_there_are_two_copies(tmp_path: Path) -> None:
    folder = write(tmp_path, files=HALVES)
    other = {name: tensor + 1 for name, tensor in weights().items()}
    save_file(other, folder / "model.safetensors")
    save_file(other, folder / "consolidated.safetensors")
    opened = open_checkpoint(folder)
    assert {stored.file.name for stored in opened.tensors.values()} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    assert torch.equal(on_rank(folder).get_parameter("model.norm.weight"), weights()["model.norm.weight"])


def test_two_copies_without_an_index_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, files=HALVES)
    save_file(weights(), folder / "model.safetensors")
    (folder / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"stored more than once, e\.g\. lm_head\.weight in") as caught:
        open_checkpoint(folder)
    assert "model.safetensors" in str(caught.value) and "model-00001-of-00002.safetensors" in str(caught.value)
    assert "remove one copy" in str(caught.value)


def test_another_copy_under_another_name_does_not_count(tmp_path: Path) -> None:
    folder = write(tmp_path)
    save_file({"tok_embeddings.weight": torch.zeros(2)}, folder / "consolidated.safetensors")
    assert open_checkpoint(folder).tensors.keys() == weights().keys()


def test_shards_without_an_index_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path, files=HALVES)
    (folder / INDEX).unlink()
    assert open_checkpoint(folder).tensors.keys() == weights().keys()


def test_missing_files_are_listed_before_any_is_opened(tmp_path: Path) -> None:
    folder = write(tmp_path, files=[NAMES[:5], NAMES[5:10], NAMES[10:]])
    (folder / "model-00001-of-00003.safetensors").write_bytes(b"damaged")
    for number in (2, 3):
        (folder / f"model-0000{number}-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    text = str(caught.value)
    assert (
        "names 3 files, 2 of them missing: model-00002-of-00003.safetensors, model-00003-of-00003.safetensors" in text
    )
    assert "interrupted" in text


def test_an_index_of_another_version_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, files=HALVES)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"1 tensors are not in the file .*model.extra.weight \(model-00001"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""])
def test_an_index_reaches_only_into_its_folder(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", files=HALVES)
    save_file(weights(), tmp_path / "model.safetensors")
    (folder / "sub").mkdir()
    save_file(weights(), folder / "sub" / "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(NAMES, name)}))
    with pytest.raises(CheckpointError, match=r"outside its folder|missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[" * 100_000]
)
def test_a_damaged_index_is_named(text: str, tmp_path: Path) -> None:
    folder = write(tmp_path, files=HALVES)
    (folder / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=f"{INDEX} is not an index") as caught:
        open_checkpoint(folder)
    assert len(str(caught.value)) < 1000


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"holds no weights in a known format \([a-z, ]*safetensors\); it holds: nothing"
    ):
        open_checkpoint(tmp_path)
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"it holds: x\.safetensors/"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin") as caught:
        open_checkpoint(tmp_path)
    assert "convert them to safetensors" in str(caught.value)
    shutil.rmtree(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_checkpoint(tmp_path)


def test_a_file_of_no_tensors(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="hold no tensor"):
        open_checkpoint(tmp_path)
