"""The blocks that a model repeats: activation checkpointing, and compilation block by block."""

from __future__ import annotations

from typing import Any

from pytorch_accel_lite.extending import MEMORY_ADVICE, MODEL_CHANGES, TrainerLike
from pytorch_accel_lite.extension_tools.modules_and_devices import ChosenModules
from pytorch_accel_lite.extensions.blocks.block_forward import BlockForward
from pytorch_accel_lite.extensions.blocks.memory_saving import advise
from pytorch_accel_lite.extensions.blocks.repeated_blocks import choose, describe_blocks, repeated_blocks

__all__ = ["BlockForward", "choose", "repeated_blocks"]


def checkpoint_activations(trainer: TrainerLike, chosen: ChosenModules) -> str:
    """Make modules recompute their activations in the backward pass."""
    blocks = choose("activation_checkpointing", chosen, trainer.get_model(keep_torch_compile=False))
    for block in blocks.values():
        BlockForward.of(block).checkpoints = True
    return f"Activation checkpointing: {describe_blocks(blocks)}"


def compile_blocks(trainer: TrainerLike, options: str | dict[str, Any]) -> str:
    """Compile each of the modules by itself when it is first called."""
    given = {} if isinstance(options, str) else dict(options)
    blocks = choose("compile_model", given.pop("blocks", True), trainer.get_model(keep_torch_compile=False))
    for block in blocks.values():
        BlockForward.of(block).compile_options = given
    return f"Compiled one by one: {describe_blocks(blocks)}"


MEMORY_ADVICE.append(advise)
MODEL_CHANGES["activation_checkpointing"] = checkpoint_activations
MODEL_CHANGES["compile_model"] = compile_blocks
