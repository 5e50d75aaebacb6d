"""The contract of a quant method: what it stores, and how it multiplies. It never sees a rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from tpkit.errors import PluginError, TpkitError
from tpkit.params import LinearSpec, Out, ParamSpec
from tpkit.quant.target import Target

if TYPE_CHECKING:
    import torch

__all__ = ["Kernel", "QuantMethod", "QuantOptions", "plugin_errors"]


class QuantOptions(BaseModel):
    """Base of a method's options; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A fast way to multiply, and what it needs. Whether a shard gets it is decided in the plan, and printed.

    Only kernels that compute what the format says belong here: one that rounds scales, or accumulates lower, is another
    precision and has to be asked for by an option.

    Attributes:
        name: how `layer.kernel` and the plan call it.
        devices: types of device that have it.
        dtypes: dtypes of the model that it takes; empty: all.
        out_minimum: a rank's shard must have at least so many output features: what it pads would cost too much.
        out_multiple, in_multiple: the features of a rank's shard must be multiples of these.
        whole: cuts must fall between the words, groups and blocks of every parameter.
        stored: types that parameters must have, by name; None: such a parameter must not be there.
    """

    name: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = ()
    out_minimum: int = 1
    out_multiple: int = 1
    in_multiple: int = 1
    whole: bool = True
    stored: tuple[tuple[str, str | None], ...] = ()


@contextmanager
def plugin_errors(method: object, step: str, layer: str) -> Iterator[None]:
    """Says whose code raised: an error of a plugin that is none of ours becomes a PluginError with its cause."""
    try:
        yield
    except TpkitError:
        raise
    except Exception as cause:
        kind = method if isinstance(method, type) else type(method)
        raise PluginError(
            f"{step} of {kind.__name__} failed for {layer or 'a layer'}: {type(cause).__name__}: {cause}",
            hint=f"the fault is in {kind.__module__}",
        ) from cause


class QuantMethod:
    """Base of a quant plugin (entry-point group ``tpkit.quant_methods``).

    A complete one has `create_weights` and `dequantize`; a faster `apply` is a matter of taste.

    Attributes:
        api: version of the contract it is written for.
        Options: its options in a description or in config.json.
        unused: patterns (``*`` is one dotted component, ``**`` one or more) of tensors that checkpoints of this format
            hold, and that computing does not need, such as scales of a quantised KV cache. The plan lists them.
        kernels: what `apply` may use, best first; see `Kernel`. None fits: it dequantises.
    """

    api: ClassVar[int] = 1
    Options: ClassVar[type[BaseModel]] = QuantOptions
    unused: ClassVar[tuple[str, ...]] = ()
    kernels: tuple[Kernel, ...] = ()

    def __init__(self, options: BaseModel | None = None) -> None:
        self.options: Any = options if options is not None else self.Options()

    # which modules it is for

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Translates a quantization_config into options.

        Args:
            config: as it stands in config.json (or the ``quantization`` of hf_quant_config.json), without quant_method.

        Returns:
            what `Options` takes. What a quantiser notes and computing does not need has to be dropped by name;
            everything else that `Options` does not know is an error.
        """
        return dict(config)

    def for_module(self, target: Target) -> QuantMethod | None:
        """Decides what one part of a layer gets: this method, one with other options, or None: it is not quantised.

        Asked for each part that is stored under a name of its own. Parts of a packed layer that get different
        answers, or for which `create_weights` answers differently, are built apart.
        """
        return self if target.kind == "linear" else None

    def label(self) -> str:
        """Returns what the printed plan says of it beside its name, e.g. ``4 bit g128``."""
        return ""

    # what is stored

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        """Returns what is stored for a projection, by parameter name. Pure: same answer for the same layer."""
        raise NotImplementedError

    def parameters(self, layer: LinearSpec, bias: bool) -> tuple[tuple[str, ParamSpec], ...]:
        """Returns the checked answer of `create_weights`, and the bias that is the core's own.

        Raises:
            PluginError: if the answer is not a dict of ParamSpec, or names the bias.
        """
        with plugin_errors(self, "create_weights", layer.name):
            answer: object = self.create_weights(layer)  # a plugin's: checked, not believed
        who = f"create_weights of {type(self).__name__} for {layer.name or 'a layer'}"
        if not isinstance(answer, Mapping) or not answer:
            raise PluginError(f"{who} returned {answer!r}, not a dict of name -> ParamSpec")
        wrong = [name for name, p in answer.items() if not isinstance(p, ParamSpec) or not str(name).isidentifier()]
        if wrong or "bias" in answer:
            raise PluginError(
                f"{who}: {wrong or ['bias']}: names are identifiers other than 'bias', values are ParamSpec",
                hint="a name on disk that is no identifier is said by ParamSpec(..., stored=...)",
            )
        names = [spec.stored or name for name, spec in answer.items()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or "bias" in names:
            raise PluginError(f"{who}: {twice or ['bias']} would be filled twice from one stored tensor")
        own = {"bias": ParamSpec(layer.dtype, dims=(Out(),))} if bias else {}
        return tuple({**answer, **own}.items())

    # how it computes; `layer` is a `tpkit.layers.sharded.ShardedModule`

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repacks this rank's shard for a kernel. Called once, after all its parameters are filled."""

    def dequantize(self, layer: Any) -> torch.Tensor:
        """Returns this rank's weight ``[out, in]`` in float32, exactly what the format says."""
        raise NotImplementedError

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Returns ``x @ W.T (+ bias)`` on this rank's shard. By default it dequantises and multiplies.

        Args:
            layer: holds the parameters under the names of `create_weights`.
            x: ``[..., in]``, this rank's input features.
            bias: ``[out]``, this rank's output features.

        Returns:
            ``[..., out]``.
        """
        from torch.nn.functional import linear

        return linear(x, self.dequantize(layer).to(x.dtype), bias)

    def embedding(self, layer: Any, ids: torch.Tensor) -> torch.Tensor:
        """Returns rows ``[..., in]`` of this rank's shard of an embedding, for local row numbers."""
        from torch.nn.functional import embedding

        return embedding(ids, self.dequantize(layer))
