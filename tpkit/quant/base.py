"""The contract of a quant method: what it stores, and how it multiplies. It never sees a rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from tpkit.errors import PluginError, TpkitError
from tpkit.params import LinearSpec, Out, ParamSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["QuantMethod", "QuantOptions", "plugin_errors"]


class QuantOptions(BaseModel):
    """Base of a method's options; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


@contextmanager
def plugin_errors(method: object, step: str, layer: str) -> Iterator[None]:
    """Says whose code raised: an error of a plugin that is none of ours becomes a PluginError with its cause."""
    try:
        yield
    except TpkitError:
        raise
    except Exception as cause:
        raise PluginError(
            f"{step} of {type(method).__name__} failed for {layer or 'a layer'}: {type(cause).__name__}: {cause}",
            hint=f"the fault is in {type(method).__module__}",
        ) from cause


class QuantMethod:
    """Base of a quant plugin (entry-point group ``tpkit.quant_methods``).

    Attributes:
        api: version of the contract it is written for.
        Options: its options in a description or in config.json.
        needs_whole: its kernel needs whole blocks; where a cut cannot give them, its `apply` must dequantise.
    """

    api: ClassVar[int] = 1
    Options: ClassVar[type[BaseModel]] = QuantOptions
    needs_whole: ClassVar[bool] = False

    def __init__(self, options: BaseModel | None = None) -> None:
        self.options: Any = options if options is not None else self.Options()

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
                f"{who}: {wrong or ['bias']}: names are identifiers other than 'bias', values are ParamSpec"
            )
        own = {"bias": ParamSpec(layer.dtype, dims=(Out(),))} if bias else {}
        return tuple({**answer, **own}.items())

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Repacks this rank's shard for a kernel. Called once, after all its parameters are filled."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Returns ``x @ W.T (+ bias)`` on this rank's shard.

        Args:
            layer: holds the parameters under the names of `create_weights`.
            x: ``[..., in]``, this rank's input features.
            bias: ``[out]``, this rank's output features.

        Returns:
            ``[..., out]``.
        """
        raise NotImplementedError

    def embedding(self, layer: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Returns rows ``[..., in]`` of this rank's shard of an embedding for local row numbers."""
        raise PluginError(f"{type(self).__name__} cannot look up rows: keep the embedding unquantised")
