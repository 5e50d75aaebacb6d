"""The quant method ``compressed-tensors``: which module belongs to which group. The group's format does the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tpkit import PluginError
from tpkit.quant import LinearSpec, ParamSpec, QuantMethod, Target
from tpkit_compressed_tensors import options as _options
from tpkit_compressed_tensors.storage import FloatFour, Packed, Plain, Stored

__all__ = ["CompressedTensors"]

#: the class that a kind of module has for those who write targets
_CLASSES = {"linear": "Linear", "head": "Linear", "embedding": "Embedding"}


class CompressedTensors(QuantMethod):
    """Reads checkpoints of compressed-tensors and llm-compressor. Activations are not quantised.

    Used for a layer that stands alone, it is that of its only scheme.
    """

    Options = _options.Options
    unused = Stored.unused

    def __init__(self, options: _options.Options | None = None) -> None:
        super().__init__(options)
        #: by group; None: not quantised
        self.methods = {name: _method(self.options.scheme(name)) for name in self.options.config_groups}

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return _options.translate(config)

    def for_module(self, target: Target) -> QuantMethod | None:
        """Returns the method of the group that claims a module: by its name, else a regular expression, else its class.

        Raises:
            PluginError: if groups of different schemes claim it alike, or it is stored unquantised all the same.
        """
        ignore = self.options.ignore
        if _CLASSES[target.kind] in ignore or target.matches(ignore, "exact"):
            return None
        method = self._claimed(target)
        if method is not None:
            self._check_stored(target, method)
        return method

    def _claimed(self, target: Target) -> Stored | None:
        ways: tuple[Callable[[list[str]], bool], ...] = (
            lambda targets: target.matches([t for t in targets if not t.startswith("re:")], "exact"),
            lambda targets: target.matches([t for t in targets if t.startswith("re:")], "exact"),
            lambda targets: _CLASSES[target.kind] in targets,
        )
        for claims in ways:
            found = [name for name, group in self.options.config_groups.items() if claims(group.targets)]
            schemes = [self.options.scheme(name) for name in found]
            if any(scheme != schemes[0] for scheme in schemes):
                said = ", ".join(f"{name} ({scheme or 'dense'})" for name, scheme in zip(found, schemes, strict=True))
                raise PluginError(
                    f"{target.name}: {len(found)} groups of config_groups claim it alike: {said}",
                    hint="name the module in the targets of one of them: a name goes before a regular expression",
                )
            if found:
                return self.methods[found[0]]
        return None

    def _check_stored(self, target: Target, method: Stored) -> None:
        """The status in a configuration is often wrong; what is stored tells."""
        weight = target.stored.get("weight")
        if weight is not None and weight.dtype in ("float64", "float32", "bfloat16", "float16"):
            raise PluginError(
                f"{target.name} is stored as {weight.dtype} {list(weight.shape)}, config_groups say {method.label()} "
                f"(quantization_status {self.options.quantization_status!r})",
                hint="compress the checkpoint (save_pretrained with save_compressed), or list the module in ignore",
            )

    def label(self) -> str:
        return ", ".join(dict.fromkeys(method.label() for method in self.methods.values() if method))

    def _only(self) -> Stored:
        schemes = {str(method.options): method for method in self.methods.values() if method is not None}
        if len(schemes) != 1:
            raise PluginError(
                f"a layer alone cannot choose among {len(schemes)} schemes of {list(self.methods)}",
                hint="for_module(Target(name=...)) chooses",
            )
        return next(iter(schemes.values()))

    def create_weights(self, layer: LinearSpec) -> dict[str, ParamSpec]:
        return self._only().create_weights(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        self._only().process_weights_after_loading(layer)

    def dequantize(self, layer: Any) -> torch.Tensor:
        return self._only().dequantize(layer)


def _method(scheme: _options.Scheme | None) -> Stored | None:
    if scheme is None:
        return None
    kind = {"pack-quantized": Packed, "nvfp4-pack-quantized": FloatFour, "mxfp4-pack-quantized": FloatFour}
    return kind.get(scheme.format, Plain)(scheme)
