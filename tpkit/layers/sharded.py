"""What all layers with parameters have in common: their shard, its quant method, and loading by the one plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from tpkit.distributed.group import TensorParallel
from tpkit.division import DividedLayer
from tpkit.dtypes import torch_dtype
from tpkit.errors import PluginError
from tpkit.geometry import Shares, cuts_are_whole, local_elements
from tpkit.kernels import kernel_of
from tpkit.layout import Run, Source
from tpkit.params import Dim, LinearSpec
from tpkit.partition import Side, side_size
from tpkit.quant import QuantMethod

#: attributes that layers of some kind set after their parameters are named; a quant method cannot have them either
RESERVED = frozenset(
    ("compute_dtype", "eps", "first_row", "gather_output", "input_is_parallel", "kernel", "output_scale",
     "output_softcap", "parts", "reduce_results", "scale_rounded", "skip_bias_add")
)  # fmt: skip

__all__ = ["Sharded", "ShardedModule"]


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """A layer's shard on one rank: everything a module needs to be made.

    Attributes:
        layer: the layer and what every rank holds of it.
        rank: whose shard this is.
        method: computes with it; None for norms and other layers that do not multiply.
        device: where its parameters live.
        dtype: name of the dtype that the model computes in.
        linear: what the method was asked about.
        lazy: parameters take no memory before they are loaded (see `ShardedModule.allocate`).
    """

    layer: DividedLayer
    rank: int
    method: QuantMethod | None = None
    device: torch.device | str | None = None
    dtype: str = "float32"
    linear: LinearSpec | None = None
    lazy: bool = False


class ShardedModule(nn.Module):
    """A module whose parameters are one rank's shard of a layer.

    Attributes:
        sharded: the shard; it knows the sizes of all ranks.
        tp: this rank's place.
        quant_method: computes with the parameters; None for layers that do not multiply.
        out_sizes, in_sizes: this rank's size of each segment of the output and of the input.
        kernel: name of the quant method's kernel that serves this shard; "": it dequantises.

    Args:
        sharded: the shard.
        tp: this rank's place.
        tied: a module whose parameters it uses as its own (a tied head shares the embedding's shard).
    """

    bias: nn.Parameter | None
    weight: nn.Parameter

    def __init__(self, sharded: Sharded, tp: TensorParallel, *, tied: ShardedModule | None = None) -> None:
        super().__init__()
        self.tp = tp
        self.sharded = sharded
        self.quant_method = sharded.method
        layer, rank = sharded.layer, sharded.rank
        self.out_sizes = layer.sizes(layer.spec.out, rank)
        self.in_sizes = layer.sizes(layer.spec.in_, rank)
        self.out_features, self.in_features = sum(self.out_sizes), sum(self.in_sizes)
        divided = [any(p.axis and p.axis.divided for p in side) for side in (layer.spec.out, layer.spec.in_)]
        self.out_divided, self.in_divided = (flag and self.tp.size > 1 for flag in divided)
        #: whole tensors handed over as stored: parameter -> segment -> tensor
        self.blobs: dict[str, dict[str, torch.Tensor]] = {} if tied is None else tied.blobs
        self._local_elements: dict[Dim, list[Run]] = {}
        self._rows: torch.Tensor | None = None
        self._sharers: list[ShardedModule] = []
        self.is_tied = tied is not None
        self.register_parameter("bias", None)
        self._check_names()
        self._choose_kernel()
        if tied is not None:
            tied._sharers.append(self)
            for name, parameter in tied.named_parameters():
                self.register_parameter(name, parameter)
        elif sharded.lazy:
            self._allocate_missing(torch.device("meta"))
        else:
            self._allocate_missing(sharded.device)

    def _check_names(self) -> None:
        for name, spec in self.sharded.layer.spec.params:
            if not spec.is_blob and name != "bias" and (hasattr(self, name) or name in RESERVED):
                raise PluginError(
                    f"{type(self.quant_method).__name__} names a parameter {name!r}, which a layer uses itself"
                )

    def _choose_kernel(self) -> None:
        method, device = self.quant_method, torch.device(self.sharded.device or torch.get_default_device()).type
        shard = self.sharded
        self.kernel = kernel_of(method.kernels, shard.layer, shard.rank, device, shard.dtype) if method else ""

    def _allocate_missing(self, device: torch.device | str | None) -> None:
        """Makes every declared parameter that is not there as declared."""
        layer, rank = self.sharded.layer, self.sharded.rank
        for name, spec in layer.spec.params:
            shape, dtype = layer.geometry.local[rank][name].shape, torch_dtype(spec.dtype)
            held = self._parameters.get(name)
            if not spec.is_blob and (held is None or held.shape != shape or held.dtype != dtype or held.is_meta):
                self.hold(name, torch.empty(shape, dtype=dtype, device=device))

    def allocate(self) -> None:
        """Gives memory to parameters that have none yet. The loader calls it before the first byte of a layer."""
        if any(parameter.is_meta for parameter in self._parameters.values() if parameter is not None):
            self._allocate_missing(self.sharded.device)

    @property
    def path(self) -> str:
        """Its dotted path in the model, for messages; "" where it stands alone."""
        return self.sharded.layer.spec.path

    def _name(self) -> str:
        """Returns what messages call it: its path, or its class where it stands alone."""
        return self.path or type(self).__name__

    @property
    def output_offsets(self) -> list[int]:
        """Where each segment begins in this rank's output."""
        return [sum(self.out_sizes[:n]) for n in range(len(self.out_sizes))]

    def adopt(self, layer: DividedLayer) -> None:
        """Takes the layer as it is stored in another form: packed words and blocks may lie otherwise in this shard."""
        device = next((p.device for p in self.parameters() if not p.is_meta), self.sharded.device)
        self.sharded = replace(self.sharded, layer=layer)
        self._local_elements.clear()
        self.blobs.clear()
        declared = {name for name, _ in layer.spec.params}
        self.drop(*[name for name in self._parameters if name not in declared and name != "bias"])
        self._choose_kernel()
        self._allocate_missing(device)

    def load(self, tensors: Mapping[str, torch.Tensor], *, sharded: bool = False) -> None:
        """Fills the parameters through the loader's own plan.

        Args:
            tensors: full tensors by name: ``weight``; for packed layers either each part (``q_proj.weight``) or the
                tensor fused on disk (``weight``), which is cut into its parts.
            sharded: each tensor already is this rank's piece.

        Raises:
            LoadError: unknown, missing, wrongly shaped or typed tensors (a ValueError).
        """
        from tpkit.checkpoint.one_layer import load_layer

        load_layer(self, tensors, pieces=sharded)

    # what a quant method may use in process_weights_after_loading, dequantize and apply

    def hold(self, name: str, tensor: torch.Tensor) -> None:
        """Registers a tensor as a parameter, in place of one of that name; a tied head sees it too."""
        parameter = nn.Parameter(tensor, requires_grad=False)
        for module in (self, *self._sharers):
            module._parameters.pop(name, None)
            module.register_parameter(name, parameter)

    def drop(self, *names: str) -> None:
        """Removes parameters that are not needed any more."""
        for module in (self, *self._sharers):
            for name in names:
                module._parameters.pop(name, None)

    def aligned(self, name: str | None = None) -> bool:
        """Says whether every cut of a parameter (or of all) falls between its words, groups and blocks on this rank."""
        params = dict(self.sharded.layer.spec.params)
        dims = [dim for spec in (params.values() if name is None else [params[name]]) for dim in spec.dims]
        return all(cuts_are_whole(dim, *self._place) for dim in dims)

    def expand(self, name: str, value: torch.Tensor | None = None) -> torch.Tensor:
        """Returns one value per local element along every blocked dimension of a parameter (a scale per weight).

        Args:
            name: the parameter, whose dims tell what shares a value.
            value: a tensor of its shape in its place.
        """
        tensor = getattr(self, name) if value is None else value
        for position, dim in enumerate(dict(self.sharded.layer.spec.params)[name].dims):
            if dim.per > 1 and not dim.word:
                tensor = tensor.repeat_interleave(dim.per, position)
                tensor = self._take(tensor, position, self._elements(dim))
        return tensor

    def trim(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Drops, from unpacked elements of a parameter, those that belong to a neighbour of this rank.

        Args:
            name: the parameter.
            value: its unpacked elements: every packed dimension has ``per`` elements for each stored word.
        """
        for position, dim in enumerate(dict(self.sharded.layer.spec.params)[name].dims):
            if dim.per > 1 and dim.word:
                value = self._take(value, position, self._elements(dim))
        return value

    @staticmethod
    def _take(value: torch.Tensor, position: int, runs: list[Run]) -> torch.Tensor:
        pieces = []
        for run in runs:
            if run.step == 1:
                pieces.append(value.narrow(position, run.start, run.count))
            else:
                index = torch.arange(run.start, run.stop, run.step, device=value.device)
                pieces.append(value.index_select(position, index))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces or [value.narrow(position, 0, 0)], position)

    def _elements(self, dim: Dim) -> list[Run]:
        if dim not in self._local_elements:
            self._local_elements[dim] = local_elements(dim, *self._place)
        return self._local_elements[dim]

    @property
    def _place(self) -> tuple[Side, Side, tuple[Source, ...], Shares, Shares]:
        layer, rank = self.sharded.layer, self.sharded.rank
        out, in_ = layer.spec.out, layer.spec.in_
        return out, in_, layer.form, layer.shares(out, rank), layer.shares(in_, rank)

    def segment_of_row(self) -> torch.Tensor:
        """Returns, for each local output row, the number of the segment it belongs to. ``[out]`` int64."""
        device = next((p.device for p in self._parameters.values() if p is not None), torch.device("cpu"))
        if self._rows is None or self._rows.device != device:
            counts = torch.tensor(self.out_sizes, dtype=torch.int64)
            self._rows = torch.repeat_interleave(torch.arange(len(self.out_sizes)), counts).to(device)
        return self._rows

    def extra_repr(self) -> str:
        layer = self.sharded.layer.spec
        full = f"{side_size(layer.in_)} -> {side_size(layer.out)}" if layer.in_ else f"{side_size(layer.out)}"
        return f"{full}, rank {self.sharded.rank}: {self.in_features} -> {self.out_features}"
