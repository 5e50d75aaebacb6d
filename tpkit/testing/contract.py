"""Checks of what a method declares: pure, strict, the same in every process. Nothing is computed here but a shard."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args
from unittest import mock

import torch
from pydantic import BaseModel

from tpkit.checkpoint.stored import matcher
from tpkit.params import Header, LinearSpec, ParamSpec
from tpkit.quant import QuantMethod, Target
from tpkit.registry import API
from tpkit.testing.finding import Finding, guarded, is_raw, told
from tpkit.testing.shards import inputs, loaded, require_sound
from tpkit.testing.subject import Subject, linear_spec

__all__ = [
    "create_weights_is_pure",
    "create_weights_needs_no_headers",
    "for_module_answers",
    "is_a_method",
    "knows_no_rank",
    "options_are_strict",
    "pickles",
    "unused_is_unused",
]

#: an option, a tensor and a field that no format has
UNKNOWN = "nobody_knows_this"

#: how launchers tell a process its place
PLACES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


def is_a_method(subject: Subject) -> None:
    """It is written for this contract, and says what it is."""
    method: Any = subject.method
    if getattr(method, "api", None) != API:
        raise Finding("method", f"{type(method).__name__}.api is {getattr(method, 'api', None)!r}, tpkit has {API}")
    if not isinstance(method.options, type(method).Options):
        raise Finding(
            "method",
            f"{type(method).__name__}.options is {type(method.options).__name__}, Options is "
            f"{type(method).Options.__name__}: call super().__init__(options)",
        )
    with guarded("method", "label()"):
        label = method.label()
    if not isinstance(label, str) or "\n" in label:
        raise Finding("method", f"label() returned {label!r}, not one line of text")


def _headers(subject: Subject, rows: int, width: int) -> dict[str, Header]:
    stored = subject.encoded(rows, width).stored
    return {
        name: Header(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in stored.items()
    }


def _specs(subject: Subject, headers: bool) -> Iterator[LinearSpec]:
    """Yields projections that differ in every respect that a method may see."""
    tall, short, wide, narrow = subject.sizes.tall, subject.sizes.short, subject.sizes.wide, subject.sizes.narrow
    for rows, width in ((tall, wide), (short, narrow)):
        stored: Any = {"stored": {"": _headers(subject, rows, width)}} if headers else {}
        yield linear_spec(rows, width, **stored)
        yield linear_spec(rows, width, dtype="bfloat16", **stored)
        yield linear_spec(rows, width, embedding=True, **stored)
    apart = {name: _headers(subject, rows, wide) for name, rows in (("q", tall), ("k", short), ("v", short))}
    kept: Any = {"stored": apart} if headers else {}
    yield linear_spec([tall, short, short], wide, **kept)


def _asked(method: QuantMethod, linear: LinearSpec) -> dict[str, ParamSpec]:
    with guarded("create-weights", f"create_weights of {linear.segments} x {linear.in_features}"):
        return dict(method.parameters(linear, False))


def create_weights_needs_no_headers(subject: Subject) -> None:
    """A model can be planned without a checkpoint, and the headers change types alone, not what is there."""
    for bare, told_ in zip(_specs(subject, False), _specs(subject, True), strict=True):
        without, with_ = _asked(subject.method, bare), _asked(subject.method, told_)
        lost = sorted(set(without) - set(with_))
        if lost:
            raise Finding("create-weights", f"with the headers of a checkpoint, {', '.join(lost)} is not declared")


def create_weights_is_pure(subject: Subject) -> None:
    """Asked twice, asked in another order, and asked of a twin, it answers the same; and it changes nothing."""
    method, twin = subject.method, subject.twin()
    for headers in (False, True):
        specs = list(_specs(subject, headers))
        before = {name: repr(value) for name, value in vars(method).items()}
        first = [_asked(method, linear) for linear in specs]
        again = [_asked(method, linear) for linear in reversed(specs)][::-1]
        for linear, a, b, c in zip(specs, first, again, [_asked(twin, linear) for linear in specs], strict=True):
            if not a == b == c:
                raise Finding("impure", f"create_weights answered {a}, then {b if a != b else c} for {linear.segments}")
        changed = [name for name, value in before.items() if repr(vars(method).get(name)) != value]
        if changed:
            raise Finding("impure", f"create_weights changed self.{', self.'.join(changed)}")
        for linear, a in zip(specs, first, strict=True):
            a.clear()
            if not _asked(method, linear):
                raise Finding("impure", "create_weights returns a dict that it keeps: what a caller does to it stays")


@contextmanager
def _placed(rank: int, size: int, asked: list[str]) -> Iterator[None]:
    """Makes this process look like one of several, and notes who asks torch.distributed about it."""

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "?")
            if caller.partition(".")[0] not in ("torch", "tpkit") or caller.startswith("tpkit.testing"):
                asked.append(f"{caller} calls torch.distributed.{name}()")
            return real(*args, **kwargs)

        return ask

    values = {name: str(size if "SIZE" in name else rank) for name in PLACES}
    names = [name for name in ("get_rank", "get_world_size", "is_initialized") if hasattr(torch.distributed, name)]
    noted: Any = {name: noting(name, getattr(torch.distributed, name)) for name in names}
    with mock.patch.dict(os.environ, values), mock.patch.multiple(torch.distributed, **noted):
        yield


class _NoPlace:
    """Stands for layer.tp while a method computes."""

    def __getattr__(self, name: str) -> Any:
        raise Finding("rank", f"the method reads layer.tp.{name}")


def knows_no_rank(subject: Subject) -> None:
    """What it declares and computes does not depend on which rank of how many the process is."""
    require_sound(subject)
    asked: list[str] = []
    answers, weights = [], []
    for rank, size in ((0, 1), (3, 4)):
        method = subject.twin()
        with _placed(rank, size, asked), guarded("rank", f"as rank {rank} of {size}"):
            answers.append([_asked(method, linear) for linear in _specs(subject, True)])
            layer = loaded(subject, subject.plain, 1, 2, method=method)
            layer.tp = _NoPlace()  # type: ignore[assignment]
            weights.append(method.apply(layer, inputs(layer.in_features, 3, dtype=subject.dtype)))
    if answers[0] != answers[1]:
        raise Finding("rank", f"create_weights answers otherwise when the environment says {', '.join(PLACES[:3])}")
    if not torch.equal(*weights):
        raise Finding("rank", f"the output is another when the environment says {', '.join(PLACES[:3])}")
    if asked:
        raise Finding("rank", asked[0])


def options_are_strict(subject: Subject) -> None:
    """An option that it does not know, or of another type, is refused; options do not change."""
    method = subject.method
    options: type[BaseModel] = type(method).Options
    given = {name: getattr(method.options, name) for name in options.model_fields}
    with guarded("options", f"{options.__name__} does not take its own values {given}"):
        options(**given)
    if _takes(options, {**given, UNKNOWN: 1}):
        raise Finding("options", f"{options.__name__} takes an unknown option {UNKNOWN}=1 (extra='forbid' is missing)")
    for name, value in given.items():
        annotation = options.model_fields[name].annotation
        text = str in (annotation, *get_args(annotation)) or annotation is Any
        if isinstance(value, (bool, int, float)) and not text and _takes(options, {**given, name: str(value)}):
            raise Finding(
                "options", f"{options.__name__} takes {name}={str(value)!r} for {value!r} (strict is missing)"
            )
    if not options.model_config.get("frozen"):
        raise Finding("options", f"{options.__name__} can be changed after it is made (frozen is missing)")
    _reads_config(subject, options)


def _reads_config(subject: Subject, options: type[BaseModel]) -> None:
    """An unknown field of config.json arrives at Options, which refuses it."""
    config = dict(subject.config or {})
    before = repr(config)
    if subject.config is not None:
        with guarded("options", f"read_config of {config}"):
            made = options(**type(subject.method).read_config(config))
        if made != subject.method.options:
            raise Finding(
                "options", f"read_config of {config} gives {made!r}, the method has {subject.method.options!r}"
            )
    try:
        options(**type(subject.method).read_config({**config, UNKNOWN: 1}))
    except Exception:
        if repr(config) != before:
            raise Finding("options", "read_config changes the config that it is given") from None
        return
    raise Finding("options", f"read_config drops a field that it does not know ({UNKNOWN})")


def _takes(options: type[BaseModel], values: Mapping[str, Any]) -> bool:
    try:
        options(**values)
    except Exception:
        return False
    return True


def pickles(subject: Subject) -> None:
    """It goes to a spawned process and computes the same there."""
    method = subject.method
    with guarded("pickle", f"{type(method).__name__} cannot be pickled"):
        twin = pickle.loads(pickle.dumps(method))
    if type(twin) is not type(method) or twin.options != method.options:
        raise Finding("pickle", f"pickled, {method.options!r} becomes {twin.options!r}")
    require_sound(subject)
    layers = [loaded(subject, subject.plain, method=made) for made in (method, twin)]
    if not torch.equal(*(layer(inputs(subject.plain.width, 3, dtype=subject.dtype)) for layer in layers)):
        raise Finding("pickle", "the pickled method gives another output")


def for_module_answers(subject: Subject) -> None:
    """Asked about a part of a layer it gives a method or None, twice the same; what it refuses it refuses by name."""
    rows, width = subject.plain.rows, subject.plain.width
    for kind in ("linear", "head", "embedding"):
        target = Target(
            name="model.layers.0.mlp.down_proj",
            aliases=("model.layers.0.mlp.gate_up_proj",),
            kind=kind,
            in_features=width,
            out_features=rows,
            stored=_headers(subject, rows, width),
        )
        answers: list[Any] = []
        for _ in range(2):
            try:
                answers.append(subject.method.for_module(target))
            except Exception as error:
                if is_raw(error):
                    raise Finding("for-module", f"for_module of a {kind}: {told(error)}") from error
                answers.append(None)
        for answer in answers:
            if answer is not None and not isinstance(answer, QuantMethod):
                raise Finding("for-module", f"for_module of a {kind} returned {answer!r}")
        options = [None if answer is None else (type(answer), answer.options) for answer in answers]
        if options[0] != options[1]:
            raise Finding("for-module", f"for_module of a {kind} gave {options[0]}, then {options[1]}")


def unused_is_unused(subject: Subject) -> None:
    """What it leaves out of a checkpoint is nothing that it declares."""
    names = {spec.stored or name for name, spec in _asked(subject.method, next(_specs(subject, True))).items()}
    for pattern in type(subject.method).unused:
        covered = [n for n in sorted(names) if matcher(pattern).fullmatch(f"model.layers.0.mlp.down_proj.{n}")]
        if covered:
            raise Finding("unused", f"`unused` has {pattern!r}, which covers {', '.join(covered)}")
