"""Computing every rank's shard and comparing it with the reference; and if they differ, finding out why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from unittest import SkipTest

import torch

from tpkit.geometry import local_elements
from tpkit.layers.sharded import ShardedModule
from tpkit.quant import QuantMethod
from tpkit.testing.finding import Finding, is_raw, told
from tpkit.testing.subject import Style, Subject

__all__ = [
    "RANKS",
    "Outcome",
    "difference",
    "examined",
    "inputs",
    "loaded",
    "own_reference",
    "require",
    "require_right",
    "require_sound",
]

#: numbers of ranks to try
RANKS = (1, 2, 3, 4, 5)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one rank's shard came out.

    Attributes:
        style, size, rank: which.
        trim, expand: parameters whose words, or blocks, this shard does not hold as they come: a method has to say
            which elements are meant.
        fault: what is wrong; "" if nothing is.
        raised: the error, if there was one.
        segments: names of the segments whose rows are wrong.
        got: the weight as the method dequantised it, if it did.
    """

    style: Style
    size: int
    rank: int
    trim: frozenset[str] = frozenset()
    expand: frozenset[str] = frozenset()
    fault: str = ""
    raised: Exception | None = None
    segments: tuple[str, ...] = ()
    got: torch.Tensor | None = None

    @property
    def where(self) -> str:
        return f"{self.style.name}, rank {self.rank} of {self.size}"


