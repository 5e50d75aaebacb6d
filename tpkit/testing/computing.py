"""Checks of what a method computes: every style on 1 to 5 ranks, every dtype, every shape of input."""

from __future__ import annotations

from dataclasses import replace
from unittest import SkipTest

import torch

from tpkit.layers.sharded import ShardedModule
from tpkit.quant import Target
from tpkit.testing.finding import Finding, guarded
from tpkit.testing.several import require_experts
from tpkit.testing.shards import RANKS, difference, inputs, loaded, own_reference, require, require_sound
from tpkit.testing.subject import PRECISION, Subject

__all__ = [
    "applies_to_any_shape",
    "column",
    "embedding",
    "experts",
    "head",
    "keeps_dtype",
    "leaves_input_and_weights",
    "merged",
    "merged_fused",
    "one_rank",
    "qkv",
    "qkv_few_kv_heads",
    "qkv_fused",
    "row",
    "uses_bias",
]


def one_rank(subject: Subject) -> None:
    """One whole tensor on one rank equals the author's decode()."""
    require(subject, [subject.plain], ranks=[1])


def column(subject: Subject) -> None:
    """Output features are divided."""
    require_sound(subject)
    require(subject, [subject.plain, subject.ragged])


def row(subject: Subject) -> None:
    """Input features are divided: cuts fall inside words and groups."""
    require_sound(subject)
    few, sizes = subject.sizes.few, subject.sizes
    require(subject, [subject.row(few, sizes.wide), subject.row(few, sizes.narrow)])


def merged(subject: Subject) -> None:
    """Two parts that are stored apart, each with scales of its own."""
    require_sound(subject)
    sizes = subject.sizes
    pairs = [([sizes.tall, sizes.tall], sizes.wide), ([sizes.short, sizes.tall], sizes.narrow)]
    require(subject, [subject.merged(rows, width, apart=True) for rows, width in pairs])


def merged_fused(subject: Subject) -> None:
    """Two parts in one tensor: a block may reach from one part into the next."""
    _require_fused(subject)
    sizes = subject.sizes
    pairs = [([sizes.tall, sizes.tall], sizes.wide), ([sizes.short, sizes.tall], sizes.narrow)]
    require(subject, [subject.merged(rows, width, apart=False) for rows, width in pairs])


def qkv(subject: Subject) -> None:
    """Nine heads and three kv heads, stored apart."""
    require_sound(subject)
    require(subject, [subject.qkv(9, 3, subject.sizes.wide, apart=True)])


def qkv_fused(subject: Subject) -> None:
    """Nine heads and three kv heads in one tensor."""
    _require_fused(subject)
    require(subject, [subject.qkv(9, 3, subject.sizes.wide, apart=False)])


def qkv_few_kv_heads(subject: Subject) -> None:
    """One kv head for four heads: several ranks hold it; with five ranks one holds nothing."""
    require_sound(subject)
    require(subject, [subject.qkv(4, 1, subject.sizes.narrow, apart=True)])


def _require_fused(subject: Subject) -> None:
    require_sound(subject)
    if not subject.fused:
        raise SkipTest("the format is not stored fused (fused = False)")


def head(subject: Subject) -> None:
    """A projection to the vocabulary, divided by rows."""
    require_sound(subject)
    require(subject, [subject.head(subject.sizes.short + subject.sizes.tall, subject.sizes.narrow)])


def embedding(subject: Subject) -> None:
    """Rows looked up in every rank's shard, if the method takes embeddings."""
    require_sound(subject)
    style = subject.embedding(subject.sizes.short + subject.sizes.tall, subject.sizes.narrow)
    target = Target(name="model.embed_tokens", kind="embedding", in_features=style.width, out_features=style.rows)
    with guarded("for-module", "for_module of an embedding"):
        method = subject.method.for_module(target)
    if method is None:
        raise SkipTest("for_module gives None for embeddings")
    for size in RANKS:
        for rank in range(size):
            where = f"{style.name}, rank {rank} of {size}"
            with guarded("embedding", where):
                layer = loaded(subject, style, rank, size, method=method)
                if not layer.out_features:
                    continue
                wanted = own_reference(layer, subject.references(style))
                ids = torch.arange(layer.out_features).flip(0).repeat_interleave(2).expand(2, -1)  # each four times
                found = method.embedding(layer, ids)
            if found.shape != (*ids.shape, style.width) or not found.is_floating_point():
                raise Finding("embedding", f"{where}: {list(ids.shape)} ids gave {list(found.shape)} {found.dtype}")
            error = difference(found, wanted[ids])
            if error > subject.tolerance:
                raise Finding("embedding", f"{where}: rows differ from decode() by {error:.2g} of the largest weight")


