"""Makes ``data/*.safetensors``: small linears written and decoded by GPTQModel, and written by AutoRound. No GPU.

    pip install torch gptqmodel==7.6.0 auto-round==0.16.1
    python record.py

Tensors are named ``case.tensor``; ``case.decoded`` is float32 [out, in]. The metadata says who wrote them, and how.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import torch
from auto_round_extension.torch.qlinear_torch import QuantLinear as Plain
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear as LessOne
from gptqmodel import QuantizeConfig
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module
from safetensors.torch import save_file

OUT = 32
Tensors = dict[str, torch.Tensor]


def empty(in_: int, bits: int, group: int, ordered: bool = False) -> TorchLinear:
    return TorchLinear(
        bits=bits, group_size=group, sym=False, desc_act=ordered, in_features=in_, out_features=OUT, bias=False
    )


def by_gptqmodel(in_: int, bits: int, group_size: int, form: str, ordered: bool = False) -> Tensors:
    group = in_ if group_size == -1 else group_size
    groups = -(-in_ // group)
    zeros = torch.randint(0, 1 << bits, (OUT, groups))
    zeros[::3] = 0  # what a borrow needs
    g_idx = torch.arange(in_) // group
    g_idx = g_idx[torch.randperm(in_)] if ordered else g_idx
    linear = empty(in_, bits, group, ordered)
    linear.pack_original(
        linear=torch.nn.Linear(in_, OUT, bias=False),
        scales=torch.rand(OUT, groups) * 0.02 + 0.01,
        zeros=zeros.float(),
        g_idx=g_idx.int(),
    )
    if form == "gptq":
        convert_gptq_v2_to_v1_format_module(linear, QuantizeConfig(bits=bits, group_size=group_size, sym=False))
    return held(linear)


def by_autoround(in_: int, bits: int, group_size: int, kind: type[torch.nn.Module], sym: bool) -> Tensors:
    groups = in_ // group_size
    linear = torch.nn.Linear(in_, OUT, bias=False)
    scales = torch.rand(OUT, groups) * 0.02 + 0.01
    scales[::2] *= -1 if sym else 1
    made = kind(bits, group_size, in_, OUT, False)
    made.device = "cpu"
    made.pack(
        linear, scales, 1 << (bits - 1) if sym else torch.randint(1, 1 << bits, (OUT, groups)).float(), None, "cpu"
    )
    return held(made)


def held(module: torch.nn.Module) -> Tensors:
    names = ("qweight", "qzeros", "scales", "g_idx")
    return {n: getattr(module, n).clone().contiguous() for n in names if getattr(module, n, None) is not None}


def decode(tensors: Tensors, in_: int, bits: int, group_size: int, form: str, ordered: bool = False) -> torch.Tensor:
    linear = empty(in_, bits, in_ if group_size == -1 else group_size, ordered)
    linear.load_state_dict(tensors, strict=False)
    if form == "gptq":
        convert_gptq_v1_to_v2_format_module(linear, bits, torch.int32)
    linear.post_init()
    linear.scales = linear.scales.float()
    return linear.dequantize_weight().T.float().contiguous()


def main() -> None:
    torch.manual_seed(0)
    tensors, notes = {}, {"gptqmodel": version("gptqmodel"), "auto-round": version("auto-round")}
    cases = {f"w{bits}_{form}": (64, bits, 16, form) for bits in (2, 3, 4, 8) for form in ("gptq", "gptq_v2")}
    cases |= {
        "channel": (64, 4, -1, "gptq"),
        "short_group": (80, 4, 32, "gptq"),
        "act_order": (64, 4, 16, "gptq", True),
    }
    for name, (in_, bits, size, form, *ordered) in cases.items():
        made = by_gptqmodel(in_, bits, size, form, *ordered)
        notes[name] = {
            "bits": bits,
            "group_size": size,
            "format": form,
            "desc_act": bool(ordered),
            "meta": {"quantizer": [f"gptqmodel:{version('gptqmodel')}"]},
        }
        tensors |= {f"{name}.{k}": t for k, t in made.items()}
        tensors[f"{name}.decoded"] = decode(made, in_, bits, size, form, *ordered)
    rounds = {
        "round_sym": (LessOne, True, "auto_round:auto_gptq"),
        "round_asym": (LessOne, False, "auto_round:auto_gptq"),
        "round_plain": (Plain, False, "auto_round"),
    }
    for name, (kind, sym, packing) in rounds.items():
        made = by_autoround(64, 4, 32, kind, sym)
        form = "gptq" if kind is LessOne else "gptq_v2"
        notes[name] = {"bits": 4, "group_size": 32, "sym": sym, "packing_format": packing}
        tensors |= {f"{name}.{k}": t for k, t in made.items()}
        g_idx = torch.arange(64, dtype=torch.int32) // 32
        tensors[f"{name}.decoded"] = decode({"g_idx": g_idx, **made}, 64, 4, 32, form)
    data = Path(__file__).parent / "data" / "linears.safetensors"
    data.parent.mkdir(exist_ok=True)
    save_file(tensors, data, {k: v if isinstance(v, str) else json.dumps(v) for k, v in notes.items()})


if __name__ == "__main__":
    main()
