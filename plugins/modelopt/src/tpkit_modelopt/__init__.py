"""Checkpoints exported by NVIDIA ModelOpt, https://github.com/NVIDIA/Model-Optimizer (modelopt/torch/export)."""

from tpkit_modelopt.method import ModelOpt
from tpkit_modelopt.options import LayerOptions, ModelOptOptions

__all__ = ["LayerOptions", "ModelOpt", "ModelOptOptions"]
