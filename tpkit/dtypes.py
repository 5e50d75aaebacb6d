"""Element types by name, so that the pure half of tpkit can speak of them without importing torch.

Names are torch's without the prefix ("bfloat16"); safetensors' names ("BF16") are translated on reading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpkit.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = ["FLOATS", "ITEMSIZE", "RANGES", "SAFETENSORS", "dtype_name", "itemsize", "torch_dtype"]

#: bytes per element
ITEMSIZE = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip

#: types whose values survive a conversion among each other (up to rounding); float8 does not: it needs its scale
FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})

#: smallest and largest value
RANGES: dict[str, tuple[float, float]] = {
    **{name: (-largest, largest) for name, largest in {
        "float64": 1.7976931348623157e308, "float32": 3.4028234663852886e38, "bfloat16": 3.3895313892515355e38,
        "float16": 65504.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float8_e8m0fnu": 1.7014118346046923e38,
    }.items()},
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
    "bool": (0, 1),
}  # fmt: skip

#: names in a safetensors header, https://github.com/huggingface/safetensors#format
SAFETENSORS = {
    "F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


def dtype_name(dtype: str | torch.dtype) -> str:
    """Returns the name of a dtype given as a name or as torch's object.

    Raises:
        CheckpointError: for a name that tpkit does not know.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise CheckpointError(f"unknown dtype {name!r}; known: {', '.join(ITEMSIZE)}")
    return name


def itemsize(dtype: str) -> int:
    """Returns the bytes of one element."""
    return ITEMSIZE[dtype]


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Returns torch's object of a dtype."""
    import torch

    found = getattr(torch, dtype_name(dtype), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"torch {torch.__version__} has no {dtype_name(dtype)}", hint="install a newer torch")
    return found
