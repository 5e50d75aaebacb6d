"""A plan for people and for programs: rows of folded layers, tables, JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

from tpkit.checkpoint.plan import LoadPlan
from tpkit.dtypes import itemsize
from tpkit.kernels import kernel_of
from tpkit.partition import Axis, Share
from tpkit.planning import ModelPlan
from tpkit.quant.dequantized import Dequantized

__all__ = ["Row", "human", "plan_json", "plan_text", "rows_of", "table"]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter, with the layers that repeat it folded.

    Attributes:
        name: its path, ``*`` for numbers that only count layers.
        count: how many it stands for.
        shape: on a single rank; `shapes` on every rank.
        bytes: of one copy of all of them; `replicated` is what the ranks hold beyond that.
    """

    name: str
    count: int
    style: str
    method: str
    dtype: str
    shape: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    replicated: int


def rows_of(plan: ModelPlan) -> list[Row]:
    """Returns one row for each parameter, repeated layers folded, in written order."""
    folded: dict[tuple[str, str, str, str, tuple[int, ...], tuple[tuple[int, ...], ...]], int] = {}
    load = plan.load
    for layer in load.layers:
        for name, spec in layer.spec.params:
            path = _NUMBER.sub("*", f"{layer.spec.path}.{name}")
            held = [layer.experts(rank) for rank in range(load.ranks)]
            shapes = tuple(_stack(n, local[name].shape) for n, local in zip(held, layer.geometry.local, strict=True))
            full = _stack(range(layer.spec.experts.units) if layer.spec.experts else None, layer.geometry.full[name])
            key = (path, layer.spec.style, layer.spec.method, spec.dtype, full, shapes)
            folded[key] = folded.get(key, 0) + 1
    return [_row(key, count) for key, count in folded.items()]


