"""Checks of what a method lets through: missing, foreign, misshapen tensors; loading again; bytes that stay."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from tpkit.errors import LoadError
from tpkit.params import ParamSpec
from tpkit.quant import QuantMethod
from tpkit.testing.finding import Finding, guarded, is_raw, told
from tpkit.testing.shards import difference, inputs, loaded, require_sound
from tpkit.testing.subject import Style, Subject, Tensors

__all__ = [
    "keeps_stored_dtype",
    "loads_again",
    "refuses_extra",
    "refuses_missing",
    "refuses_other_shapes",
    "refuses_other_types",
    "stays_small",
]

#: types of the same size in which bytes mean something else
REINTERPRETED = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.int64: torch.float64,
    torch.int32: torch.float32,
    torch.int16: torch.float16,
    torch.uint8: torch.int8,
    torch.int8: torch.uint8,
    torch.bool: torch.int8,
}

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _output(subject: Subject, style: Style, tensors: Tensors) -> torch.Tensor:
    layer = style.build(subject.method)
    layer.load(tensors)
    y: torch.Tensor = layer(inputs(style.width, 3, dtype=subject.dtype))
    return y


def _refused(subject: Subject, style: Style, tensors: Tensors, name: str, fault: str, said: str) -> torch.Tensor | None:
    """Requires that loading fails with a typed error that names a tensor; else returns the output, if there is one.

    Args:
        subject, style: what loads.
        tensors: what is given.
        name: the tensor that has a fault.
        fault: reason of the finding if something else breaks.
        said: what was done to the tensor.
    """
    layer = style.build(subject.method)
    try:
        layer.load(tensors)
    except LoadError as error:
        if name.rpartition(".")[2] not in str(error):
            raise Finding(
                "raw-error", f"{style.name}: {name} {said}: the error does not name it: {told(error)}"
            ) from error
        return None
    except Exception as error:
        if is_raw(error):
            raise Finding("raw-error", f"{style.name}: {name} {said}: {told(error)}") from error
        return None
    try:
        y: torch.Tensor = layer(inputs(style.width, 3, dtype=subject.dtype))
    except Exception as error:
        raise Finding(fault, f"{style.name}: {name} {said}, and loads; then apply fails: {told(error)}") from error
    return y


def _styles(subject: Subject) -> list[Style]:
    sizes = subject.sizes
    return [subject.plain, subject.merged([sizes.tall, sizes.tall], sizes.wide, apart=True)]


def _needless(subject: Subject, style: Style, name: str) -> bool:
    """Says whether a tensor may be absent: it is called optional, or computing does not need it."""
    tensors = subject.tensors(style)
    if name.rpartition(".")[2] in subject.optional or name in subject.optional:
        return True
    try:
        without = _output(subject, style, {n: t for n, t in tensors.items() if n != name})
    except Exception:
        return False
    return torch.equal(without, _output(subject, style, tensors))


def refuses_missing(subject: Subject) -> None:
    """Each tensor is missed by name."""
    require_sound(subject)
    for style in _styles(subject):
        tensors = subject.tensors(style)
        for name in tensors:
            if _needless(subject, style, name):
                continue
            left = {n: t for n, t in tensors.items() if n != name}
            if _refused(subject, style, left, name, "missing-accepted", "is missing") is not None:
                raise Finding("missing-accepted", f"{style.name}: without {name} it loads, and the output is another")


def refuses_extra(subject: Subject) -> None:
    """A tensor that the format does not have is refused, not left out."""
    require_sound(subject)
    for style in _styles(subject):
        tensors = subject.tensors(style)
        stem = style.parts[0][0] + "." if style.apart else ""
        for extra in ("nobody_knows_this", *(f"{name.removeprefix(stem)}_2" for name in tensors if stem in name)):
            given = {**tensors, stem + extra: torch.ones(3, dtype=torch.uint8)}
            if _refused(subject, style, given, extra, "extra-accepted", "is none of the format's") is not None:
                raise Finding("extra-accepted", f"{style.name}: a tensor {stem}{extra} is there, and nobody minds")


def _specs(subject: Subject) -> dict[str, ParamSpec]:
    layer = loaded(subject, subject.plain)
    return {on_disk: spec for _, on_disk, spec in layer.sharded.layer.spec.stored}


def refuses_other_shapes(subject: Subject) -> None:
    """A tensor that is longer or shorter along any dimension is refused."""
    require_sound(subject)
    style, specs = subject.plain, _specs(subject)
    tensors = subject.tensors(style)
    for name, tensor in tensors.items():
        if specs[name].is_blob:
            continue
        for said, other in _misshapen(tensor).items():
            y = _refused(subject, style, {**tensors, name: other}, name, "shape-accepted", said)
            if y is not None and not _needless(subject, style, name):
                raise Finding("shape-accepted", f"{style.name}: {name} {said}, and loads")


def _misshapen(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    octets = tensor.dtype if tensor.dtype.itemsize > 1 else torch.uint8  # float8 cannot be joined everywhere
    made: dict[str, torch.Tensor] = {}
    tensor, dtype = tensor.view(octets), tensor.dtype
    if not tensor.ndim:
        tensor = tensor.reshape(1)
    for dim, size in enumerate(tensor.shape):
        longer = torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim)
        made[f"is {list(longer.shape)}, not {list(tensor.shape)}"] = longer.view(dtype)
        if size > 2:  # a dimension of one element says nothing
            shorter = tensor.narrow(dim, 0, size - 1).contiguous()
            made[f"is {list(shorter.shape)}, not {list(tensor.shape)}"] = shorter.view(dtype)
    return made


def refuses_other_types(subject: Subject) -> None:
    """Bytes under the name of another type are refused, unless they mean the same in it."""
    require_sound(subject)
    style, specs = subject.plain, _specs(subject)
    tensors = subject.tensors(style)
    right = _output(subject, style, tensors)
    for name, tensor in tensors.items():
        if specs[name].is_blob:
            continue
        other = REINTERPRETED.get(tensor.dtype, torch.int8)
        said = f"holds the bytes of {tensor.dtype} as {other}"
        y = _refused(subject, style, {**tensors, name: tensor.view(other)}, name, "dtype-accepted", said)
        if y is not None and not torch.equal(y, right):
            raise Finding("dtype-accepted", f"{style.name}: {name} {said}, and loads; the output is another")


def keeps_stored_dtype(subject: Subject) -> None:
    """Float tensors are computed with as they are stored, not rounded: to no declared type, nor to the model's."""
    require_sound(subject)
    _means_the_same_in_any_model(subject)
    style, specs = subject.plain, _specs(subject)
    tensors = subject.tensors(style)
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS or specs[name].is_blob:
            continue
        for dtype in FLOATS:
            if dtype == tensor.dtype:
                continue
            other = (tensor.to(torch.float64) * (1 + 0.37 * 2.0**-12)).to(dtype)  # no narrower type has these values
            given = {**tensors, name: other}
            try:
                meant = subject.decoded({**tensors, name: other.to(torch.float32)}, style.rows, style.width)
            except Finding:
                continue  # the author's reference knows this type alone
            what = f"{style.name}: {name} stored in {dtype} (encode() gives {tensor.dtype})"
            try:
                y = _output(subject, style, given)
            except Exception as error:
                if is_raw(error):
                    raise Finding("stored-dtype", f"{what}: {told(error)}") from error
                continue  # refused by name: that is no silent rounding
            away = difference(y, inputs(style.width, 3, dtype=subject.dtype).to(torch.float64) @ meant.t())
            if away > subject.allowed:
                raise Finding("stored-dtype", f"{what} is rounded: the output is {away:.2g} of its largest value away")