def experts(subject: Subject) -> None:
    """Several experts, each under its number and stacked, divided by expert and by width."""
    require_sound(subject)
    require_experts(subject)


def uses_bias(subject: Subject) -> None:
    """A bias is added, once, to the rows it belongs to."""
    require_sound(subject)
    sizes = subject.sizes
    for style in (subject.plain, subject.merged([sizes.tall, sizes.tall], sizes.wide, apart=True)):
        tensors, deep = subject.tensors(style), inputs(style.width, 2, 3, dtype=subject.dtype)
        largest = max(float((deep.to(torch.float64) @ whole.t()).abs().max()) for whole in subject.references(style))
        for part, rows in style.parts:
            name = f"{part}.bias" if style.apart else "bias"
            tensors[name] = (inputs(rows, 1).flatten() + 2) * largest  # to be seen in any dtype
        for rank, size in ((0, 1), (1, 2)):
            with guarded("fails", f"{style.name} with a bias, rank {rank} of {size}"):
                layer = style.build(subject.method, rank, size, bias=True)
                layer.load(tensors)
                without = loaded(subject, style, rank, size)
                assert layer.bias is not None  # noqa: S101 - asked for above
            for x in (deep[0], deep):
                with guarded("fails", f"{style.name} with a bias, rank {rank} of {size}, x {list(x.shape)}"):
                    y, plain = layer(x.clone()), without(x.clone())
                if difference(y, plain.double() + layer.bias) > max(subject.allowed, 1e-3):
                    seen = "it is left out" if difference(y, plain) <= subject.allowed else "something else is"
                    where = f"{style.name}, rank {rank} of {size}, x {list(x.shape)}"
                    raise Finding("bias", f"{where}: the bias is not added; {seen}")


def keeps_dtype(subject: Subject) -> None:
    """Models in float32, bfloat16 and float16 get outputs of their dtype, close to the reference."""
    require_sound(subject)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for style in (subject.plain, subject.row(subject.sizes.few, subject.sizes.narrow)):
            reason = "fails" if dtype == torch.float32 else "output-dtype"
            with guarded(reason, f"{style.name} in a model of {dtype}"):
                layer = replace(style, dtype=dtype).build(subject.method)
                layer.load(subject.tensors(style))
                x = inputs(style.width, 3, dtype=dtype)
                y = layer(x.clone())
            if y.dtype != dtype:
                raise Finding("output-dtype", f"{style.name}: x is {dtype}, the output is {y.dtype}")
            wanted = x.to(torch.float64) @ own_reference(layer, subject.references(style)).t()
            error = difference(y, wanted)
            if error > max(PRECISION.get(dtype, 0), subject.tolerance):
                raise Finding("precision", f"{style.name} in {dtype}: {error:.2g} of the largest output away")


def applies_to_any_shape(subject: Subject) -> None:
    """Inputs of one, two and three dimensions, without rows, with many, and with other strides."""
    require_sound(subject)
    for style in (subject.plain, subject.ragged):
        layer, width = loaded(subject, style), style.width
        x = inputs(width, 2, 3, dtype=subject.dtype)
        with guarded("input-shape", f"an input of {[6, width]}"):
            y = layer(x.clone().reshape(6, width)).reshape(2, 3, -1)
        tried = {
            "one dimension": (x[0, 0], y[0, 0]),
            "three dimensions": (x, y),
            "no rows": (x[0, :0], y[0, :0]),
            "three dimensions and no rows": (x[:, :0], y[:, :0]),
            "other strides": (x.transpose(0, 1), y.transpose(0, 1)),
            "gaps in a row": (torch.stack([x, x], -1)[..., 0], y),
        }
        for said, (given, wanted) in tried.items():
            what = f"{style.name}: an input with {said}, {list(given.shape)}"
            with guarded("input-shape", what):
                found = layer(_copied(given))
            if found.shape != wanted.shape or difference(found, wanted) > subject.allowed:
                raise Finding("input-shape", f"{what}, gives another output than the same rows in two dimensions")
    _applies_to_many_rows(subject)