def inputs(width: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns an input, the same one each time."""
    return torch.randn(*shape, width, generator=torch.Generator().manual_seed(99)).to(dtype)


def loaded(
    subject: Subject, style: Style, rank: int = 0, size: int = 1, *, seed: int = 0, method: QuantMethod | None = None
) -> ShardedModule:
    """Returns a rank's shard, filled."""
    layer = style.build(subject.method if method is None else method, rank, size)
    layer.load(subject.tensors(style, seed))
    return layer


def own_reference(layer: ShardedModule, wholes: list[torch.Tensor]) -> torch.Tensor:
    """Returns this rank's part of the reference, ``[out, in]``."""
    divided, rank = layer.sharded.layer, layer.sharded.rank
    rows = divided.bounds(divided.spec.out, rank)
    ((first, last),) = divided.bounds(divided.spec.in_, rank)
    return torch.cat([whole[start:stop, first:last] for whole, (start, stop) in zip(wholes, rows, strict=True)])


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Returns the largest error over the largest magnitude; infinite where a value is missing."""
    if not wanted.numel():
        return 0.0
    error = (found.to(torch.float64) - wanted.to(torch.float64)).abs()
    if not bool(error.isfinite().all()):
        return float("inf")
    return float(error.max() / wanted.abs().max().clamp(min=1e-30))


def _cut_parameters(layer: ShardedModule) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the parameters whose words, and those whose blocks, hold more than this shard's elements in order."""
    divided, rank = layer.sharded.layer, layer.sharded.rank
    out, in_ = divided.spec.out, divided.spec.in_
    shares = divided.shares(out, rank), divided.shares(in_, rank)
    words: set[str] = set()
    blocks: set[str] = set()
    for name, spec in divided.spec.params:
        held = divided.geometry.local[rank][name].shape
        for position, dim in enumerate(spec.dims):
            if dim.per == 1 or dim.covering:
                continue
            runs = local_elements(dim, out, in_, divided.form, *shares)
            if [(run.start, run.count, run.step) for run in runs] != [(0, held[position] // dim.cells * dim.per, 1)]:
                (words if dim.word else blocks).add(name)
    return frozenset(words), frozenset(blocks)


def _examine(subject: Subject, method: QuantMethod, style: Style, rank: int, size: int) -> Outcome:
    """Loads and computes one shard."""
    layer = None
    try:
        layer = style.build(method, rank, size)
        layer.load(subject.tensors(style))
    except Finding:
        raise
    except Exception as error:
        trim, expand = (frozenset(), frozenset()) if layer is None else _cut_parameters(layer)
        return Outcome(style=style, size=size, rank=rank, fault=told(error), raised=error, trim=trim, expand=expand)
    return examined(subject, method, style, layer, own_reference(layer, subject.references(style)))


def examined(
    subject: Subject, method: QuantMethod, style: Style, layer: ShardedModule, wanted: torch.Tensor
) -> Outcome:
    """Computes a filled shard and compares it with the weight ``[out, in]`` that it should have."""
    trim, expand = _cut_parameters(layer)
    raised: Exception | None = None
    try:
        fault, segments, got = _wrong(subject, method, layer, wanted)
    except Finding:
        raise
    except Exception as error:
        fault, segments, got, raised = told(error), (), None, error
    return Outcome(
        style=style,
        size=layer.tp.size,
        rank=layer.sharded.rank,
        trim=trim,
        expand=expand,
        fault=fault,
        raised=raised,
        segments=segments,
        got=got,
    )


def _wrong(
    subject: Subject, method: QuantMethod, layer: ShardedModule, wanted: torch.Tensor
) -> tuple[str, tuple[str, ...], torch.Tensor | None]:
    """Returns what is wrong with a filled shard, the segments it is wrong in, and its dequantised weight."""
    if not layer.out_features or not layer.in_features:
        return "", (), None  # the core computes nothing with it
    names, got = [part.name for part in layer.sharded.layer.spec.out], None
    if type(method).dequantize is not QuantMethod.dequantize and not layer.kernel:
        made: object = method.dequantize(layer)
        if not isinstance(made, torch.Tensor) or made.shape != wanted.shape or made.dtype != torch.float32:
            shape = f"{list(made.shape)} {made.dtype}" if isinstance(made, torch.Tensor) else type(made).__name__
            raise Finding("dequantize", f"dequantize returned {shape}; {list(wanted.shape)} in float32 is needed")
        got = made
        wrong = _wrong_segments(subject.tolerance, layer, got.t(), wanted.t())
        if wrong:
            error = difference(got, wanted)
            fault = f"dequantize differs from decode() by {error:.2g} of the largest weight{_among(wrong, names)}"
            return fault, wrong, got
    x = inputs(layer.in_features, 3, dtype=subject.dtype)
    y = layer(x.clone())
    expected = x.to(torch.float64) @ wanted.t()
    wrong = _wrong_segments(subject.allowed, layer, y, expected)
    error = difference(y, expected)
    fault = f"the output differs from decode()'s by {error:.2g} of its largest value{_among(wrong, names)}"
    return (fault, wrong, got) if wrong else ("", (), got)


def _wrong_segments(allowed: float, layer: ShardedModule, found: torch.Tensor, wanted: torch.Tensor) -> tuple[str, ...]:
    """Returns the names of the segments whose columns differ, each measured by its own magnitude."""
    sides = zip(
        layer.sharded.layer.spec.out,
        found.split(layer.out_sizes, -1),
        wanted.split(layer.out_sizes, -1),
        strict=True,
    )
    return tuple(part.name or "all" for part, a, b in sides if difference(a, b) > allowed)


def _among(wrong: tuple[str, ...], names: list[str]) -> str:
    return f" in segment {', '.join(map(repr, wrong))} of {names}" if len(names) > 1 else ""


def require_sound(subject: Subject) -> None:
    """Skips a check that says nothing of a method that computes one whole tensor wrongly: another check tells that."""
    if subject.sound is None:
        subject.sound = not _examine(subject, subject.method, subject.plain, 0, 1).fault
    if not subject.sound:
        raise SkipTest("one whole tensor on one rank is wrong already")


def require(subject: Subject, styles: Iterable[Style], ranks: Iterable[int] = RANKS) -> None:
    """Requires that every rank's shard computes its part of the reference.

    Raises:
        Finding: with the likeliest reason, found by comparing which shards are wrong and which are not.
    """
    outcomes = [
        _examine(subject, method, style, rank, size)
        for method in subject.variants()
        for style in styles
        for size in ranks
        for rank in range(size)
    ]
    require_right(subject, outcomes)


def require_right(subject: Subject, outcomes: Iterable[Outcome]) -> None:
    """Requires that no shard came out wrong.

    Raises:
        Finding: with the likeliest reason.
    """
    outcomes = list(outcomes)
    failed = [outcome for outcome in outcomes if outcome.fault]
    if failed:
        raise _diagnosis(subject, failed, [outcome for outcome in outcomes if not outcome.fault])


def _diagnosis(subject: Subject, failed: list[Outcome], right: list[Outcome]) -> Finding:
    """Tells why shards are wrong: what all wrong ones have, and no right one."""
    tried = f"{len(failed)} of {len(failed) + len(right)} shards are wrong"
    plain = [outcome for outcome in failed if not outcome.trim and not outcome.expand]
    if plain:
        first = plain[0]
        message = f"{first.where}: {first.fault} ({tried})"
        if len(first.style.parts) > 1:
            return _segment_finding(subject, first, message)
        if first.raised is not None:
            return _raised_finding(first, message)
        return Finding("values" if first.size == 1 else "cuts", message)
    only_trim = [outcome for outcome in failed if not outcome.expand]
    only_expand = [outcome for outcome in failed if not outcome.trim]
    if only_trim or only_expand:
        kind = "trim" if only_trim else "expand"
        first = (only_trim or only_expand)[0]
    else:
        first = failed[0]
        expands, trims = any(o.expand for o in right), any(o.trim for o in right)
        kind = "cuts" if expands == trims else "trim" if expands else "expand"
    names = {"trim": first.trim, "expand": first.expand, "cuts": first.trim | first.expand}[kind]
    what = f"{', '.join(sorted(names))}: a cut falls inside {'a word' if kind == 'trim' else 'a block'}"
    what += f"; {'words are not trimmed' if kind == 'trim' else 'values of a block are not expanded'} for this shard"
    if kind == "cuts":
        what = f"{', '.join(sorted(names))}: cuts fall inside words and blocks; where they do not, all is right"
    return Finding(kind, f"{first.where}: {first.fault}. {what} ({tried})")


def _raised_finding(outcome: Outcome, message: str) -> Finding:
    from tpkit.errors import LoadError

    if isinstance(outcome.raised, LoadError):
        return Finding("names", message)
    if outcome.raised is not None and is_raw(outcome.raised) and "create_weights" in str(outcome.raised):
        return Finding("create-weights", message)
    return Finding("fails", message)


def _segment_finding(subject: Subject, outcome: Outcome, message: str) -> Finding:
    """Looks for a parameter of which one segment's value was used for another's rows."""
    style = outcome.style
    layer = style.build(subject.method, outcome.rank, outcome.size)
    per_segment = [n for n, spec in layer.sharded.layer.spec.params if any(d.along == "segment" for d in spec.dims)]
    named = f" ({', '.join(per_segment)} has one row for each segment)" if per_segment else ""
    if outcome.got is None or not style.apart or outcome.size != 1:
        return Finding("segments", message + named)
    stored = [subject.encoded(rows, style.width, n).stored for n, (_, rows) in enumerate(style.parts)]
    for k, (part, rows) in enumerate(style.parts):
        got = outcome.got.split([r for _, r in style.parts])[k]
        for name in per_segment:
            disk = dict(layer.sharded.layer.spec.params)[name].stored or name
            for other, (source, _) in enumerate(style.parts):
                if other == k or disk not in stored[other]:
                    continue
                mistaken = subject.decoded({**stored[k], disk: stored[other][disk]}, rows, style.width)
                if difference(got, mistaken) <= subject.tolerance:
                    seen = f"the rows of {part} were computed with the `{name}` of {source}"
                    return Finding("segments", f"{message}: {seen}")
    return Finding("segments", message + named)
