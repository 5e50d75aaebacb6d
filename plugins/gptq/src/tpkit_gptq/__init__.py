"""GPTQ checkpoints for tpkit: quant methods ``gptq`` and ``auto-round``."""

from tpkit_gptq.auto_round import AutoRound
from tpkit_gptq.method import Gptq
from tpkit_gptq.options import GptqOptions, Rule

__all__ = ["AutoRound", "Gptq", "GptqOptions", "Rule"]