def _applies_to_many_rows(subject: Subject) -> None:
    """Seven rows over and over give the output of the seven: kernels take other ways from some number of rows on."""
    tall, least = subject.sizes.tall, max((kernel.out_minimum for kernel in subject.method.kernels), default=1)
    style = subject.column(tall * -(-least // tall), subject.sizes.wide)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        few = inputs(style.width, 7, dtype=dtype)
        with guarded("fails" if dtype == subject.dtype else "output-dtype", f"{style.name} in a model of {dtype}"):
            layer = replace(style, dtype=dtype).build(subject.method)
            layer.load(subject.tensors(style))
            wanted = layer(few.clone())
        for rows in (20, 150):
            what = f"{style.name} in {dtype}: an input of {rows} rows"
            with guarded("input-shape", what):
                y = layer(few.repeat(-(-rows // 7), 1)[:rows])
            expected = wanted.repeat(-(-rows // 7), 1)[:rows]
            if y.shape != expected.shape or difference(y, expected) > max(PRECISION.get(dtype, 0), subject.tolerance):
                raise Finding("input-shape", f"{what} gives another output than the same rows, seven at a time")


def _copied(x: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the same strides."""
    made = x.new_empty(x.untyped_storage().nbytes() // x.element_size()).as_strided(x.shape, x.stride())
    return made.copy_(x)


def leaves_input_and_weights(subject: Subject) -> None:
    """Computing changes neither x nor a parameter, shares memory with neither, and can be repeated."""
    require_sound(subject)
    ragged = subject.row(subject.sizes.few, subject.sizes.narrow)
    for style, rank, size in ((subject.plain, 0, 1), (ragged, 1, 2)):
        layer = loaded(subject, style, rank, size)
        x = inputs(layer.in_features, 3, dtype=subject.dtype)
        given, held = x.clone(), {name: tensor.clone() for name, tensor in _tensors(layer).items()}
        y = layer(given)
        kept = y.clone()
        if not torch.equal(given, x):
            raise Finding("mutates-input", f"{style.name}: x is another after apply")
        for name, tensor in _tensors(layer).items():
            if name in held and not torch.equal(_bits(tensor), _bits(held[name])):
                raise Finding("mutates-weights", f"{style.name}: {name} is another after apply")
        storages = {tensor.untyped_storage().data_ptr(): name for name, tensor in _tensors(layer).items()}
        storages[given.untyped_storage().data_ptr()] = "x"
        shared = storages.get(y.untyped_storage().data_ptr())
        if shared is not None:
            raise Finding("aliases", f"{style.name}: the output is a view of {shared}")
        y.zero_()
        if not torch.equal(layer(x.clone()), kept):
            raise Finding("nondeterministic", f"{style.name}: the second call with one input gives another output")
    _serves_two_layers(subject)


def _serves_two_layers(subject: Subject) -> None:
    style = subject.plain
    one, x = loaded(subject, style), inputs(style.width, 3, dtype=subject.dtype)
    y = one(x.clone())
    two = loaded(subject, style, seed=7)
    two(x.clone())
    if not torch.equal(one(x.clone()), y):
        raise Finding(
            "shared-state", "after another layer was loaded with the same method, the first gives another output"
        )


def _tensors(layer: ShardedModule) -> dict[str, torch.Tensor]:
    named = [*layer.named_parameters(), *layer.named_buffers()]
    blobs = [(f"{name} of {part!r}", t) for name, parts in layer.blobs.items() for part, t in parts.items()]
    return {name: tensor.data for name, tensor in [*named, *blobs] if tensor.numel()}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes: float8 has no comparison, and NaN is not equal to itself."""
    return tensor.contiguous().flatten().view(torch.uint8)
