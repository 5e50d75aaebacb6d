"""Local shapes and copies: what the ranks hold together is the full tensor, exactly, for every kind of parameter."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from tpkit.division import divide_layers
from tpkit.errors import PluginError, ShardingError
from tpkit.geometry import local_elements, localize, stored_shape
from tpkit.layout import LayerSpec, Run, Source, View, apart, fused, join
from tpkit.params import Dim, Fixed, Flat, In, Out, ParamSpec, Segment
from tpkit.partition import Axis, Features, Side, side_size


def _attention(draw: Any) -> Side:
    groups, ratio, unit = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    heads = Axis(name="heads", units=groups * ratio, groups=groups)
    return tuple(Features(name=name, axis=heads, unit=unit, grouped=name != "q") for name in "qkv")


def _merged(draw: Any) -> Side:
    ffn = Axis(name="ffn", units=draw(st.integers(1, 40)))
    return tuple(Features(name=name, axis=ffn) for name in ("gate", "up"))


@st.composite
def _layers(draw: Any) -> tuple[Side, Side, tuple[Source, ...], int]:
    """A packed or plain projection, how it is stored, and a number of ranks."""
    kind = draw(st.sampled_from(["attention", "merged", "column", "row"]))
    hidden = (Features(name="", unit=draw(st.integers(1, 24))),)
    axis = Axis(name="axis", units=draw(st.integers(1, 40)))
    if kind == "row":
        out, in_ = hidden, (Features(name="", axis=axis),)
        return out, in_, fused("w", out), draw(st.integers(1, 9))
    out = {"attention": _attention, "merged": _merged}.get(kind, lambda _: (Features(name="", axis=axis),))(draw)
    repeats = {"attention": out[0].axis and out[0].axis.groups, "merged": out[0].size}.get(kind) or 1
    forms = [
        apart([f"{part.name}_proj" for part in out], out),
        fused("w", out, draw(st.permutations([p.name for p in out]))),
    ]
    if len({part.size for part in out}) == 1 or kind == "attention":
        forms.append(fused("w", out, repeat=repeats))
    return out, hidden, draw(st.sampled_from(forms)), draw(st.integers(1, 9))


def _blocked(draw: Any, make: Any) -> Dim:
    return draw(st.sampled_from([make(), make(pack=4), make(block=3), make(block=16), make(per=5, cells=2)]))  # type: ignore[no-any-return]


@st.composite
def _params(draw: Any) -> ParamSpec:
    out, in_ = _blocked(draw, Out), _blocked(draw, In)
    dims = draw(
        st.sampled_from(
            [
                (Out(), In()),
                (out, in_),
                (in_, out),
                (Segment(),),
                (Segment(), in_),
                (Fixed(3), out),
                (_blocked(draw, Flat),),
            ]
        )
    )
    return ParamSpec("float32", dims)


def _stored(spec: ParamSpec, form: tuple[Source, ...], in_size: int) -> list[torch.Tensor]:
    """Tensors whose every element is different, as they lie on disk."""
    found, start = [], 0
    for source in form:
        shape = stored_shape(spec, source, in_size)
        count = int(torch.Size(shape).numel())
        found.append(torch.arange(start, start + count, dtype=torch.int64).reshape(shape))
        start += count
    return found


def _fill(spec: ParamSpec, layer: Any, rank: int, disk: list[torch.Tensor]) -> torch.Tensor:
    param = layer.geometry.local[rank]["p"]
    held = torch.full(param.shape, -1, dtype=torch.int64)
    for copy in param.copies:
        box = tuple(slice(run.start, run.stop, run.step) for run in copy.box)
        goal = held[tuple(slice(run.start, run.stop) for run in copy.target)]
        piece = disk[copy.source][box]
        assert piece.numel() == goal.numel()
        goal.copy_(piece.reshape(goal.shape))
    return held


@settings(max_examples=300)
@given(_layers(), _params())
def test_every_element_is_written_once_and_every_stored_one_is_used(
    case: tuple[Side, Side, tuple[Source, ...], int], spec: ParamSpec
) -> None:
    out, in_, form, n = case
    layer = LayerSpec(path="layer", out=out, in_=in_, forms=(form,), params=(("p", spec),))
    (divided,) = divide_layers([(layer, form)], n)
    assert divided.geometry.gaps == ()
    assert not divided.geometry.unread
    disk = _stored(spec, form, side_size(in_))
    seen: set[int] = set()
    for rank in range(n):
        held = _fill(spec, divided, rank, disk)
        assert (held >= 0).all()
        seen |= set(held.flatten().tolist())
    if not any(dim.along == "segment" for dim in spec.dims):
        assert seen == set(torch.cat([t.flatten() for t in disk]).tolist())


@settings(max_examples=300)
@given(_layers(), st.data())
def test_a_blocked_parameter_gives_every_element_its_own_value(
    case: tuple[Side, Side, tuple[Source, ...], int], data: st.DataObject
) -> None:
    """Decoding a shard through its covering cells equals cutting the decoded whole: scales, packed words and all."""
    out, in_, form, n = case
    spec = ParamSpec("float32", (_blocked(data.draw, Out), _blocked(data.draw, In)))
    if any(dim.cells != 1 for dim in spec.dims):
        return
    layer = LayerSpec(path="layer", out=out, in_=in_, forms=(form,), params=(("p", spec),))
    (divided,) = divide_layers([(layer, form)], n)
    disk = _stored(spec, form, side_size(in_))
    for rank in range(n):
        held = _fill(spec, divided, rank, disk)
        shares = divided.shares(out, rank), divided.shares(in_, rank)
        rows, columns = (_positions(local_elements(dim, out, in_, form, *shares)) for dim in spec.dims)
        expected = _logical_blocks(spec, out, in_, form, disk, divided, rank)
        found = held[[x // spec.dims[0].per for x in rows]][:, [x // spec.dims[1].per for x in columns]]
        assert torch.equal(found.to(torch.int64).reshape(expected.shape), expected)


def _positions(runs: list[Run]) -> list[int]:
    return [index for run in runs for index in run.indices()]


@settings(max_examples=200)
@given(_layers(), st.integers(1, 7), st.integers(1, 9))
def test_a_covering_dimension_holds_whole_blocks_and_finds_its_own_elements_in_them(
    case: tuple[Side, Side, tuple[Source, ...], int], rows: int, columns: int
) -> None:
    """What a method that quantises while loading asks for: all elements of a group, a neighbour's too."""
    out, in_, form, n = case
    spec = ParamSpec("float32", (Out(per=rows, cells=rows), In(per=columns, cells=columns)))
    dense = ParamSpec("float32", (Out(), In()))
    layer = LayerSpec(path="layer", out=out, in_=in_, forms=(form,), params=(("p", spec), ("d", dense)))
    (divided,) = divide_layers([(layer, form)], n)
    assert divided.geometry.gaps == ()
    disk = _stored(spec, form, side_size(in_))
    assert [t.shape for t in disk] == [t.shape for t in _stored(dense, form, side_size(in_))]
    for rank in range(n):
        held = _fill(spec, divided, rank, disk)
        shares = divided.shares(out, rank), divided.shares(in_, rank)
        own = [_positions(local_elements(dim, out, in_, form, *shares)) for dim in spec.dims]
        expected = _logical_blocks(dense, out, in_, form, disk, divided, rank)
        assert torch.equal(held[own[0]][:, own[1]].reshape(expected.shape), expected)
        if columns >= side_size(in_) and own[0] and own[1]:
            assert held.shape[1] == side_size(in_)


