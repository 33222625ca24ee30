"""Training steps with fake tensors, which take no memory, as one of any number of imaginary processes."""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from accelerate.utils.operations import convert_to_fp32
from torch import nn
from torch._subclasses import fake_tensor
from torch.nn import functional
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from pytorch_accel_lite.callbacks import CallbackHandler
from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.extending import MODEL_CHANGES, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import is_overridden
from pytorch_accel_lite.extension_tools.data_and_batches import infer_batch_size, tensors_in
from pytorch_accel_lite.extension_tools.modules_and_devices import local_shard
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import other_modules, other_optimizers
from pytorch_accel_lite.extension_tools.runs_and_steps import replaced
from pytorch_accel_lite.extensions.finetuning import find_blocks
from pytorch_accel_lite.extensions.memory_estimate.live_bytes import LiveBytes
from pytorch_accel_lite.extensions.model_ema import ModelEmaCallback
from pytorch_accel_lite.extensions.sharding import ShardedStep, shard_model
from pytorch_accel_lite.extensions.trials import Trial
from pytorch_accel_lite.optimizers import CombinedOptimizer
from pytorch_accel_lite.tracking import LossTrackers

_NEEDS_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)
_NOT_COPIED = ("model", "current_run")  # the model has its copy already, and the copy has its own run
_BLOCK = 512  # bytes: GPU allocators round sizes up to a multiple


#: Functions that autocast computes in float32 on GPUs but not on CPUs, and whose copies in float32 take memory.
_IN_FLOAT32 = {"cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div"}
_IN_FLOAT32 |= {"softmax", "log_softmax", "layer_norm", "group_norm"}


class Scenario(NamedTuple):
    """The conditions under which steps are made.

    Args:
        world_size: number of processes
        sharding: ``"custom"``: by the trainer's ``parallelize_model``; ``"blocks"``: by ``fully_shard`` for each block
            and the model; ``"none"``: a copy of the model on each process
        device_type: the kind of device, for which optimizers choose their implementation
        checkpoints: whether the repeated blocks use activation checkpointing
        counts_flops: whether to count the operations of an accumulation window, too
    """

    world_size: int
    sharding: Literal["custom", "blocks", "none"]
    device_type: str
    checkpoints: bool = False
    counts_flops: bool = False


def measure_step(trial: Trial, batch: Batch, scenario: Scenario) -> LiveBytes:
    """Return the bytes that are alive at the peak of a step that comes after the optimizer has created its state.

    Copies of the trainer's model, optimizer and attributes make the steps. The trainer itself does not change.

    Args:
        trial: the trial that has read the batch; it must not be running
        batch: a real batch, on the device

    Raises:
        NotImplementedError: if the step needs the values of tensors
    """
    # Autograd starts a thread for each device when it is first used. A thread for a fake device would hinder later
    # forks, so start the threads before there are fake devices.
    torch.zeros((), requires_grad=True).clone().backward()  # type: ignore[no-untyped-call]
    with nullcontext() if scenario.sharding == "none" else _fake_group(scenario.world_size):
        fake = FakeTrainer(trial, scenario)
        if scenario.sharding != "none":
            fake.shard()
        fake.make_updates(batch)
    return fake.live


class LikeGpu(TorchFunctionMode):
    """Makes functions on a CPU take as much memory as they take on a GPU.

    On GPUs, attention with dropout keeps no attention weights, and autocast computes more functions in float32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        elif getattr(func, "__name__", "") in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = convert_to_fp32((args, kwargs))
        return func(*args, **kwargs)


@contextmanager
def _fake_group(world_size: int) -> Iterator[None]:
    """Pretend to be the first process of a group that does not communicate."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with replaced(sys, excepthook=sys.excepthook):  # init_process_group replaces it
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()


