"""compressed-tensors checkpoints, as llm-compressor writes them, for tpkit."""

from tpkit_compressed_tensors.method import CompressedTensors
from tpkit_compressed_tensors.options import Group, Options, Scheme, Weights
from tpkit_compressed_tensors.storage import FloatFour, Packed, Plain, Stored

__all__ = ["CompressedTensors", "FloatFour", "Group", "Options", "Packed", "Plain", "Scheme", "Stored", "Weights"]
