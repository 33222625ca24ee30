"""Trying a training program in several ways: what the checks of ``trainer.check()`` work with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from typing import Any, Literal

import torch
from accelerate.utils.operations import honor_type
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from pytorch_accel_lite.base.batches import Batch, complete_output, find_batch_size, is_as_long, parts_in, tensors_in
from pytorch_accel_lite.base.devices import mixed_precision
from pytorch_accel_lite.base.events import CallbackHandler, TrainerCallback
from pytorch_accel_lite.base.inspection import is_overridden
from pytorch_accel_lite.base.modules import preserving_modes
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.randomness import mix, seed_all
from pytorch_accel_lite.base.splitting import select_samples
from pytorch_accel_lite.engine.history import InMemoryRunHistory
from pytorch_accel_lite.engine.losses import create_trackers
from pytorch_accel_lite.engine.run import Run
from pytorch_accel_lite.engine.snapshot import Snapshot, StepSnapshot, preserving_attributes, replaced
from pytorch_accel_lite.engine.training import train_step
from pytorch_accel_lite.engine.trial import keep_training
from pytorch_accel_lite.optimizers import attributes
from pytorch_accel_lite.schedulers.preview import schedule_values

#: Numbers of samples that checks compute with, the first that is not another dimension of the batch.
_SIZES = (8, 6, 7, 10, 12, 14, 5, 4)
#: Functions of torch that compare outputs with targets, which are their first arguments.
LOSSES = frozenset(
    {
        *("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"),
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    }
)
_RANDOM = frozenset(
    {
        *("rand", "randn", "randint", "rand_like", "randn_like", "randperm"),
        *("normal", "bernoulli", "uniform", "multinomial"),
    }
)
_DROPOUT = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"})
#: Relative differences up to this are those of float32, computed in another order.
TOLERANCE = 2e-4
_ARITHMETIC = ("sub", "rsub", "mul", "add", "div", "truediv")


class NotApplicableError(Exception):
    """Raised by a check that cannot tell; its text is the reason."""


@dataclass(frozen=True)
class Finding:
    """Something that a check has found.

    :param message: what was seen, with numbers and names
    :param advice: what to change
    :param fails: whether it is a mistake; otherwise it is a warning
    :param details: the same for programs, by name
    """

    message: str
    advice: str = ""
    fails: bool = True
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class LossCall:
    """A call of one of torch's loss functions.

    :param made_by: name of the function that computed the outputs, as autograd has it, such as ``"SoftmaxBackward0"``
    """

    name: str
    outputs: torch.Tensor
    targets: torch.Tensor
    ignored: int
    made_by: str
    value: torch.Tensor | None


class Watch(TorchFunctionMode):
    """Notes the calls of torch's functions that tell of mistakes.

    :ivar losses: the calls of loss functions
    :ivar dropouts: the functions that dropped out units
    :ivar random: the functions that drew other random numbers
    :ivar outer: shapes of outputs and of other values that arithmetic expanded to a square
    """

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[LossCall] = []
        self.dropouts: list[str] = []
        self.random: list[str] = []
        self.outer: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_") or str(func)
        if name in _ARITHMETIC and len(args) > 1:
            self._note_shapes(*args[:2])
        elif name in _DROPOUT:
            training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
            if training and (args[1] if len(args) > 1 else kwargs.get("p", 0.5)):
                self.dropouts.append(name)
        elif name == "scaled_dot_product_attention":
            if args[4] if len(args) > 4 else kwargs.get("dropout_p"):
                self.dropouts.append(name)
        elif name in _RANDOM:
            self.random.append(name)
        is_loss = name in LOSSES
        call = self._loss_call(name, args, kwargs) if is_loss else None
        if call is not None:
            self.losses.append(call)
        result = func(*args, **kwargs)
        if call is not None and isinstance(result, torch.Tensor):
            self.losses[-1] = LossCall(**{**vars(call), "value": result.detach()})
        return result

    def _loss_call(self, name: str, args: Any, kwargs: Any) -> LossCall | None:
        outputs = args[0] if args else kwargs.get("input")
        targets = args[1] if len(args) > 1 else kwargs.get("target")
        if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
            return None
        at = 4 if name == "cross_entropy" or name == "nll_loss" else None
        ignored = args[at] if at and len(args) > at else kwargs.get("ignore_index", -100)
        return LossCall(name, outputs.detach(), targets.detach(), ignored, _maker(outputs), None)

    def _note_shapes(self, first: Any, second: Any) -> None:
        if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
            return
        column, row = (first, second) if first.ndim > second.ndim else (second, first)
        is_square = row.ndim == 1 and column.shape == (len(row), 1) and len(row) > 1
        if is_square and column.requires_grad != row.requires_grad:
            self.outer.append((tuple(first.shape), tuple(second.shape)))


def _maker(tensor: torch.Tensor) -> str:
    """Return the name of the function that computed a tensor, whatever has reshaped the result."""
    function: Any = tensor.grad_fn
    shaping = (
        "View",
        "Squeeze",
        "Unsqueeze",
        "Select",
        "Slice",
        "Permute",
        "Transpose",
        "TBackward",
        "Reshape",
        "Clone",
    )
    while function is not None and function.name().startswith((*shaping, "ToCopy", "UnsafeView", "Alias")):
        function = function.next_functions[0][0] if function.next_functions else None
    return "" if function is None else str(function.name())


@dataclass(eq=False)
class Pass:
    """What a forward pass, and a backward pass if there was one, gave.

    :param loss: a scalar in training; ``None`` if an evaluation has none
    :param output: what the step returned
    :param calls: positional and named arguments, and the outputs, of each call of the model
    :param gradients: by name of the parameter
    """

    loss: torch.Tensor | None
    output: dict[str, Any]
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]]
    watch: Watch
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.outputs = [output for *_, output in self.calls] or self.output.get("model_outputs")

    @property
    def number(self) -> float:
        """The loss as a number."""
        if self.loss is None:
            raise NotApplicableError("The evaluation has no loss.")
        return float(self.loss.float().mean())

    def refuse_randomness(self) -> None:
        """Raise an error if random numbers were drawn, which differ between batches of different sizes."""
        if self.watch.random or self.watch.dropouts:
            raise NotApplicableError("The step draws random numbers of its own.")


class _Recorder(TrainerCallback):
    """Notes the gradients of each update."""

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self.names = names
        self.gradients: dict[str, torch.Tensor] = {}

    def on_optimizer_step_start(self, trainer: Any, **kwargs: Any) -> None:
        found = {name: p.grad for p, name in self.names.items() if p.grad is not None}
        self.gradients |= {name: gradient.detach().clone() for name, gradient in found.items()}


class Probe:
    """A training program that a check tries. What a check changes is restored after it.

    :ivar trainer: the trainer, prepared for training
    :ivar run: a run that exists only for the checks
    :ivar arguments: those of :meth:`Trainer.check <pytorch_accel_lite.Trainer.check>`, by name
    :ivar watch: what the latest pass has called, even if it failed
    """

    def __init__(self, trainer: TrainerLike, run: Run, arguments: Mapping[str, Any], seconds: float) -> None:
        self.trainer = trainer
        self.run = run
        self.arguments = arguments
        self.watch = Watch()
        self._end = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until the checks must end."""
        return self._end - time.monotonic()

    # ------------------------------------------------------------------------------------------ batches

    @cached_property
    def batches(self) -> list[Batch]:
        """The first training batches, at most four."""
        batches = list(islice(self.run.data.train_loader.steps(1), 4))
        if not batches:
            raise NotApplicableError("train_dataset gives no batch.")
        return batches

    @cached_property
    def batch(self) -> Batch:
        """A training batch of at most 16 samples, if it can be divided."""
        return self._few(self.batches[0])

    @cached_property
    def eval_batch(self) -> Batch:
        """Such a batch of the evaluation dataset, or of the training dataset if there is no other."""
        loader = self.run.data.eval_loader
        first = None if loader is None else next(iter(loader.steps(1)), None)
        return self.batch if first is None else self._few(first)

    def _few(self, batch: Batch) -> Batch:
        size = find_batch_size(batch.data, batch.num_samples)
        batch = batch._replace(num_samples=size, total_samples=size)
        if not is_divisible(batch):
            return batch
        others = {length for tensor in tensors_in(batch.data) for length in tensor.shape[1:]}
        few = next((number for number in _SIZES if number <= size and number not in others), min(size, 16))
        return select(batch, range(few))

    def require_samples(self, batch: Batch, least: int = 2) -> Batch:
        """Return a batch that can be divided into samples, of which it has enough."""
        if not is_divisible(batch):
            raise NotApplicableError("The batch cannot be divided into samples.")
        if (batch.num_samples or 0) < least:
            raise NotApplicableError(f"The batch has fewer than {least} samples.")
        return batch

    # ------------------------------------------------------------------------------------------- passes

    @cached_property
    def curves(self) -> list[list[float]]:
        """The learning rates that the run will use, by parameter group and update; constant without a schedule."""
        groups = self.trainer.optimizer.param_groups
        rates = [float(group.get("lr", 0.0)) for group in groups]
        create, config = self.arguments["create_scheduler_fn"], self.run.required_config
        updates = config.max_num_train_steps
        if create is None or isinstance(create, Mapping) or updates is None:
            return [[rate] for rate in rates]
        epochs = config.num_epochs or 1
        if config.scheduler_interval == "update":
            return schedule_values(create, min(updates, 20_000), rates, epochs)
        return schedule_values(create, epochs, rates, epochs)

    @cached_property
    def rates(self) -> list[float]:
        """The highest learning rate of each parameter group."""
        try:
            return [max(curve) for curve in self.curves]
        except Exception:  # the check of the schedule tells
            return [float(group.get("lr", 0.0)) for group in self.trainer.optimizer.param_groups]

    @contextmanager
    def without_mixed_precision(self) -> Iterator[None]:
        """Compute in float32 in a block."""
        model = self.trainer.get_model()
        original = getattr(model, "_original_forward", model.forward)  # which Accelerate has wrapped
        with replaced(self.trainer.accelerator, native_amp=False), replaced(model, forward=original):
            yield

    @cached_property
    def names(self) -> dict[nn.Parameter, str]:
        """The names of all parameters, including those of the loss function and other attributes of the trainer."""
        names = {parameter: name for name, parameter in self.trainer.get_model().named_parameters()}
        for attribute, module in attributes.modules(self.trainer).items():
            for name, parameter in module.named_parameters():
                names.setdefault(parameter, f"{attribute}.{name}")
        for number, parameter in enumerate(attributes.all_optimized_parameters(self.trainer)):
            names.setdefault(parameter, f"parameter {number} of the optimizer")
        return names

    @cached_property
    def optimized(self) -> dict[nn.Parameter, str]:
        """The names of the parameters that are trained."""
        trained = attributes.all_optimized_parameters(self.trainer)
        return {parameter: self.names[parameter] for parameter in trained if parameter.requires_grad}

    @property
    def has_own_step(self) -> bool:
        """Whether the program makes its own updates, so that a batch has no loss without them."""
        return is_overridden(self.trainer, "train_step")

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The parts of the model and of the trainer's other modules, by name."""
        parts = dict(self.trainer.get_model().named_modules())
        for attribute, module in attributes.modules(self.trainer).items():
            parts |= {f"{attribute}.{name}".rstrip("."): part for name, part in module.named_modules()}
        return parts

    def train(
        self, batch: Batch, mode: Literal["training", "quiet"] = "training", gradients: bool = False, seed: int = 0
    ) -> Pass:
        """Compute the loss of a training batch, as a training step does, and its gradients.

        :param mode: ``"quiet"`` leaves out dropout, and normalises with the statistics of batch norm
        """
        if self.has_own_step:
            raise NotApplicableError(f"{type(self.trainer).__name__}.train_step makes its own updates.")
        compute = self.trainer.calculate_train_batch_loss
        if mode == "quiet" and self._is_quiet_when_evaluating:
            return self._pass(compute, batch, "evaluation mode", gradients, seed)
        return self._pass(compute, batch, mode, gradients, seed)

    @cached_property
    def _is_quiet_when_evaluating(self) -> bool:
        """Whether the training loss can be computed in evaluation mode, unlike that of torchvision's detectors."""
        try:
            self._pass(self.trainer.calculate_train_batch_loss, self.batch, "evaluation mode", True, 0)
        except Exception:
            return False
        return True

    def evaluate(self, batch: Batch, seed: int = 0) -> Pass:
        """Compute the loss of a batch as an evaluation does, or as a training step does if that fails."""
        if not self._evaluates:
            return self.train(batch, "quiet", seed=seed)
        with attributes.evaluating_optimizers(self.trainer), torch.no_grad():
            return self._pass(self.trainer.calculate_eval_batch_loss, batch, "evaluation", False, seed)

    def call_model(self, batch: Batch, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the model in evaluation mode."""

        def compute(_: Any) -> dict[str, Any]:
            return {"loss": None, "model_outputs": self.trainer.model(*args, **kwargs)}

        with torch.no_grad():
            return self._pass(compute, batch, "evaluation", False, 0).output["model_outputs"]

    @cached_property
    def _evaluates(self) -> bool:
        if self.has_own_step and self.run.data.eval_loader is None:
            raise NotApplicableError("There is no evaluation dataset, and train_step makes its own updates.")
        try:
            with torch.no_grad():
                self._pass(self.trainer.calculate_eval_batch_loss, self.eval_batch, "evaluation", False, 0)
        except Exception:
            if self.run.data.eval_loader is not None:
                raise
            return False
        return True

    def _pass(self, compute: Callable[[Any], Any], batch: Batch, mode: str, gradients: bool, seed: int) -> Pass:
        trainer = self.trainer
        model = trainer.get_model()
        calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
        self.watch = watch = Watch()

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            calls.append((args, kwargs, output))

        with ExitStack() as before, replaced(self.run, batch=batch):
            before.enter_context(StepSnapshot(trainer))
            before.enter_context(preserving_modes(self.modules.values()))
            before.callback(model.register_forward_hook(note, with_kwargs=True).remove)
            self._set_mode(mode)
            seed_all(mix(seed))
            with watch, mixed_precision(trainer.accelerator):
                output = compute(batch.data)
            is_training = mode != "evaluation"
            complete_output(output, batch.data, batch.num_samples, "the step", training=is_training)
            result = Pass(output["loss"], output, calls, watch)
            if gradients:
                trainer.backward_step(output["loss"])
                scaler = trainer.accelerator.scaler
                scale = 1.0 if scaler is None else scaler.get_scale()
                found = {name: p.grad for p, name in self.names.items() if p.grad is not None}
                result.gradients = {name: gradient.detach() / scale for name, gradient in found.items()}
        return result

    def _set_mode(self, mode: str) -> None:
        if mode == "evaluation":
            self.trainer.eval_epoch_start()
            loss = self.trainer.loss_func
            for part in loss.modules() if isinstance(loss, nn.Module) else ():
                part.training = False
            return
        self.trainer.train_epoch_start()
        for part in self.modules.values() if mode != "training" else ():
            if mode == "evaluation mode" or isinstance(part, (_DropoutNd, _BatchNorm)):
                part.training = False
            if isinstance(part, nn.RNNBase) and not part.dropout and self.trainer.device.type == "cuda":
                part.training = True  # cuDNN computes gradients in no other mode

    # ------------------------------------------------------------------------------------------ updates

    @contextmanager
    def training(self) -> Iterator[Callable[[Batch, int], dict[str, torch.Tensor]]]:
        """Train for a block: yields a function that makes an update and returns its gradients, by name.

        Its arguments are a batch and a seed.
        """
        trainer, run = self.trainer, self.run
        recorder = _Recorder(self.names)
        handler = CallbackHandler([recorder])
        with Snapshot() as before, replaced(trainer, callback_handler=handler, run_history=InMemoryRunHistory()):
            keep_training(trainer, before)
            before.enter_context(preserving_attributes(*self._with_attributes()))
            run.window.sizes = None
            run.step = trainer._create_step(run)
            run.loss_trackers = create_trackers(trainer)
            run.progress.start_epoch()
            trainer.train_epoch_start()

            def update(batch: Batch, seed: int) -> dict[str, torch.Tensor]:
                seed_all(mix(seed))
                recorder.gradients = {}
                train_step(trainer, run, batch._replace(is_last=True))
                return recorder.gradients

            yield update

    def _with_attributes(self) -> list[nn.Module]:
        """Return the user's own modules, which may keep more than parameters and buffers."""
        own = [part for part in self.modules.values() if not type(part).__module__.startswith("torch.nn")]
        return list(dict.fromkeys(own))

    @contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """Restore what passes and updates do not, such as attributes that the model or the trainer sets."""
        with preserving_attributes(self.trainer, *self._with_attributes()):
            yield


# -------------------------------------------------------------------------------------- samples and comparisons


def is_divisible(batch: Batch) -> bool:
    """Whether a batch can be divided into samples, which lie along the first dimension of its tensors."""
    size = batch.num_samples or 0
    tensors = list(tensors_in(batch.data))
    if any(len(tensor) != size and tensor.ndim > 1 and tensor.shape[1] == size for tensor in tensors):
        return False  # the first dimension may be time
    try:
        select_samples(batch.data, [0], size)
    except (ValueError, IndexError, TypeError):
        return False
    return any(is_as_long(part, size) for part in parts_in([batch.data]))


def select(batch: Batch, rows: Iterable[int]) -> Batch:
    """Return some samples of a batch, in any order."""
    rows = list(rows)
    indices = batch.indices
    if indices is not None:
        indices = indices[rows] if isinstance(indices, torch.Tensor) else [indices[row] for row in rows]
    data = select_samples(batch.data, rows, batch.num_samples or 0)
    return batch._replace(data=data, num_samples=len(rows), total_samples=len(rows), indices=indices)


def sample_tensors(outputs: Any, size: int, like: Iterable[int] | None = None) -> dict[int, torch.Tensor]:
    """Return the tensors in outputs that have a row of numbers for each sample, and none for each pair of samples.

    :param like: numbers of tensors to return; by default those that fit
    :return: tensors by number, counted over all in the outputs
    """
    tensors = dict(enumerate(tensors_in([outputs])))
    if like is not None:
        return {number: tensors[number].detach().float() for number in like if number in tensors}
    return {
        number: tensor.detach().float()
        for number, tensor in tensors.items()
        if len(tensor) == size and size not in tensor.shape[1:] and tensor.is_floating_point()
    }


def change(first: Pass, second: Pass) -> float:
    """Return how far the outputs and the loss of two passes are apart, as a share of the largest value."""
    pairs = list(zip(tensors_in([first.outputs]), tensors_in([second.outputs]), strict=False))
    losses = [p.loss.detach().reshape(-1) for p in (first, second) if isinstance(p.loss, torch.Tensor)]
    pairs += [(losses[0], losses[1])] if len(losses) == 2 else []
    off = 0.0
    for one, other in pairs:
        if one.is_floating_point() and one.shape == other.shape and one.numel():
            one, other = one.detach().double(), other.detach().double()
            off = max(off, float(((one - other).abs().max() / one.abs().max().clamp(min=1e-12)).nan_to_num()))
    return off


def differences(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return how much each sample differs, as a share of the largest value: the greatest over all tensors.

    :raises NotApplicableError: if they cannot be compared
    """
    if not first or [tensor.shape for tensor in first] != [tensor.shape for tensor in second]:
        raise NotApplicableError("The model's outputs do not have a row for each sample.")
    greatest = torch.zeros(len(first[0]))
    for one, other in zip(first, second, strict=True):
        scale = torch.maximum(one.abs().nan_to_num(0, 0, 0).max(), other.abs().nan_to_num(0, 0, 0).max())
        off = (one - other).abs() / scale.clamp(min=1e-12)
        off[(one == other) | (one.isnan() & other.isnan())] = 0
        off = off.nan_to_num(torch.inf).flatten(1).amax(1) if one.ndim > 1 else off.nan_to_num(torch.inf)
        greatest = torch.maximum(greatest, off.cpu())
    return greatest


def distance(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor], factor: float = 1.0) -> float:
    """Return how far gradients are from ``factor`` times others, as a share of their norm."""
    pairs = [(first.get(name), second.get(name)) for name in {*first, *second}]
    zero = torch.zeros(())
    off = sum(
        float(((zero if a is None else a).double() - factor * (zero if b is None else b).double()).square().sum())
        for a, b in ((_dense(a), _dense(b)) for a, b in pairs)
    )
    norm = sum(float(_dense(g).double().square().sum()) for g in first.values())
    return float((off / norm) ** 0.5) if norm else float("inf") if off else 0.0


def _dense(gradient: Any) -> Any:
    return gradient.to_dense().cpu() if isinstance(gradient, torch.Tensor) else gradient


def listed(names: Iterable[Any], most: int = 5) -> str:
    """Return names in a row, the first of them if there are many."""
    names = [str(name) for name in chain(names)]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def parts_by_name(data: Any) -> dict[Any, Any]:
    """Return the parts of a batch by key, or by number; that of a tensor is 0."""
    if isinstance(data, (list, tuple)):
        return dict(enumerate(data))
    return dict(data) if isinstance(data, Mapping) else {0: data}


def with_parts(data: Any, changed: Mapping[Any, Any]) -> Any:
    """Return a batch with other parts, by their names in :func:`parts_by_name`."""
    parts = parts_by_name(data) | dict(changed)
    if isinstance(data, Mapping):
        return parts
    return honor_type(data, parts.values()) if isinstance(data, (list, tuple)) else parts[0]


def describe_error(error: Exception) -> str:
    """Return the class and the first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1] if 'Original Traceback' in str(error) else lines[0]}"
