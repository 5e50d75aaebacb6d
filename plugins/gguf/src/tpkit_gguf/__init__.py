"""GGUF files for tpkit: `GgufFormat` reads the container, `Gguf` computes with its block types."""

from tpkit_gguf.format import GgufFormat
from tpkit_gguf.method import Gguf

__all__ = ["Gguf", "GgufFormat"]
