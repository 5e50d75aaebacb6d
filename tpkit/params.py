"""How the stored tensors of a projection relate to its logical weight ``[out, in]``. Pure: no torch, no ranks.

A quant method declares one `ParamSpec` per stored tensor. From that alone the core derives local shapes, copies,
replication and uneven cuts for every parallel style. ``pack`` and ``block`` are one idea: every `per` logical elements
take `cells` stored cells.

    qweight = ParamSpec("int32", dims=(In(pack=8), Out()))                  # 8 nibbles in a word, along the input
    scales = ParamSpec("float16", dims=(In(block=128), Out()))              # one scale for 128 inputs
    weight_scale = ParamSpec("float32", dims=(Segment(),))                  # one for each of q, k, v
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Literal

from tpkit.dtypes import FLOATS, RANGES, dtype_name
from tpkit.errors import PluginError

if TYPE_CHECKING:
    import torch

__all__ = ["Blob", "Dim", "Fixed", "Flat", "Header", "In", "LinearSpec", "Out", "ParamSpec", "Segment"]

Along = Literal["out", "in", "flat", "segment", "fixed", "blob"]


@dataclass(frozen=True)
class Dim:
    """One dimension of a stored tensor. Use the words `Out`, `In`, `Flat`, `Segment`, `Fixed` and `Blob`.

    Attributes:
        along: what it runs along.
        per: logical elements that share stored cells.
        cells: stored cells for `per` elements.
        word: the elements are packed into the cells (False: they share the value of the cells, as of a scale).
        size: cells of a fixed dimension.
    """

    along: Along
    per: int = 1
    cells: int = 1
    word: bool = False
    size: int = 0

    def __post_init__(self) -> None:
        counts = (self.per, self.cells, self.size)
        if not all(type(count) is int for count in counts) or self.per < 1 or self.cells < 1 or self.size < 0:
            raise PluginError(f"dimension {self}: per and cells must be whole numbers of at least 1")

    @property
    def covering(self) -> bool:
        """Says that elements have cells of their own, and come in whole blocks all the same: ``In(per=64, cells=64)``.

        That is how a method asks for all elements of a group, a neighbour's too: to quantise while loading.
        """
        return self.per == self.cells > 1

    def stored(self, elements: int) -> int:
        """Returns the cells that hold a number of elements. A last, short block takes whole words."""
        whole, rest = divmod(elements, self.per)
        return whole * self.cells + (rest if self.covering else self.cells if rest else 0)


def _dim(along: Along, pack: int | None, block: int | None, per: int | None, cells: int) -> Dim:
    given = [value for value in (pack, block, per) if value is not None]
    if len(given) > 1:
        raise PluginError(f"{along}: give one of pack=, block=, per=; not {len(given)} of them")
    return Dim(along, per=given[0] if given else 1, cells=cells, word=bool(given) and block is None)


def Out(*, pack: int | None = None, block: int | None = None, per: int | None = None, cells: int = 1) -> Dim:
    """A dimension along the output features. ``pack=8``: 8 in a word; ``block=128``: 128 share a value."""
    return _dim("out", pack, block, per, cells)


def In(*, pack: int | None = None, block: int | None = None, per: int | None = None, cells: int = 1) -> Dim:
    """A dimension along the input features. ``per=32, cells=3``: 32 three-bit values in 3 words."""
    return _dim("in", pack, block, per, cells)


def Flat(*, pack: int | None = None, block: int | None = None, per: int | None = None, cells: int = 1) -> Dim:
    """A dimension along the row-major flattening of ``[out, in]``. Prefer Out and In where the width divides."""
    return _dim("flat", pack, block, per, cells)


def Segment() -> Dim:
    """One row for each segment (q, k, v). On disk it is absent: a tensor apart gives its row, a fused one gives all."""
    return Dim("segment")


def Fixed(size: int) -> Dim:
    """A dimension of a fixed size that every rank holds whole."""
    return Dim("fixed", size=size)


def Blob() -> Dim:
    """A whole small tensor of any length, handed over for each source as it is stored."""
    return Dim("blob")


@dataclass(frozen=True)
class ParamSpec:
    """One stored tensor of a projection.

    Attributes:
        dtype: element type of the parameter. A float checkpoint tensor is converted among float32, float64, bfloat16
            and float16; every other type must be stored as it is declared.
        dims: what each dimension runs along.
        default: value of every element if the checkpoint has no such tensor; None: it must be there.
        transposed: the dimensions come in reverse order on disk.
        flattened: on disk the dimensions are one, their row-major flattening.
        stored: name on disk where it is not the parameter's own, e.g. ``weight.absmax``.
        made: it is never on disk; `process_weights_after_loading` makes it. It counts in the plan, and its dims serve
            `trim` and `expand`.
        powers: it holds exponents of two (e8m0), whatever type they are stored as; the code 255 is no number.
    """

    dtype: str
    dims: tuple[Dim, ...]
    default: float | None = field(default=None, kw_only=True)
    transposed: bool = field(default=False, kw_only=True)
    flattened: bool = field(default=False, kw_only=True)
    stored: str | None = field(default=None, kw_only=True)
    made: bool = field(default=False, kw_only=True)
    powers: bool = field(default=False, kw_only=True)

    def __init__(
        self,
        dtype: str | torch.dtype,
        dims: tuple[Dim, ...],
        *,
        default: float | None = None,
        transposed: bool = False,
        flattened: bool = False,
        stored: str | None = None,
        made: bool = False,
        powers: bool = False,
    ) -> None:
        object.__setattr__(self, "dtype", dtype_name(dtype))
        object.__setattr__(self, "dims", tuple(dims))
        object.__setattr__(self, "default", default)
        object.__setattr__(self, "transposed", transposed)
        object.__setattr__(self, "flattened", flattened)
        object.__setattr__(self, "stored", stored)
        object.__setattr__(self, "made", made)
        object.__setattr__(self, "powers", powers)
        words = [dim.along for dim in self.dims]
        for along in ("out", "in", "flat", "segment", "blob"):
            if words.count(along) > 1:
                raise PluginError(f"{self.dims}: two dimensions along {along!r}")
        if "segment" in words and ({"out", "flat"} & set(words)):
            raise PluginError(f"{self.dims}: Segment beside Out or Flat says the segments twice")
        if "flat" in words and ({"out", "in"} & set(words)):
            raise PluginError(f"{self.dims}: Flat already runs along Out and In")
        if "blob" in words and len(words) > 1:
            raise PluginError(f"{self.dims}: a Blob stands alone")
        if default is not None:
            _check_default(default, self.dtype, "blob" in words)
        if transposed and flattened:
            raise PluginError(f"{self.dims}: transposed and flattened exclude each other")

    def on_disk(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that is stored, for the shape of its dimensions as they are declared."""
        return tuple(reversed(shape)) if self.transposed else (prod(shape),) if self.flattened else shape

    @property
    def is_blob(self) -> bool:
        """Says that it is handed over whole, as stored."""
        return any(dim.along == "blob" for dim in self.dims)


