"""Records small linears quantised by compressed-tensors' arithmetic, with the weights that libraries decode them to.

Run it where ``compressed-tensors`` and ``transformers`` are installed; the tests only read what it wrote::

    python record.py data/

``decoded`` is compressed-tensors' float32 weight. Where blocks divide, transformers' ``finegrained_fp8`` decodes alike,
or this fails. Names on disk are the format's.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("weight_scale", {"strategy": "tensor"}),
    "tensor_transformers": ("weight_scale_inv", {"strategy": "tensor"}),
    "channel": ("weight_scale", {"strategy": "channel"}),
    "block": ("weight_scale_inv", {"strategy": "block", "block_structure": [8, 16]}),
    "block_ragged": ("weight_scale_inv", {"strategy": "block", "block_structure": [10, 28]}),
    "block_ue8m0": ("weight_scale_inv", {"strategy": "block", "block_structure": [8, 16]}),
}


def main() -> None:
    """Writes every case into the folder named on the command line."""
    libraries = ", ".join(f"{name} {version(name)}" for name in ("compressed-tensors", "transformers"))
    for name, (scale_name, arguments) in CASES.items():
        args = QuantizationArgs(num_bits=8, type="float", symmetric=True, dynamic=False, **arguments)
        torch.manual_seed(0)
        weight = torch.randn(24, 64) * torch.rand(24, 1).mul(6).exp2()
        rows, columns = args.block_structure or (24 if args.strategy == "tensor" else 1, 64)
        padded = torch.nn.functional.pad(weight.abs(), (0, -64 % columns, 0, -24 % rows))
        scale = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3)) / 448
        scale = scale.log2().ceil().exp2() if name.endswith("ue8m0") else scale
        codes = quantize(weight, scale, None, args, dtype=torch.float8_e4m3fn)
        decoded = dequantize(codes, scale, None, args, dtype=torch.float32)
        if name != "block_ragged":
            other = Fp8Dequantize(None)._dequantize_one(codes, scale, output_dtype=torch.float32)
            if not torch.equal(other, decoded):
                raise RuntimeError(f"{name}: the libraries decode differently")
        stored = {"ue8m0": scale.to(torch.float8_e8m0fnu), "transformers": scale.flatten()[0]}
        scale = stored.get(name.rpartition("_")[2], scale)
        tensors = {"weight": codes.contiguous(), scale_name: scale.contiguous(), "decoded": decoded.contiguous()}
        metadata = {"libraries": libraries, "block": ",".join(map(str, args.block_structure or ()))}
        save_file(tensors, Path(sys.argv[1]) / f"{name}.safetensors", metadata=metadata)


if __name__ == "__main__":
    main()
