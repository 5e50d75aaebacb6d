"""The quant method: weights stay in their blocks, as stored; a call decodes this rank's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpkit import In, LinearSpec, Out, ParamSpec, PluginError
from tpkit.quant import QuantMethod, QuantOptions, Target
from tpkit_gguf.types import BLOCKS

if TYPE_CHECKING:
    import torch

__all__ = ["Gguf"]


class Gguf(QuantMethod):
    """GGUF's block types. Which one a module has, its stored header says; a file mixes them freely."""

    class Options(QuantOptions):
        """Options.

        Attributes:
            encoding: the block type (``Q4_K``); "": the one of each stored tensor.
        """

        encoding: str = ""

    def for_module(self, target: Target) -> QuantMethod | None:
        held = target.stored.get("weight")
        if held is None:
            return self if self.options.encoding else None
        return type(self)(self.Options(encoding=held.encoding)) if held.encoding else None

    def label(self) -> str:
        encoding: str = self.options.encoding
        return encoding

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        encoding = self.options.encoding
        if encoding not in BLOCKS:
            raise PluginError(
                f"{layer.name or 'a layer'}: GGUF encoding {encoding!r} is not known; known: {', '.join(BLOCKS)}",
                hint="a GGUF file says it for each tensor; without one, give the option `encoding`",
            )
        per, cells = BLOCKS[encoding]
        return {"weight": ParamSpec("uint8", dims=(Out(), In(per=per, cells=cells)))}

    def dequantize(self, layer: Any) -> torch.Tensor:
        return self._rows(layer, layer.weight)

    def embedding(self, layer: Any, ids: torch.Tensor) -> torch.Tensor:
        import torch

        # decoding a row costs far more than finding out which are asked for twice; a whole table is never decoded
        rows, where = torch.unique(ids, return_inverse=True)
        return self._rows(layer, layer.weight[rows])[where]

    def _rows(self, layer: Any, octets: torch.Tensor) -> torch.Tensor:
        from tpkit_gguf.decode import decode

        values: torch.Tensor = layer.trim("weight", decode(octets, self.options.encoding))
        return values
