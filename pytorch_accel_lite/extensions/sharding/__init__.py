"""Models with sharded weights: FSDP2, HSDP, tensor parallelism, DeepSpeed, ``parallelize_model``, the meta device."""

from pytorch_accel_lite.extending import SHARDING
from pytorch_accel_lite.extensions.sharding.data_ranks import mesh_infos, shard_dim
from pytorch_accel_lite.extensions.sharding.sharded_models import ShardedModels, shard_model
from pytorch_accel_lite.extensions.sharding.sharded_step import ShardedStep

__all__ = ["ShardedStep", "mesh_infos", "shard_dim", "shard_model"]

SHARDING.fill(ShardedModels())
