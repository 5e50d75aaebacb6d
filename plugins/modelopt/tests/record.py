"""Records small linears quantised and exported by NVIDIA ModelOpt, with the weights that it decodes to.

Run it where ``nvidia-modelopt`` is installed (no GPU is needed); the tests only read what it wrote::

    python record.py data/

One file per algorithm: the tensors of one linear as a checkpoint has them, and ``decoded``, the library's own float32
weight. For integers and plain fp8 that is what its fake quantisation multiplies with; for the block formats, whose fake
quantisation needs a GPU, what its tensor classes dequantise to. Where the input is multiplied with ``pre_quant_scale``,
the weight is.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export.quant_utils import (
    get_prequant_scaling_factor,
    get_quantization_format,
    get_weight_block_size,
    process_layer_quant_config,
)
from modelopt.torch.export.unified_export_hf import _export_quantized_weight
from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor, NVFP4QTensor
from safetensors.torch import save_file

CASES = {  # file: (preset, out, in)
    "fp8": ("FP8_DEFAULT_CFG", 24, 40),
    "fp8_per_channel_per_token": ("FP8_PER_CHANNEL_PER_TOKEN_CFG", 24, 40),
    "fp8_pb_wo": ("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", 136, 16),
    "fp8_pb_wo_one_block": ("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", 24, 40),
    "mxfp8": ("MXFP8_DEFAULT_CFG", 24, 96),
    "nvfp4": ("NVFP4_DEFAULT_CFG", 24, 80),
    "nvfp4_awq": ("NVFP4_DEFAULT_CFG", 24, 80),  # its search needs a GPU: the smoothing is set by hand
    "w4a16_nvfp4": ("W4A16_NVFP4_CFG", 24, 80),
    "w4a8_nvfp4_fp8": ("W4A8_NVFP4_FP8_CFG", 24, 96),
    "w4a8_mxfp4_fp8": ("W4A8_MXFP4_FP8_CFG", 24, 96),
    "w4a16_awq": ("INT4_AWQ_CFG", 10, 384),
    "w4a8_awq": ("W4A8_AWQ_BETA_CFG", 10, 384),
    "w8a16": ("INT8_WEIGHT_ONLY_CFG", 24, 40),
    "w8a8_sq_per_channel": ("INT8_SMOOTHQUANT_CFG", 24, 40),
}
NAMES = ("weight", "weight_scale", "weight_scale_2", "input_scale")


def record(name: str, preset: str, out: int, in_: int) -> tuple[dict[str, torch.Tensor], str]:
    """Returns one linear's tensors with ``decoded``, and the library's name and block size."""
    torch.manual_seed(0)
    inputs = torch.randn(64, in_) * torch.rand(in_).mul(4).exp2()
    model = torch.nn.Sequential(torch.nn.Linear(in_, out, bias=False))
    linear = mtq.quantize(model, getattr(mtq, preset), lambda m: m(inputs))[0]
    if name == "nvfp4_awq":
        linear.input_quantizer.pre_quant_scale = torch.rand(in_) + 0.5
    smooth, layout = get_prequant_scaling_factor(linear), get_quantization_format(linear)
    block = get_weight_block_size(linear)
    fake = None if "fp4" in layout or layout == "mxfp8" else linear.weight_quantizer(linear.weight).detach().float()
    _export_quantized_weight(linear, torch.float32)
    tensors = {key: getattr(linear, key).detach() for key in NAMES if getattr(linear, key, None) is not None}
    decoded = dequantize(layout, tensors, out, in_, block) if fake is None else fake
    if smooth is not None:
        tensors["pre_quant_scale"] = smooth
        decoded = decoded * smooth
    tensors["decoded"] = decoded
    algo = process_layer_quant_config({"x.quantization": layout})["quant_algo"]
    return {key: tensor.contiguous().clone() for key, tensor in tensors.items()}, f"{algo} {block}"


def dequantize(layout: str, tensors: dict[str, torch.Tensor], out: int, in_: int, block: int) -> torch.Tensor:
    """Returns what the library's tensor class makes of exported tensors."""
    weight, scale, shape = tensors["weight"], tensors["weight_scale"], torch.Size((out, in_))
    if layout == "mxfp8":
        return MXFP8QTensor(shape, torch.float32, weight).dequantize(torch.float32, scale=scale)
    if "mxfp4" in layout:
        return MXFP4QTensor(shape, torch.float32, weight).dequantize(
            torch.float32, scale=scale, block_sizes={-1: block}
        )
    kind, double = NVFP4QTensor(shape, torch.float32, weight), tensors["weight_scale_2"]
    return kind.dequantize(torch.float32, scale=scale, double_scale=double, block_sizes={-1: block})


def main() -> None:
    """Writes every case into the folder named on the command line."""
    folder = Path(sys.argv[1])
    torch.set_grad_enabled(False)
    for name, (preset, out, in_) in CASES.items():
        tensors, algo = record(name, preset, out, in_)
        library, (algo, block) = f"nvidia-modelopt {version('nvidia-modelopt')}", algo.split()
        metadata = {"library": library, "preset": preset, "quant_algo": algo, "block": block}
        save_file(tensors, folder / f"{name}.safetensors", metadata=metadata)
        sys.stdout.write(f"{name}: {algo} { {k: (tuple(v.shape), str(v.dtype)) for k, v in tensors.items()} }\n")


if __name__ == "__main__":
    main()
