"""Packed integers and small floats, against Python's own integers and torch's own types."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given

from tpkit.quant.codes import FP4, e8m0, fp4, unpack


@given(st.integers(1, 8), st.integers(1, 3), st.integers(0, 5), st.randoms(use_true_random=False))
def test_unpack_reads_one_little_endian_stream_of_bits(bits: int, rows: int, periods: int, random: object) -> None:
    count = periods * 32
    values = [[random.randrange(1 << bits) for _ in range(count)] for _ in range(rows)]  # type: ignore[attr-defined]
    streams = [sum(v << (bits * i) for i, v in enumerate(row)).to_bytes(count * bits // 8, "little") for row in values]
    octets = torch.tensor([list(stream) for stream in streams], dtype=torch.uint8).reshape(rows, count * bits // 8)
    wanted = torch.tensor(values, dtype=torch.uint8).reshape(rows, count)
    words = octets.reshape(-1).view(torch.int32).view(rows, periods * bits)
    assert torch.equal(unpack(octets, bits), wanted)
    assert torch.equal(unpack(words, bits), wanted)
    assert torch.equal(unpack(words.t(), bits, 0), wanted.t())
    assert torch.equal(unpack(words.t().contiguous(), bits, 0), wanted.t())


def test_one_word_along_a_dimension_whatever_its_stride() -> None:
    words = torch.arange(28, dtype=torch.int32).reshape(4, 7)[1:2]
    assert unpack(words, 4, 0).shape == (8, 7)


def test_a_value_that_lies_in_two_bytes_and_a_short_end() -> None:
    octets = torch.tensor([0b11_010_001, 0b1_101_100_0], dtype=torch.uint8)
    assert unpack(octets, 3).tolist() == [1, 2, 3, 4, 5]


def test_fp4_is_e2m1() -> None:
    assert fp4(torch.arange(16, dtype=torch.uint8)).tolist() == list(FP4)
    assert str(FP4[8]) == "-0.0"


def test_e8m0_is_torch_s_own_from_bytes_and_from_its_type() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = codes.view(torch.float8_e8m0fnu).float()
    for stored in (codes, codes.view(torch.float8_e8m0fnu)):
        found = e8m0(stored)
        assert torch.equal(found[:255], wanted[:255])
        assert found[255].isnan()
