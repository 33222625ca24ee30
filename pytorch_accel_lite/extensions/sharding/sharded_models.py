"""What runs of sharded models do differently: they shard the model or check it, and divide the data by its meshes.

Weights are gathered for saving by ``full_state_dict`` of ``checkpoint/models/weights.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pytorch_accel_lite.extending import PlainStep, Run, Step, TrainerLike
from pytorch_accel_lite.extension_tools.modules_and_devices import are_sharded, local_shard
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import is_created
from pytorch_accel_lite.extension_tools.random_numbers import preserving_generators, seed_generators
from pytorch_accel_lite.extension_tools.runs_and_steps import tensor_parallel_size
from pytorch_accel_lite.extension_tools.states_and_files import find_tensors, sharded_like, verify_weights
from pytorch_accel_lite.extension_tools.texts_and_pages import listed
from pytorch_accel_lite.extensions.sharding.data_ranks import find_data_ranks
from pytorch_accel_lite.extensions.sharding.deepspeed_step import DeepSpeedStep, configure_deepspeed, uses_deepspeed
from pytorch_accel_lite.extensions.sharding.sharded_step import ShardedStep


class ShardedModels:
    """Shards models, and trains those that are sharded. Fills ``SHARDING``, which says when each method is called."""

    def begin_run(self, trainer: TrainerLike, run: Run) -> None:
        """Shard the model if the trainer's class does so, and divide the data of a run by the meshes of the weights."""
        if "parallelize_model" in run.overridden:
            _shard_and_materialise(trainer)
        elif run.ranks.world_size == 1:
            return
        _divide_data(trainer, run)

    def prepare_training(self, trainer: TrainerLike, run: Run) -> None:
        """Configure the engine that shards the weights, if there is one that needs it."""
        if uses_deepspeed(trainer.accelerator):
            configure_deepspeed(trainer, run)

    def choose_step(self, trainer: TrainerLike, run: Run) -> Callable[[TrainerLike, Run], Step]:
        """Return the kind of step. A single process reduces nothing, and FSDP1 makes plain steps."""
        if uses_deepspeed(trainer.accelerator):
            return DeepSpeedStep
        return ShardedStep if are_sharded(trainer.model.parameters()) and run.ranks.world_size > 1 else PlainStep


def _divide_data(trainer: TrainerLike, run: Run) -> None:
    """Check the model, and divide the data of a run by the meshes of the weights."""
    model = trainer.get_model(keep_torch_compile=False)
    if trainer.accelerator.is_fsdp2:
        _check_meta_device(trainer, model)
    run.data.ranks = find_data_ranks(model, run.ranks)
    requested = tensor_parallel_size(trainer.accelerator)
    if requested not in (1, run.data.ranks.replicas):
        raise ValueError(
            f"The accelerator's parallelism_config has tp_size={requested}, but {run.data.ranks.replicas} process(es) "
            f"share the weights of {type(model).__name__} by tensor parallelism. Load the model with tp_plan='auto' "
            "and the accelerator's device mesh, or call parallelize_module on it, before you create the trainer."
        )
    if run.data.ranks.replicas > 1 and run.data.seed is None:  # processes that share a batch must read the same samples
        run.data.seed = _draw_seed(trainer)


def _check_meta_device(trainer: TrainerLike, model: nn.Module) -> None:
    """Check that Accelerate's FSDP2 can find the parameters of the optimizer."""
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if trainer.prepared_model is None and on_meta and trainer.optimizer is not None and is_created(trainer.optimizer):
        raise ValueError(
            "The model is on the meta device, where Accelerate's FSDP2 cannot tell the parameters of an optimizer "
            "apart (accelerate issue 3930): it would train the wrong ones without an error. Pass a function that "
            "creates the optimizer after sharding: Trainer(model, loss_func, functools.partial(AdamW, lr=1e-3))."
        )


def _draw_seed(trainer: TrainerLike) -> int:
    """Return a random seed, the same on every process."""
    seed: int = trainer.ranks.result_of_first(lambda: int(torch.randint(2**62, ()).item()))
    return seed


_already_sharded: WeakSet[nn.Module] = WeakSet()


def _shard_and_materialise(trainer: TrainerLike) -> None:
    """Shard the model as the trainer's class does, once, and give values to tensors left on the meta device.

    Raises:
        ValueError: if there are no values for a parameter or a buffer
    """
    model = trainer.get_model(keep_torch_compile=False)
    if model in _already_sharded:
        return
    source = shard_model(trainer, _create_mesh(trainer))
    if source is not None:
        verify_weights(trainer, Path(source))
    _materialise(model, trainer.device, source, _draw_seed(trainer) if trainer.seed is None else trainer.seed)
    _already_sharded.add(model)


def shard_model(trainer: TrainerLike, mesh: DeviceMesh) -> str | os.PathLike[str] | None:
    """Shard the model as the trainer's class does, and return the path of its weights, if the class names one.

    Raises:
        TypeError: if the optimizer already exists, as sharding replaces its parameters
        ValueError: if the accelerator would shard the model again
    """
    if trainer.accelerator.is_fsdp2:
        raise ValueError(
            f"{type(trainer).__name__}.parallelize_model shards the model, and the accelerator's FSDP plugin would do "
            "so again. Pass an Accelerator without an FSDP plugin."
        )
    if trainer.optimizer is not None and is_created(trainer.optimizer):
        raise TypeError(
            f"{type(trainer).__name__}.parallelize_model replaces the parameters that the optimizer holds. Pass a "
            "function that creates the optimizer afterwards, such as functools.partial(AdamW, lr=1e-3)."
        )
    return trainer.parallelize_model(mesh)


