"""Makes ``data/linears.safetensors``: small linears written by AutoRound and decoded by GPTQModel. No GPU.

    pip install torch gptqmodel==7.6.0 auto-round==0.16.1
    python record.py

Tensors are named ``case.tensor``; ``case.decoded`` is float32 [out, in]. The metadata says who wrote them, and how.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import torch
from auto_round.export.export_to_awq.utils import WQLinear_GEMM
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import save_file

OUT, IN = 40, 96


def main() -> None:
    torch.manual_seed(0)
    tensors, notes = {}, {"auto-round": version("auto-round"), "gptqmodel": version("gptqmodel")}
    for name, size, asym in (("g32", 32, True), ("g16", 16, True), ("channel", -1, True), ("sym", 32, False)):
        groups = 1 if size == -1 else IN // size
        scales, zeros = torch.rand(groups, OUT) * 0.02 + 0.01, torch.randint(0, 16, (groups, OUT)).float()
        linear = torch.nn.Linear(IN, OUT, bias=False)
        made = WQLinear_GEMM.from_linear(linear, 4, size, scales=scales, zeros=zeros if asym else 8, device="cpu")
        held = {k: getattr(made, k).clone().contiguous() for k in ("qweight", "qzeros", "scales")}
        tensors |= {f"{name}.{k}": t for k, t in held.items()}
        group = IN if size == -1 else size
        decoded = dequantize_gemm(held["qweight"], held["qzeros"], held["scales"].float(), 4, group)
        tensors[f"{name}.decoded"] = decoded.T.float().contiguous()
        notes[name] = json.dumps({"bits": 4, "group_size": size, "zero_point": asym, "version": "gemm"})
    data = Path(__file__).parent / "data" / "linears.safetensors"
    data.parent.mkdir(exist_ok=True)
    save_file(tensors, data, notes)


if __name__ == "__main__":
    main()