def _logical_blocks(
    spec: ParamSpec, out: Side, in_: Side, form: tuple[Source, ...], disk: list[torch.Tensor], divided: Any, rank: int
) -> torch.Tensor:
    """The cell of every local element, looked up one by one from the definition of the layout."""
    rows = []
    for part, (start, stop) in zip(out, divided.bounds(out, rank), strict=True):
        for x in range(start, stop):
            index, source = next((i, s) for i, s in enumerate(form) if part.name in dict(s.views))
            view = dict(source.views)[part.name]
            place, rest = view.start, x
            for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
                rest, digit = divmod(rest, size)
                place += digit * stride
            rows.append((index, place // spec.dims[0].per))
    columns, offset = [], 0
    for part, (start, stop) in zip(in_, divided.bounds(in_, rank), strict=True):
        columns += [(offset + x) // spec.dims[1].per for x in range(start, stop)]
        offset += part.size
    values = [[int(disk[i][r, c]) for c in columns] for i, r in rows]
    return torch.tensor(values, dtype=torch.int64).reshape(len(rows), len(columns))


@settings(max_examples=200)
@given(_layers())
def test_a_dense_shard_is_the_logical_rows_and_columns_in_order(
    case: tuple[Side, Side, tuple[Source, ...], int],
) -> None:
    out, in_, form, n = case
    spec = ParamSpec("float32", (Out(), In()))
    layer = LayerSpec(path="layer", out=out, in_=in_, forms=(form,), params=(("p", spec),))
    (divided,) = divide_layers([(layer, form)], n)
    disk = _stored(spec, form, side_size(in_))
    held = [_fill(spec, divided, rank, disk) for rank in range(n)]
    for rank in range(n):
        assert torch.equal(held[rank], _logical_blocks(spec, out, in_, form, disk, divided, rank))
    replicas: dict[tuple[str, int], torch.Tensor] = {}
    for rank in range(n):  # replicas of a kv head agree
        offset = 0
        for part, (start, stop) in zip(out, divided.bounds(out, rank), strict=True):
            for x in range(start, stop):
                row = held[rank][offset + x - start]
                other = replicas.setdefault((part.name, x), row)
                assert part.axis is None or torch.equal(other, row)
            offset += stop - start


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.data())
def test_a_view_of_runs_is_the_view_of_elements(a: int, b: int, c: int, data: st.DataObject) -> None:
    view = View(data.draw(st.integers(0, 3)), (a, b, c), (b * c * 2, c, 1))
    start = data.draw(st.integers(0, view.size))
    stop = data.draw(st.integers(start, view.size))
    expected = [view.start + x // (b * c) * b * c * 2 + x % (b * c) for x in range(start, stop)]
    assert [i for run in view.runs(start, stop) for i in run.indices()] == expected


def test_interleaved_channels_are_one_strided_run() -> None:
    ffn = Axis(name="ffn", units=8)
    side = tuple(Features(name=name, axis=ffn) for name in ("gate", "up"))
    (source,) = fused("w", side, repeat=8)
    assert dict(source.views)["up"].runs(2, 5) == [Run(5, 3, 2)]


def test_runs_one_element_apart_are_not_taken_for_one() -> None:
    assert join([Run(0, 1), Run(2, 1), Run(4, 1)]) == [Run(0, 3, 2)]
    assert join([Run(0, 2), Run(3, 2)]) == [Run(0, 2), Run(3, 2)]
    assert join([Run(0, 2), Run(2, 3)]) == [Run(0, 5)]


def test_a_fused_block_grid_runs_on_across_segments() -> None:
    """Rows 0 to 5 are q, 6 to 8 k, 9 to 11 v; with blocks of 4 the second block belongs to q and k both."""
    heads = Axis(name="heads", units=2, groups=1)
    out = tuple(Features(name=name, axis=heads, unit=3, grouped=name != "q") for name in "qkv")
    form = fused("qkv", out)
    spec = ParamSpec("float32", (Out(block=4), In(block=8)))
    layer = LayerSpec(path="layer", out=out, in_=(Features(name="", unit=8),), forms=(form,), params=(("p", spec),))
    (divided,) = divide_layers([(layer, form)], 2)
    assert [local["p"].shape for local in divided.geometry.local] == [(3, 1), (3, 1)]
    for rank, rows in enumerate([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 2, 2, 2, 2]]):
        own = local_elements(spec.dims[0], out, layer.in_, form, divided.shares(out, rank), (None,))
        assert [position // 4 for position in _positions(own)] == rows


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ParamSpec("float32", (Out(), Out())), "two dimensions along 'out'"),
        (lambda: ParamSpec("float32", (Segment(), Out())), "Segment beside Out"),
        (lambda: ParamSpec("float32", (Flat(), In())), "Flat already"),
        (lambda: Out(pack=8, block=4), "give one of"),
        (lambda: In(pack=0), "at least 1"),
    ],
)
def test_dimensions_that_contradict_each_other_are_refused(make: Any, said: str) -> None:
    with pytest.raises(PluginError, match=said):
        make()


def test_a_parameter_that_cannot_tell_parts_apart_is_refused() -> None:
    ffn = Axis(name="ffn", units=4)
    out = tuple(Features(name=name, axis=ffn) for name in ("gate", "up"))
    with pytest.raises(PluginError, match="cannot tell the 2 parts"):
        localize(
            ParamSpec("int32", (In(),)),
            out,
            (Features(name="", unit=4),),
            apart(["g", "u"], out),
            (None, None),
            (None,),
        )


def test_a_layout_must_name_every_segment_once_and_divide() -> None:
    side = (Features(name="q", unit=6), Features(name="k", unit=4))
    with pytest.raises(ShardingError, match="must name each of"):
        fused("w", side, ["q", "q"])
    with pytest.raises(ShardingError, match="6 rows of 'q' do not come in 4 equal pieces"):
        fused("w", side, repeat=4)
