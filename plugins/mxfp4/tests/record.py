"""Records a linear that transformers decodes. Not run in tests: ``python record.py`` writes data/linear.safetensors."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import __version__
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

OUT, GROUPS = 40, 3

if __name__ == "__main__":
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (1, OUT, GROUPS, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (1, OUT, GROUPS), dtype=torch.uint8)
    decoded = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].t()  # [experts, in, out]
    data = Path(__file__).parent / "data" / "linear.safetensors"
    data.parent.mkdir(exist_ok=True)
    tensors = {"blocks": blocks[0], "scales": scales[0], "decoded": decoded}
    save_file({k: v.contiguous() for k, v in tensors.items()}, data, {"decoded by": f"transformers {__version__}"})
