"""What the kit found: a reason that programs can read, what was seen, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tpkit.errors import TpkitError

__all__ = ["REASONS", "Finding", "guarded", "is_raw", "told"]

#: reason -> what to do about it
REASONS = {
    "method": "`method` is an instance of your subclass of QuantMethod, written for this version of the contract",
    "reference": "repair encode() or decode() of the test class: the kit compares with them",
    "names": "encode() gives exactly the tensors that create_weights declares (ParamSpec(..., stored=) says another "
    "name on disk), without the bias",
    "create-weights": "create_weights returns a dict of name -> ParamSpec for every layer, with headers and without",
    "impure": "create_weights answers from its argument and self.options alone, and changes nothing",
    "rank": "compute from layer.in_features, out_features, trim(), expand() and segment_of_row(): the core cuts, a "
    "method never asks for rank, world size or environment",
    "options": "derive Options from tpkit.quant.QuantOptions, and let read_config keep what it does not know",
    "pickle": "keep to plain data in __init__ (no lambda, no open file, no local class): ranks are started by spawning",
    "for-module": "for_module returns self, another instance of a QuantMethod, or None",
    "unused": "`unused` names what computing does not need; a declared tensor is needed",
    "fails": "see the cause; tpkit.PluginError is the error for what a checkpoint or an option does wrong",
    "values": "compare dequantize() with the format's description: one rank and one whole tensor are wrong already, "
    "so it is not about cuts",
    "dequantize": "dequantize returns this rank's [layer.out_features, layer.in_features] in float32",
    "segments": "a packed layer holds several tensors (q, k, v): use layer.segment_of_row() to choose each row's value "
    "of a Segment() parameter, and layer.expand() for blocked ones",
    "trim": "after unpacking words call layer.trim(name, unpacked): a word at the edge of a shard also holds a "
    "neighbour's elements, and the last word may be short",
    "expand": "use layer.expand(name) for one value per local element: a shard may begin inside a block, so that "
    "repeat_interleave from its start is shifted",
    "cuts": "the shard is computed from its own elements alone: see layer.trim(), layer.expand(), layer.aligned()",
    "bias": "apply adds `bias` when it is given one",
    "output-dtype": "apply returns x's dtype: convert the dequantised weight with .to(x.dtype)",
    "precision": "dequantise in float32 and convert once, at the end",
    "input-shape": "apply takes x of any number of dimensions, rows and strides: [..., in] gives [..., out]",
    "mutates-input": "apply leaves x as it is: no in-place operation on it or on a view of it",
    "mutates-weights": "apply and dequantize leave the parameters as they are: no in-place operation on them",
    "aliases": "apply returns memory of its own, not a view of a parameter or of x",
    "nondeterministic": "the same input gives the same output: nothing is remembered from call to call",
    "shared-state": "one instance of a method serves many layers: keep tensors on the layer (layer.hold), not on self",
    "missing-accepted": "declare the tensor unconditionally and without default=; one that really may be absent is "
    "named by `optional` in the test class",
    "extra-accepted": "declare only what the format has; do not take over every header that is found",
    "shape-accepted": "dims follow from the layer's sizes and the options, not from the stored shape",
    "dtype-accepted": "give layer.dtype_of() the types that make sense (among=...), not any header's dtype",
    "raw-error": "raise tpkit.PluginError with the two numbers that do not fit, or let loading refuse it",
    "stored-dtype": "keep values in the type they are stored in, not the model's: "
    "ParamSpec(layer.dtype_of(name, default), ...)",
    "reload": "process_weights_after_loading starts anew each time: the core has filled all declared parameters again",
    "resident": "drop what is not needed any more with layer.drop(...), and dequantise for each call",
    "embedding": "embedding returns rows [..., in] of the dequantised weight, or for_module gives None for embeddings",
}


class Finding(AssertionError):
    """One thing that a quant method does wrong.

    Attributes:
        reason: a key of `REASONS`.
        message: what was seen, and where.
    """

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        self.message = message
        super().__init__(f"{message}\n  what to do: {REASONS[reason]}\n  reason: {reason}")


def told(error: BaseException) -> str:
    """Returns an error in one line, with the cause that a wrapping error has."""
    cause = error.__cause__ if isinstance(error, TpkitError) and error.__cause__ is not None else error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:400]}"


def is_raw(error: BaseException) -> bool:
    """Says whether an error is none that the method or the core raised on purpose."""
    return not isinstance(error, TpkitError) or not isinstance(error.__cause__, (TpkitError, type(None)))


@contextmanager
def guarded(reason: str, doing: str) -> Iterator[None]:
    """Makes a finding of any error of the plugin."""
    try:
        yield
    except Finding:
        raise
    except Exception as error:
        raise Finding(reason, f"{doing}: {told(error)}") from error