def _means_the_same_in_any_model(subject: Subject) -> None:
    """The weight that dequantize returns is the same, bit for bit, in models of each dtype."""
    method, style = subject.variants()[-1], subject.plain  # the form without a kernel: its dequantize is required
    own = type(method).dequantize is not QuantMethod.dequantize
    if subject.dtype_matters or subject.dtype != torch.float32 or not own:
        return
    weights = {}
    for dtype in FLOATS:
        with guarded("output-dtype", f"{style.name} in a model of {dtype}"):
            layer = replace(style, dtype=dtype).build(method)
            layer.load(subject.tensors(style))
            weights[dtype] = method.dequantize(layer)
        if not torch.equal(weights[dtype].double(), weights[torch.float32].double()):
            away = difference(weights[dtype], weights[torch.float32])
            raise Finding(
                "stored-dtype",
                f"{style.name}: the same tensors in a model of {dtype} dequantise to another weight than in one of "
                f"torch.float32, {away:.2g} of the largest value away (dtype_matters = True: the format says so)",
            )


def loads_again(subject: Subject) -> None:
    """A layer that was loaded, and repacked, can be loaded again: with the same, with others, with the first."""
    require_sound(subject)
    sizes = subject.sizes
    rows = [sizes.short, sizes.tall]
    apart, fused = (subject.merged(rows, sizes.narrow, apart=flag) for flag in (True, False))
    cases: list[tuple[Style, int, int, list[tuple[Style, int]]]] = []
    for style, rank, size in ((subject.plain, 0, 1), (subject.row(sizes.few, sizes.narrow), 1, 2), (apart, 1, 3)):
        given = [(style, seed) for seed in (0, 0, 5, 0)]
        if style is apart and subject.fused:
            given = [given[0], (fused, 0), given[0], given[2], given[0]]
        cases.append((style, rank, size, given))
    for style, rank, size, sequence in cases:
        layer = style.build(subject.method, rank, size)
        x = inputs(layer.in_features, 3, dtype=subject.dtype)
        for number, (stored, seed) in enumerate(sequence):
            tensors = subject.tensors(stored, seed)
            what = f"{style.name}, rank {rank} of {size}, load {number + 1}"
            with guarded("reload" if number else "fails", what):
                fresh = style.build(subject.method, rank, size)
                layer.load(tensors)
                fresh.load(tensors)
                same = torch.equal(layer(x.clone()), fresh(x.clone()))
            if not same:
                raise Finding("reload", f"{what}: the output is another than that of a fresh layer with these tensors")


