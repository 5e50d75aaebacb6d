"""Layers, usable alone or built from a description. They know nothing of files: loading follows the plan."""

from tpkit.layers.attention import Attention
from tpkit.layers.container import Container
from tpkit.layers.context import ForwardContext, KVCache
from tpkit.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from tpkit.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from tpkit.layers.mlp import Mlp
from tpkit.layers.norm import LayerNorm, RMSNorm
from tpkit.layers.parallel import ParallelLinear
from tpkit.layers.rotary import Rotary
from tpkit.layers.sharded import Sharded, ShardedModule

__all__ = [
    "Attention",
    "ColumnParallelLinear",
    "Container",
    "ForwardContext",
    "KVCache",
    "LayerNorm",
    "MergedColumnParallelLinear",
    "Mlp",
    "ParallelLMHead",
    "ParallelLinear",
    "QKVParallelLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "Rotary",
    "RowParallelLinear",
    "Sharded",
    "ShardedModule",
    "VocabParallelEmbedding",
]