class FakeCopies:
    """Copies of modules, optimizers and their owners, with fake tensors in place of parameters and buffers.

    Objects that several originals share are copied once, so the copies share them, too.

    Args:
        device: the device of the copies; the originals may be on the meta device

    Attributes:
        memo: the copies by the ``id`` of their originals, as ``copy.deepcopy`` expects its memo
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.memo: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """Return a copy of a module, optimizer or tensor, or of a container of these; any other value unchanged."""
        if isinstance(value, nn.Module):
            return self._of_module(_unwrapped(value))
        if _is_optimizer(value):
            return self._of_optimizer(value)
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if all(hasattr(value, name) for name in ("optimizer", "step", "state_dict", "load_state_dict")):  # a schedule
            self.of(value.optimizer)
            return copy.deepcopy(value, self.memo)
        if type(value) is dict:
            return {key: self.of(part) for key, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(self.of, value))
        return value

    def _of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.memo:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
                vars(fake).update(vars(tensor))
            self.memo[id(tensor)] = fake
        copied: torch.Tensor = self.memo[id(tensor)]
        return copied

    def _of_module(self, module: nn.Module) -> nn.Module:
        for tensor in [*module.parameters(), *module.buffers()]:
            self._of_tensor(tensor)
        for value in [value for part in module.modules() for value in vars(part).values()]:
            if isinstance(value, torch.Tensor):
                self.memo.setdefault(id(value), value)  # a constant, whose values may be needed
        copied = copy.deepcopy(module, self.memo)
        vars(copied)["to"] = lambda *_, **__: copied  # it has its device; fake parameters cannot move
        return copied

    def _of_optimizer(self, optimizer: Any) -> Any:
        """Return a copy of an optimizer with its hooks and its state, which some optimizers have from the start."""
        if id(optimizer) not in self.memo:
            fake = self.memo[id(optimizer)] = object.__new__(type(optimizer))
            for part in _parts_of(optimizer):
                self._of_optimizer(part)
            for parameter in [parameter for group in optimizer.param_groups for parameter in group["params"]]:
                self._of_tensor(parameter)
            for name, value in vars(optimizer).items():
                if name == "state":
                    fake.state = defaultdict(dict, self._states_of(value))
                elif name != "step":  # a schedule has wrapped step()
                    vars(fake)[name] = copy.copy(value) if name.endswith("_hooks") else copy.deepcopy(value, self.memo)
        return self.memo[id(optimizer)]

    def _states_of(self, states: Mapping[torch.Tensor, Mapping[str, object]]) -> dict[torch.Tensor, dict[str, object]]:
        """Return copies of an optimizer's states by parameter. A sharded process has only the states of its shards."""
        found: dict[torch.Tensor, dict[str, object]] = {}
        for parameter, state in states.items():
            fake = self.memo.get(id(parameter))
            if fake is None:  # not the state of a parameter
                continue
            found[fake] = {
                name: torch.zeros_like(fake) if _is_like(value, parameter) else self.of(value)
                for name, value in state.items()
            }
        return found


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return a module without the wrapper of ``torch.compile``."""
    inner: nn.Module = vars(module).get("_modules", {}).get("_orig_mod", module)
    return inner


def _is_optimizer(value: object) -> bool:
    """Whether a value is an optimizer, and not ``None`` or a factory that has not been called yet."""
    return hasattr(value, "param_groups")


def _parts_of(optimizer: object) -> list[Any]:
    """Return the optimizers that step as one."""
    return list(optimizer.parts.values()) if isinstance(optimizer, CombinedOptimizer) else []


def _is_like(value: object, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dtype == parameter.dtype


class NoLosses(LossTrackers):
    """Keeps no losses, because fake losses have no values."""

    def add(self, output: dict[str, Any]) -> None:
        """Do nothing."""


class FakeTrainer:
    """A copy of a trainer with fake tensors, on one of a number of processes.

    Args:
        trial: the trial of the real trainer
        scenario: the conditions under which steps are made

    Attributes:
        live: counts the bytes of the fake tensors
        trainer: the copy
    """

    def __init__(self, trial: Trial, scenario: Scenario) -> None:
        self._trial = trial
        self._original = trainer = trial.trainer
        self._scenario = scenario
        self._copies = FakeCopies(trainer.device)
        self._parameters: list[nn.Parameter] = []
        self._modules: list[nn.Module] = []
        self._mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
        is_real = trainer.device.type == scenario.device_type
        self._kernels: AbstractContextManager[object] = nullcontext() if is_real else LikeGpu()
        block = 1 if scenario.device_type == "cpu" else _BLOCK
        self.live = LiveBytes(trainer.device, self._owners, block)
        self.trainer: TrainerLike = copy.copy(trainer)
        accelerator = copy.copy(trainer.accelerator)
        accelerator.scaler = None  # a scaler reads from the device, and takes no memory
        accelerator._models, accelerator._optimizers = [], []
        vars(self.trainer).update(
            accelerator=accelerator,
            _accelerator=accelerator,
            callback_handler=CallbackHandler(),
            scheduler=None,
            prepared_model=None,
            open_runs=[],
            compile_model=False,
            compiled_forward=None,
        )
        self._copies.memo[id(trainer)] = self.trainer
        for name, value in vars(trainer).items():
            if isinstance(value, MethodType) and value.__self__ is trainer:  # replaced in the object by its user
                vars(self.trainer)[name] = MethodType(value.__func__, self.trainer)
        with self._mode, self._kernels, self.live:  # new tensors are fake, and counted
            self.trainer.model = self._copies.of(trainer.get_model(keep_torch_compile=False))
        if scenario.checkpoints:
            MODEL_CHANGES["activation_checkpointing"](self.trainer, True)

    def shard(self) -> None:
        """Shard the model. New tensors are real meanwhile, because device meshes need their values."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = self.trainer.model
        mesh = init_device_mesh(self.trainer.device.type, (self._scenario.world_size,), mesh_dim_names=("dp",))
        if self._scenario.sharding == "custom":
            shard_model(self.trainer, mesh)
        else:
            for block in find_blocks(model):
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        originals = self._original.get_model(keep_torch_compile=False).named_parameters(remove_duplicate=False)
        shards = dict(model.named_parameters(remove_duplicate=False))
        self._copies.memo |= {id(parameter): shards[name] for name, parameter in originals if name in shards}
        for parameter in model.parameters():
            self.live.note(local_shard(parameter))

    def _copy_others(self) -> None:
        """Copy the other attributes of the trainer, such as the loss function, optimizers and teachers."""
        trainer = self.trainer
        held = vars(trainer)
        held.update({name: self._copies.of(value) for name, value in held.items() if name not in _NOT_COPIED})
        self._modules = [trainer.model, *other_modules(trainer).values()]
        self._parameters = list(dict.fromkeys(p for module in self._modules for p in module.parameters()))
        averages = [one for one in self._original.callback_handler if isinstance(one, ModelEmaCallback)]
        size = sum(map(_bytes, [*trainer.model.parameters(), *trainer.model.buffers()]))
        self.live.add("averages", size * len(averages))

    def make_updates(self, batch: Batch) -> None:
        """Make two updates, of which the first creates the state of the optimizer."""
        with self._mode, self._kernels, self.live:
            self._copy_others()
            size = infer_batch_size(batch.data, batch.num_samples)
            trial = self._begin(size)
            steps = trial.run.window.steps
            with fake_tensor.FakeCopyMode(self._mode):
                data = copy.deepcopy(batch.data)
            for tensor in tensors_in(data):
                self.live.note(tensor)
            fake = batch._replace(data=data, num_samples=size, total_samples=size, is_last=False)
            counter = _flop_counter() if self._scenario.counts_flops else None
            for step in range(2 * steps):
                if step % steps == 0:
                    self.live.forget_peak()
                try:
                    with counter or nullcontext():
                        trial.run_step(fake)
                except _NEEDS_VALUES as error:
                    raise NotImplementedError(
                        "estimate_memory() makes steps with tensors without values, but, in the line shown above, "
                        f"{getattr(error, 'func', error)} needs values. Let the step do without: read numbers (.item(),"
                        " float(), if) in callbacks only, and replace masks in indices by torch.where."
                    ) from error

            if counter is not None:
                self.live.flops = counter.get_total_flops()

    def _begin(self, batch_size: int) -> Trial:
        """Begin the trial with the copy of the trainer."""
        trainer = self.trainer
        trial = self._trial.begin_on(trainer, batch_size)
        run = trial.run
        if any(hasattr(parameter, "device_mesh") for parameter in trainer.model.parameters()):
            run.training_step = ShardedStep(trainer, run)
        elif self._scenario.world_size > 1 and not is_overridden(trainer, "train_step"):
            trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
            self.live.add("communication", sum(map(_bytes, trained)))  # the buckets of DistributedDataParallel
        self._choose_implementations()
        run.loss_trackers = NoLosses()
        trainer.train_epoch_start()
        return trial

    def _choose_implementations(self) -> None:
        """Make optimizers use multi-tensor updates where these are the default: fake tensors would prevent that."""
        live = self.live
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                if group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = self._scenario.device_type != "cpu"
            if isinstance(optimizer, Optimizer):
                optimizer.register_step_pre_hook(lambda *_: setattr(live, "is_updating", True))
                optimizer.register_step_post_hook(lambda *_: setattr(live, "is_updating", False))

    def _optimizers(self) -> list[Any]:
        optimizer = getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)
        return [*(_parts_of(optimizer) or [optimizer]), *other_optimizers(self.trainer).values()]

    def _owners(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the kind and the tensor for every tensor whose purpose is known."""
        for module in self._modules:
            yield from (("buffers", buffer) for buffer in module.buffers())
        # Until the end of an accumulation window, fully_shard keeps unsharded gradients in unsharded parameters.
        whole = (parameter for module in self._modules for parameter in module.parameters())
        for parameter in self._parameters:
            yield "parameters", parameter
        for parameter in (*self._parameters, *whole):
            if parameter.grad is not None:
                yield "gradients", parameter.grad
        for optimizer in self._optimizers() if _is_optimizer(self.trainer.optimizer) else ():
            for state in optimizer.state.values():
                yield from (("optimizer", part) for part in state.values() if isinstance(part, torch.Tensor))


def _flop_counter() -> Any:
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, so not at the top

    return FlopCounterMode(display=False)


def _bytes(tensor: torch.Tensor) -> int:
    part = local_shard(tensor)
    return part.numel() * part.element_size()
