"""Writes tests/data: small weights quantised and decoded by bitsandbytes itself. Run by hand where it is installed.

Its CPU kernel begins a new block at every row, its quantiser and the files do not: the weights are decoded as one row.
"""

from pathlib import Path

import bitsandbytes
import torch
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant, int8_vectorwise_quant, quantize_4bit
from safetensors.torch import save_file

DATA = Path(__file__).parent / "data"
CASES = {
    "nf4": ((24, 128), "nf4", 64, False, torch.uint8),
    "nf4_flat": ((23, 80), "nf4", 64, False, torch.uint8),
    "nf4_double_flat": ((210, 80), "nf4", 64, True, torch.uint8),
    "nf4_double_128": ((12, 256), "nf4", 128, True, torch.uint8),
    "nf4_double_32": ((24, 96), "nf4", 32, True, torch.uint8),
    "nf4_bfloat16": ((24, 128), "nf4", 64, True, torch.bfloat16),
    "fp4": ((24, 128), "fp4", 64, False, torch.uint8),
    "fp4_float32_flat": ((24, 80), "fp4", 64, False, torch.float32),
}


def save(name: str, tensors: dict[str, torch.Tensor], decoded: torch.Tensor) -> None:
    """Writes one file; its metadata says which version of the library decoded it."""
    tensors = {**{key: value.contiguous() for key, value in tensors.items()}, "decoded": decoded.contiguous()}
    library = {"library": f"bitsandbytes {bitsandbytes.__version__}"}
    save_file(tensors, DATA / f"{name}.safetensors", library)


def main() -> None:
    """Writes all of them."""
    torch.manual_seed(0)
    for name, (shape, kind, block, double, storage) in CASES.items():
        weight = torch.randn(shape) * torch.rand(shape[0], 1)
        codes, state = quantize_4bit(
            weight, blocksize=block, compress_statistics=double, quant_type=kind, quant_storage=storage
        )
        beside = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        state.shape = torch.Size((1, weight.numel()))
        save(name, {"weight": codes, **beside}, dequantize_4bit(codes, state).view(shape))
    codes, scale, _ = int8_vectorwise_quant(torch.randn(24, 96).half())
    tensors = {"weight": codes, "SCB": scale.float(), "weight_format": torch.tensor(0, dtype=torch.uint8)}
    save("int8", tensors, int8_vectorwise_dequant(codes, scale).float())


if __name__ == "__main__":
    main()
