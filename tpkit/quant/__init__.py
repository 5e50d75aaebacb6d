"""Quant methods: the contract for plugins, and the method that does nothing."""

from tpkit.params import Blob, Dim, Fixed, Flat, Header, In, LinearSpec, Out, ParamSpec, Segment
from tpkit.quant.base import Kernel, QuantMethod, QuantOptions
from tpkit.quant.target import Target
from tpkit.quant.unquantized import Unquantized

__all__ = [
    "Blob",
    "Dim",
    "Fixed",
    "Flat",
    "Header",
    "In",
    "Kernel",
    "LinearSpec",
    "Out",
    "ParamSpec",
    "QuantMethod",
    "QuantOptions",
    "Segment",
    "Target",
    "Unquantized",
]
