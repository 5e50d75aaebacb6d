"""Quantises an unquantised checkpoint while it is loaded; any number of ranks gives what one rank gives.

online_int8     W = code * scale, codes -127 ... 127, a float32 scale for each output channel: max |w| / 127
online_int4     W = code * scale, codes -8 ... 7, a scale for each `group_size` inputs of an output
online_fp8      W = code * scale, float8 e4m3 codes, a float32 scale for each block of weights: max |w| / 448
"""

from tpkit_online.eight import OnlineFp8, OnlineInt8
from tpkit_online.four import OnlineInt4

__all__ = ["OnlineFp8", "OnlineInt4", "OnlineInt8"]
