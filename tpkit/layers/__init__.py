"""Layers, usable alone or built from a description. They know nothing of files: loading follows the plan."""

from tpkit.layers.attention import Attention
from tpkit.layers.building import BuildContext
from tpkit.layers.container import Container
from tpkit.layers.context import ForwardContext, KVCache
from tpkit.layers.convolution import CausalConv
from tpkit.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from tpkit.layers.expert_layers import (
    ColumnParallelExperts,
    MergedColumnParallelExperts,
    RowParallelExperts,
)
from tpkit.layers.experts import ExpertLinear, Sorted
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
from tpkit.layers.parted import PartedLinear
from tpkit.layers.roles import RoleModule
from tpkit.layers.rotary import Rotary
from tpkit.layers.sharded import Sharded, ShardedModule

__all__ = [
    "Attention",
    "BuildContext",
    "CausalConv",
    "ColumnParallelExperts",
    "ColumnParallelLinear",
    "Container",
    "ExpertLinear",
    "ForwardContext",
    "KVCache",
    "LayerNorm",
    "MergedColumnParallelExperts",
    "MergedColumnParallelLinear",
    "Mlp",
    "ParallelLMHead",
    "ParallelLinear",
    "PartedLinear",
    "QKVParallelLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "RoleModule",
    "Rotary",
    "RowParallelExperts",
    "RowParallelLinear",
    "Sharded",
    "ShardedModule",
    "Sorted",
    "VocabParallelEmbedding",
]