def _create_mesh(trainer: TrainerLike) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    mesh: DeviceMesh | None = getattr(trainer.accelerator, "torch_device_mesh", None)
    if mesh is not None:
        return mesh
    if not dist.is_initialized():  # a single process
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(store=store, rank=0, world_size=1)
    return init_device_mesh(trainer.device.type, (trainer.ranks.world_size,), mesh_dim_names=("dp",))


def _materialise(model: nn.Module, device: torch.device, source: str | os.PathLike[str] | None, seed: int) -> None:
    """Give values to all parameters and buffers of a model on the meta device; each process fills its own shards.

    Args:
        source: a safetensors file, or a directory of them; ``None`` to initialise the parameters as a model that is not
            sharded would be after ``torch.manual_seed(seed)``, layer by layer

    Raises:
        ValueError: if there are no values for a parameter or a buffer
    """
    missing = {name for name, tensor in _parameters_and_buffers(model) if tensor.is_meta}
    if not missing and source is None:
        return
    kept = {name: tensor.detach().clone() for name, tensor in _parameters_and_buffers(model) if not tensor.is_meta}
    model.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in _parameters_and_buffers(model):
            if name in kept:
                tensor.copy_(kept[name])
        if source is not None:
            missing -= _load_shards(model, Path(source))
        if missing:
            with preserving_generators():
                seed_generators(seed << 1)  # seed_generators halves it for torch
                missing -= _initialise(model, missing, device)
    if missing:
        elsewhere = "" if source is None else f", which {os.fspath(source)!r} does not contain"
        raise ValueError(
            f"{type(model).__name__} was created on the meta device, and nothing gives values to "
            f"{listed(sorted(missing), 10)}{elsewhere}. Give the modules that "
            "hold them a reset_parameters() method, return weights that contain them from parallelize_model, or create "
            "them on a real device: accelerate.init_empty_weights() leaves buffers there."
        )


def _parameters_and_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _load_shards(model: nn.Module, source: Path) -> set[str]:
    """Read the weights of a model; each process reads its own shards. Return the names of the weights found."""
    stored = find_tensors([source] if source.is_file() else sorted(source.glob("*.safetensors")))
    if not stored:
        raise ValueError(f"{os.fspath(source)!r}, which parallelize_model returned, has no weights as safetensors.")
    loaded: set[int] = set()
    for name, tensor in _parameters_and_buffers(model):
        if name in stored:
            if stored[name].shape != tuple(tensor.shape):
                raise ValueError(
                    f"{name}: shape {stored[name].shape} in {source}, and {tuple(tensor.shape)} in the model."
                )
            tensor.copy_(stored[name].read(tensor))
            loaded.add(id(tensor))
    # By identity, as the file has one name for tied weights.
    return {name for name, tensor in _parameters_and_buffers(model) if id(tensor) in loaded}


def _initialise(model: nn.Module, missing: set[str], device: torch.device) -> set[str]:
    """Initialise one unsharded layer after another, and keep the local shards; return the names of the weights."""
    done: set[int] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        tensors = dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])
        pending = {
            name: tensor
            for name, tensor in tensors.items()
            if f"{prefix}.{name}".lstrip(".") in missing and id(tensor) not in done
        }
        initialise = _initialiser(model, module)
        if not pending or initialise is None:
            continue
        unsharded = _unsharded_copy(module, device)
        initialise(unsharded)
        for name, tensor in pending.items():
            value = getattr(unsharded, name).detach()
            if not value.is_floating_point() or not value.isnan().any():
                local_shard(tensor).copy_(local_shard(sharded_like(tensor, value)))
                done.add(id(tensor))
    return {name for name, tensor in _parameters_and_buffers(model) if id(tensor) in done}


def _initialiser(model: nn.Module, module: nn.Module) -> Callable[[nn.Module], object] | None:
    """Return the function that initialises a module: that of a transformers model, or ``reset_parameters`` in torch."""
    methods = ("reset_parameters", "_reset_parameters")
    method_name = next((method for method in methods if hasattr(module, method)), None)
    return getattr(model, "_init_weights", None) or (None if method_name is None else methodcaller(method_name))


def _unsharded_copy(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a module whose own parameters and buffers are unsharded and NaN."""
    unsharded: nn.Module = object.__new__(type(module))  # copy.copy() fails for modules that fully_shard has sharded
    vars(unsharded).update(vars(module))

    def empty(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        fresh.fill_(torch.nan if fresh.is_floating_point() else 0)
        return nn.Parameter(fresh, fresh.is_floating_point()) if isinstance(tensor, nn.Parameter) else fresh

    for kind in ("_parameters", "_buffers"):
        vars(unsharded)[kind] = {name: empty(tensor) for name, tensor in vars(module)[kind].items()}
    return unsharded