def _stack(experts: range | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of what all these experts hold together."""
    return shape if experts is None else (len(experts), *shape)


def _row(key: tuple[str, str, str, str, tuple[int, ...], tuple[tuple[int, ...], ...]], count: int) -> Row:
    path, style, method, dtype, shape, shapes = key
    each = prod(shape) * itemsize(dtype)
    held = sum(prod(local) for local in shapes) * itemsize(dtype)
    return Row(
        name=path,
        count=count,
        style=style,
        method=method,
        dtype=dtype,
        shape=shape,
        shapes=shapes,
        bytes=each * count,
        replicated=(held - each) * count,
    )


def plan_json(plan: ModelPlan) -> dict[str, Any]:
    """Returns one entry of ``plans`` in the output of ``tpkit plan --json``."""
    load = plan.load
    return {
        "tp": load.ranks,
        "ep": plan.ep,
        "ranks": [
            {"rank": r, "param_bytes": load.param_bytes(r), "checkpoint_bytes": load.checkpoint_bytes(r)}
            for r in range(load.ranks)
        ],
        "parameters": [
            {
                "name": row.name, "count": row.count, "style": row.style, "method": row.method, "dtype": row.dtype,
                "shape": list(row.shape), "shapes": [list(s) for s in row.shapes],
                "bytes": row.bytes, "replicated_bytes": row.replicated,
            }
            for row in rows_of(plan)
        ],
        "balance": round(load.balance(), 6),
        "replicated_bytes": load.replicated_bytes(),
    }  # fmt: skip


def plan_text(plan: ModelPlan, device: str = "cpu") -> str:
    """Returns the table of a plan: what every rank holds of every projection, how evenly, and by which kernels.

    Args:
        plan: the plan.
        device: type of the device that kernels are chosen for.
    """
    load = plan.load
    head = ["parameter", "layers", "style", "quant", "dtype", "full shape", "shape per rank", "bytes", "replicated"]
    body = [
        [
            row.name, str(row.count), row.style, row.method or "-", row.dtype, _shape(row.shape), _shapes(row.shapes),
            human(row.bytes), human(row.replicated) if row.replicated else "-",
        ]
        for row in rows_of(plan)
    ]  # fmt: skip
    return "\n".join([table(head, body), "", *_axes(load), *_notes(plan, device)])


def _axes(load: LoadPlan) -> list[str]:
    divisions: dict[Axis, tuple[Share, ...]] = {}
    for layer in load.layers:
        divisions.update({axis: layer.division[axis] for axis in sorted(layer.spec.axes(), key=str)})
    lines = []
    for axis, shares in divisions.items():
        grouped = f" in {axis.groups} groups" if axis.groups else ""
        dealt = _runs([str(share.units) for share in shares], " ") if axis.divided else "all on every rank"
        lines.append(f"axis {axis.name}: {axis.units}{grouped} -> {dealt}")
    return lines


def _parts(plan: ModelPlan) -> Iterable[str]:
    """Tells which packed projections are built in parts, and as what; alike layers once."""
    folded: dict[str, int] = {}
    for path, planned in plan.planned.items():
        if planned.parts:
            parts = ", ".join(f"{p.removeprefix(path + '.')}: {plan.planned[p].choice}" for p in planned.parts)
            line = f"{_NUMBER.sub('*', path)} is built in parts ({parts})"
            folded[line] = folded.get(line, 0) + 1
    yield from (line if count == 1 else f"{line}, {count} layers" for line, count in folded.items())


def _kernels(plan: ModelPlan, device: str) -> Iterable[str]:
    """Tells which shards of methods with kernels get one, and which are dequantised."""
    counts: dict[tuple[str, str], int] = {}
    for layer in plan.load.layers:
        choice = plan.planned[layer.spec.path].choice
        if choice is None or not choice.method.kernels:
            continue
        for rank in range(plan.load.ranks):
            if all(sum(layer.sizes(side, rank)) for side in (layer.spec.out, layer.spec.in_)):
                kernel = kernel_of(choice.method.kernels, layer, rank, device, plan.dtype)
                key = str(choice), kernel or "none, dequantised"
                counts[key] = counts.get(key, 0) + 1
    for (method, kernel), count in counts.items():
        yield f"kernel of {method} on {device}: {kernel} ({count} shards)"


def _repacked(plan: ModelPlan) -> Iterable[str]:
    """Tells of layers whose bytes above are those of loading, not those of computing."""
    counts: dict[str, int] = {}
    for layer in plan.load.layers:
        choice = plan.planned[layer.spec.path].choice
        made = any(spec.made for _, spec in layer.spec.params)
        if choice is not None and (made or isinstance(choice.method, Dequantized)):
            counts[str(choice)] = counts.get(str(choice), 0) + 1
    for method, count in counts.items():
        yield f"{method}: the bytes of {count} layers are those while loading; what is held afterwards is another size"


def _notes(plan: ModelPlan, device: str) -> Iterable[str]:
    load = plan.load
    yield from (f"{tie.path} ({tie.style}) shares the weight of {tie.tied_to}" for tie in load.ties)
    yield from _parts(plan)
    yield from _kernels(plan, device)
    yield from _repacked(plan)
    if load.ranks > 1:
        held = sum(load.param_bytes(rank) for rank in range(load.ranks))
        share = load.replicated_bytes() / held if held else 0.0
        yield f"balance (largest rank over mean): {load.balance():.3f}"
        yield f"replicated: {human(load.replicated_bytes())} ({share:.1%} of what all ranks hold)"
    for (stored, held_as), count in sorted(load.conversions.items()):
        yield f"converted while reading: {count} tensors {stored} -> {held_as}"
    if load.ignored:
        rules = sorted({rule for rule, _ in load.ignored.values()})
        dropped = sum(size for _, size in load.ignored.values())
        yield f"left out by ignore rules {', '.join(rules)}: {len(load.ignored)} tensors, {human(dropped)}"
    if load.checkpoint is not None and load.checkpoint.total_size is not None:
        total = sum(stored.nbytes for stored in load.checkpoint.tensors.values())
        if total != load.checkpoint.total_size:
            yield f"the index states {load.checkpoint.total_size} bytes, the tensors in its files have {total}"
    if load.zero:
        yield f"biases not in the description, accepted if they are all zero: {len(load.zero)} ({load.zero[0]}, ...)"
    for tensor, tie, _ in load.equal:
        yield f"{tensor} is stored though {tie.path} is tied: accepted if equal"


def ranks_text(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table of what each rank holds, and where it was loaded, what that took."""
    names = {"rank": "rank", "param_bytes": "held", "checkpoint_bytes": "to read", "bytes_read": "read",
             "load_seconds": "seconds", "peak_anon_bytes": "peak memory"}  # fmt: skip
    keys = [key for key in names if key in rows[0]]

    def shown(key: str, value: Any) -> str:
        if value is None:
            return "-"
        return (
            human(value) if key.endswith(("bytes", "read")) else f"{value:.2f}" if key == "load_seconds" else str(value)
        )

    return table([names[key] for key in keys], [[shown(key, row[key]) for key in keys] for row in rows])


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Returns aligned columns; those whose cells start with a digit are set flush right."""
    widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]
    right = [bool(body) and all(row[i][:1].isdigit() or row[i] == "-" for row in body) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        return "  ".join(cells).rstrip()

    return "\n".join([line(head), line(["-" * w for w in widths]), *map(line, body)])


def human(size: float) -> str:
    """Returns bytes in the unit that fits: ``"1.5 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    return _runs([_shape(shape) for shape in shapes], " ")


def _runs(words: Sequence[str], between: str) -> str:
    """Joins words, runs of equal ones as ``word x n``."""
    counted = [(word, len(list(run))) for word, run in groupby(words)]
    if len(counted) == 1 and len(words) > 1:
        return f"{counted[0][0]} each"
    return between.join(word if n == 1 else f"{word} x{n}" for word, n in counted)