def _check_default(default: object, dtype: str, blob: bool) -> None:
    if blob or not isinstance(default, int | float) or isinstance(default, bool) or default != default:
        raise PluginError(f"default {default!r} of a {'blob' if blob else dtype} parameter: it must be a number")
    low, high = RANGES[dtype]
    whole = dtype in FLOATS or dtype.startswith("float") or default % 1 == 0
    if not whole or not low <= default <= high:
        raise PluginError(f"default {default!r} is no value of {dtype}, which goes from {low:g} to {high:g}")


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a checkpoint says of a stored tensor before any of it is read.

    Attributes:
        dtype: element type by name.
        shape: as stored.
        encoding: what its bytes mean where the format has a name for it (``Q4_K``); "" for plain elements.
    """

    dtype: str
    shape: tuple[int, ...]
    encoding: str = ""


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """A projection as a quant method sees it: logical sizes and stored headers, nothing about ranks.

    Attributes:
        name: its dotted path, for messages.
        in_features: size of the logical input.
        segments: name and size of each segment of the output, in order; one unnamed segment if it is not packed.
        dtype: the model's dtype by name.
        embedding: it is looked up by row, not multiplied.
        transposed: the description says that the unquantised weight is stored ``[in, out]``.
        stored: for each source on disk, by parameter name, the header; empty if there is no checkpoint.
    """

    name: str
    in_features: int
    segments: tuple[tuple[str, int], ...]
    dtype: str
    embedding: bool = False
    transposed: bool = False
    stored: Mapping[str, Mapping[str, Header]] = field(default_factory=dict)

    @property
    def out_features(self) -> int:
        """Size of the logical output."""
        return sum(size for _, size in self.segments)

    def header(self, name: str) -> Header | None:
        """Returns the header of a stored tensor by its name on disk, of the first source that has it."""
        return next((held[name] for held in self.stored.values() if name in held), None)

    def dtype_of(self, name: str, default: str, among: Collection[str] | None = None) -> str:
        """Returns the type a tensor is stored in, so that it can be kept in it.

        Args:
            name: its name on disk.
            default: where no checkpoint tells.
            among: types that make sense; None: the plain floats. Another one gives `default`, so that loading says
                what does not fit.
        """
        header = self.header(name)
        known = FLOATS if among is None else among
        return header.dtype if header is not None and header.dtype in known else default
