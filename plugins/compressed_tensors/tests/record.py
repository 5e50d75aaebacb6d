"""Records linears that compressed-tensors itself writes and decodes. Not run in tests.

    python record.py                                   # data/linears.safetensors
    pip install --no-deps --target OLD compressed-tensors==0.9.4
    PYTHONPATH=OLD python record.py --old              # data/linears_old.safetensors: free bits in words, group order

Each case has the tensors under ``case/name``, the decoded weight under ``case/decoded``, and in the metadata its
quantization_config as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from compressed_tensors import __version__
from safetensors.torch import save_file

OUT, IN = 20, 64
DATA = Path(__file__).parent / "data"
GROUP, CHANNEL, TENSOR = {"strategy": "group", "group_size": 16}, {"strategy": "channel"}, {"strategy": "tensor"}
BLOCK = {"strategy": "block", "block_structure": [16, 32]}
INT, FP8, ASYM = {"type": "int"}, {"type": "float", "num_bits": 8}, {"symmetric": False}
TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}

CASES: dict[str, dict[str, Any]] = {
    **{f"int{bits}_group": {"weights": {**INT, **GROUP, "num_bits": bits}} for bits in (2, 3, 4, 5, 6, 7, 8)},
    "int4_group_asym": {"weights": {**INT, **GROUP, **ASYM, "num_bits": 4}},
    "int4_channel_asym": {"weights": {**INT, **CHANNEL, **ASYM, "num_bits": 4}},
    "int8_pack_channel": {"weights": {**INT, **CHANNEL, "num_bits": 8}},
    "int8_token": {"weights": {**INT, **CHANNEL, "num_bits": 8}, "input_activations": {**INT, **TOKEN}},
    "int8_static": {
        "weights": {**INT, **TENSOR, "num_bits": 8},
        "input_activations": {**INT, **TENSOR, **ASYM, "num_bits": 8},
    },
    "int8_group_asym": {"weights": {**INT, **GROUP, **ASYM, "num_bits": 8}, "input_activations": {**INT, **TOKEN}},
    "fp8_tensor": {"weights": {**FP8, **TENSOR}, "input_activations": {**FP8, **TENSOR}},
    "fp8_channel": {"weights": {**FP8, **CHANNEL}, "input_activations": {**FP8, **TOKEN}},
    "fp8_block": {"weights": {**FP8, **BLOCK}, "input_activations": {**FP8, **TOKEN}},
    "fp8_naive": {"weights": {**FP8, **CHANNEL}},
    "nvfp4": {"preset": "NVFP4"},
    "mxfp4": {"preset": "MXFP4A16"},
    "mxfp8": {"preset": "MXFP8"},
}


def params(weight: torch.Tensor, a: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns scale, zero point and the tensor's scale, by the library's rule for minima and maxima."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    if a.strategy == "block":
        rows, cols = a.block_structure
        view = torch.nn.functional.pad(weight, (0, -weight.shape[1] % cols, 0, -weight.shape[0] % rows))
        view = view.unflatten(1, (-1, cols)).unflatten(0, (-1, rows)).transpose(1, 2).flatten(2)
    else:
        view = (
            weight.flatten() if a.strategy == "tensor" else weight.unflatten(1, (-1, a.group_size or weight.shape[1]))
        )
    whole = generate_gparam(*torch.aminmax(weight)) if a.strategy == "tensor_group" else None
    return *calculate_qparams(view.amin(-1), view.amax(-1), a, global_scale=whole), whole


def record(weight: torch.Tensor, case: dict[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]:
    """Returns tensors, the decoded weight and the configuration."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    preset = case.get("preset")
    scheme = preset_name_to_scheme(preset, ["Linear"]) if preset else QuantizationScheme(targets=["Linear"], **case)
    form = infer_module_format(torch.nn.Linear, scheme).value
    scale, zero, whole = params(weight, scheme.weights)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    low, high = torch.tensor(-3.0), torch.tensor(4.0)
    if whole is not None:
        state |= {"weight_global_scale": whole, "input_global_scale": generate_gparam(low, high)}
    elif scheme.input_activations and not scheme.input_activations.dynamic:
        state["input_scale"], state["input_zero_point"] = calculate_qparams(low, high, scheme.input_activations)
    compressor = BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(state, scheme)
    if whole is None:
        decoded = compressor.decompress(packed, scheme)["weight"].float()
    else:  # its decompress() rounds nvfp4 to bfloat16
        codes = unpack_fp4_from_uint8(packed["weight_packed"], *weight.shape, dtype=torch.float32)
        scale = packed["weight_scale"].float()
        decoded = dequantize(codes, scale, args=scheme.weights, global_scale=whole, dtype=torch.float32)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=form, quantization_status="compressed", ignore=["lm_head"]
    )
    return packed, decoded, config.model_dump(mode="json")


def record_old(weight: torch.Tensor, bits: int, order: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor, Any]:
    """Returns the same by the library as it was: free bits in words, and an index of each input's group."""
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    a = QuantizationArgs(type="int", num_bits=bits, actorder="group" if order else None, **GROUP)
    index = torch.randperm(IN).int() // GROUP["group_size"]
    scale = torch.stack([weight[:, index == n].abs().amax(1) for n in range(IN // GROUP["group_size"])], 1)
    scale = scale / ((2**bits - 1) / 2)
    scheme = QuantizationScheme(targets=["Linear"], weights=a)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format="pack-quantized", quantization_status="compressed"
    )
    compressor = PackedQuantizationCompressor(config=config)
    extra = {"g_idx": index} if order else {}
    packed = compressor.compress_weight(weight, scale, a, zero_point=torch.zeros_like(scale), **extra)
    packed |= {"weight_scale": scale, **({"weight_g_idx": index} if order else {})}
    return packed, compressor.decompress_weight(packed, a), config.model_dump(mode="json")


def main() -> None:
    torch.manual_seed(0)
    old = "--old" in sys.argv
    tensors, notes = {}, {"written by": f"compressed-tensors {__version__}"}
    cases: dict[str, Any] = {"int3_padded": (3, False), "int5_padded": (5, False), "int6_padded": (6, False)}
    cases |= {"int7_padded": (7, False), "int4_order": (4, True), "int3_order": (3, True)}
    for name, case in (cases if old else CASES).items():
        weight = torch.randn(OUT, IN)
        packed, decoded, config = record_old(weight, *case) if old else record(weight, case)
        tensors |= {f"{name}/{key}": value.contiguous() for key, value in packed.items()}
        tensors[f"{name}/decoded"] = decoded.contiguous()
        notes[name] = json.dumps(config)
    DATA.mkdir(exist_ok=True)
    save_file(tensors, DATA / ("linears_old.safetensors" if old else "linears.safetensors"), notes)


if __name__ == "__main__":
    main()