def stays_small(subject: Subject) -> None:
    """After loading and computing, hardly more is held than what was stored; wherever it is kept."""
    require_sound(subject)
    sizes = subject.sizes
    style = subject.column(sizes.tall * -(-256 // sizes.tall), sizes.wide * -(-256 // sizes.wide))
    tensors, x = subject.tensors(style), inputs(style.width, 3, dtype=subject.dtype)
    stored = sum(tensor.nbytes for tensor in tensors.values())
    subject.references(style)
    gc.collect()
    before = _living()
    layer = style.build(subject.method)
    layer.load(tensors)
    layer(x)
    gc.collect()
    left = {place: found for place, found in _living().items() if place not in before}
    resident = sum(size for size, _ in left.values())
    if resident > subject.resident * stored:
        largest = sorted(left.values(), key=lambda pair: -pair[0])[:3]
        listed = "; ".join(f"{size} bytes {what}" for size, what in largest)
        raise Finding(
            "resident",
            f"{style.name}: {stored} bytes are stored, {resident} stay after loading ({resident / stored:.2f} times, "
            f"{subject.resident} are allowed): {listed}",
        )
    del layer


def _living() -> dict[int, tuple[int, str]]:
    """Returns the memory of all tensors that anything holds: place -> bytes and a description."""
    found: dict[int, tuple[int, str]] = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = (storage.nbytes(), f"in {list(thing.shape)} {thing.dtype}")
    return found
