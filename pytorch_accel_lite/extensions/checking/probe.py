"""Trying a training program without leaving a trace: the ``Probe`` that checks use, and how they compare results."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import torch
from accelerate.utils import set_seed
from accelerate.utils.operations import honor_type
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from pytorch_accel_lite.callbacks import TrainerCallback
from pytorch_accel_lite.data import Batch, BatchData
from pytorch_accel_lite.extending import DIVISIONS, Share, TrainerLike, create_division
from pytorch_accel_lite.extension_tools.arguments_and_errors import is_overridden
from pytorch_accel_lite.extension_tools.data_and_batches import (
    TARGET_KEYS,
    infer_batch_size,
    is_as_long,
    parts_in,
    select_samples,
    tensors_in,
)
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import all_optimized_parameters, other_modules
from pytorch_accel_lite.extension_tools.runs_and_steps import replaced
from pytorch_accel_lite.extensions.schedule_preview import schedule_values
from pytorch_accel_lite.extensions.trials import Trial, UserCallbacks

#: Functions of torch that compare outputs, their first argument, with targets, their second.
LOSSES_OF_ELEMENTS = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"}
_LOSSES = {"cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", *LOSSES_OF_ELEMENTS}
_RANDOM = {"rand", "randn", "randint", "rand_like", "randn_like", "randperm", "normal", "bernoulli", "uniform"}
_RANDOM |= {"multinomial", "poisson", "exponential", "standard_gamma", "sample_dirichlet", "binomial", "random"}
_ARITHMETIC = {"sub", "rsub", "mul", "add", "div", "truediv"}
_ACTIVATIONS = {"relu", "sigmoid", "softmax", "tanh"}
#: Relative differences up to this come from computing in float32 in another order.
TOLERANCE = 2e-4


class NotApplicableError(Exception):
    """Raised by a check that does not apply to a program; its text is the reason."""


#: The name of a part of a batch: its key in a dict, its number in a list or tuple.
Part = Hashable
#: Makes an update from a batch, or from a list with a batch for each logical process. The second argument is a seed.
Update = Callable[..., "Pass"]
#: The outcome of a check, the worst first.
Status = Literal["failed", "warned", "passed", "not applicable"]


@dataclass(frozen=True)
class Finding:
    """Something that a check has found; see ``mistake()``, ``doubt()`` and ``remark()``.

    Args:
        status: ``"failed"`` for a mistake, ``"warned"`` for what may be one, ``"passed"`` for a remark, or ``"not
            applicable"`` with the reason
        message: what was seen, with numbers and names
        advice: what to change; by default the advice in the docstring of the check
        details: the numbers and names of the message, for programs, by name
    """

    status: Status
    message: str
    advice: str = ""
    details: Mapping[str, object] = field(default_factory=dict)


def mistake(message: str, advice: str = "", **details: object) -> Finding:
    """Return a finding that is a mistake, so that the check fails."""
    return Finding("failed", message, advice, details)


def doubt(message: str, advice: str = "", **details: object) -> Finding:
    """Return a finding that may be a mistake, so that the check warns."""
    return Finding("warned", message, advice, details)


def remark(message: str, **details: object) -> Finding:
    """Return a finding that is worth knowing, although the check passes."""
    return Finding("passed", message, "", details)


# ------------------------------------------------------------------------------------------- what a step calls


@dataclass(eq=False)
class LossCall:
    """A call of one of torch's loss functions.

    Args:
        name: name of the loss function in ``torch.nn.functional``
        outputs: the outputs that the function was called with
        targets: the targets that the function was called with
        ignored: the target that the function ignores, its ``ignore_index``
        activation: the function that gave the outputs, such as ``"softmax"``, or an empty string
        mean: the mean of the result; NaN until it is known
    """

    name: str
    outputs: torch.Tensor
    targets: torch.Tensor
    ignored: int
    activation: str
    mean: float = float("nan")


class Watch(TorchFunctionMode):
    """Notes the functions and modules that a step calls within a ``with`` block.

    Args:
        model: the model whose calls are noted
        names: the names of its modules

    Attributes:
        calls: positional and named arguments, and the outputs, of each call of the model
        modes: whether each part of the model was in training mode when it was called, by name
        first_input: the input of the first layer with weights
        losses: the calls of torch's loss functions
        dropouts: the functions that dropped out units
        drawn: the functions that drew other random numbers, outside of the model
        drawn_by_model: the functions that drew other random numbers within the model
        squares: the sizes of squares to which arithmetic has expanded a column and a row, one of them outputs
    """

    def __init__(self, model: nn.Module, names: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.calls: list[tuple[tuple[object, ...], dict[str, object], BatchData]] = []
        self.modes: dict[str, bool] = {}
        self.first_input: torch.Tensor | None = None
        self.losses: list[LossCall] = []
        self.dropouts: list[str] = []
        self.drawn: list[str] = []
        self.drawn_by_model: list[str] = []
        self._is_in_model = False
        self.squares: set[int] = set()
        self._activations: dict[int, tuple[str, torch.Tensor]] = {}
        self._model, self._names = model, names

    def note_call(self, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: BatchData) -> None:
        """Note a call of the model that has ended."""
        self._is_in_model = False
        self.calls.append((args, kwargs, output))

    def note_part(self, part: nn.Module, args: tuple[object, ...]) -> None:
        """Note a call of the model, or of one of its parts, that begins."""
        self._is_in_model |= part is self._model
        if part in self._names:
            self.modes[self._names[part]] = part.training
        is_layer = isinstance(part, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase))
        if is_layer and self.first_input is None and args and isinstance(args[0], torch.Tensor):
            self.first_input = args[0].detach()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}

        def argument(position: int, name: str, default: Any = None) -> Any:
            return args[position] if len(args) > position else kwargs.get(name, default)

        name = getattr(func, "__name__", "").strip("_") or str(func)
        drops_out = "dropout" in name and argument(2, "training", kwargs.get("train", True)) and argument(1, "p", 0.5)
        if drops_out or (name == "scaled_dot_product_attention" and argument(4, "dropout_p")):
            self.dropouts.append(name)
        if name in _RANDOM:
            (self.drawn_by_model if self._is_in_model else self.drawn).append(name)
        if name in _ARITHMETIC and len(args) > 1:
            self._note_square(*args[:2])
        if name in _LOSSES:
            outputs, targets = argument(0, "input"), argument(1, "target")
            ignored = argument(4, "ignore_index", -100) if name in ("cross_entropy", "nll_loss") else -100
            activation = self._activations.get(outputs.data_ptr(), ("",))[0]
            self.losses.append(LossCall(name, outputs.detach(), targets.detach(), ignored, activation))
        result = func(*args, **kwargs)
        if name in _ACTIVATIONS and isinstance(result, torch.Tensor):
            self._activations[result.data_ptr()] = name, result  # the reference keeps its memory from being reused
        if name in _LOSSES and isinstance(result, torch.Tensor):
            self.losses[-1].mean = float(result.detach().float().mean())
        return result

    def _note_square(self, first: object, second: object) -> None:
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            column, row = (first, second) if first.ndim > second.ndim else (second, first)
            is_square = row.ndim == 1 and column.shape == (len(row), 1) and len(row) > 1
            if is_square and column.requires_grad != row.requires_grad:
                self.squares.add(len(row))


@dataclass(eq=False)
class Pass:
    """The results of a forward pass, with or without a backward pass, or of an update.

    Args:
        output: what the step returned
        watch: the calls of the step
        gradients: the gradients by name of the parameter
    """

    output: dict[str, Any]
    watch: Watch
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def outputs(self) -> BatchData:
        """The outputs of the model in the order of its calls; without a call, the outputs that the step returned."""
        return [output for *_, output in self.watch.calls] or self.output.get("model_outputs")

    @property
    def loss(self) -> float:
        """The loss, which in an evaluation is the mean over the samples."""
        if self.output.get("loss") is None:
            raise NotApplicableError("The evaluation has no loss.")
        return float(self.output["loss"].detach().float().mean())

    @property
    def numbers(self) -> list[torch.Tensor]:
        """All outputs of the model, and the loss."""
        tensors = [*tensors_in([self.outputs]), *parts_in([self.output.get("loss")])]
        return [tensor.detach() for tensor in tensors if tensor is not None and tensor.is_floating_point()]

    def rows(self, size: int) -> list[torch.Tensor]:
        """Return the outputs that have a row for each of ``size`` samples, and none for each pair of samples."""
        tensors = [tensor.detach() for tensor in tensors_in([self.outputs]) if tensor.is_floating_point()]
        rows = [tensor for tensor in tensors if tensor.shape[:1] == (size,) and size not in tensor.shape[1:]]
        if not rows:
            raise NotApplicableError("The model's outputs do not have a row for each sample.")
        return rows

    @property
    def is_random(self) -> bool:
        """Whether random numbers were drawn, which differ between batches of different sizes."""
        return bool(self.watch.drawn or self.watch.drawn_by_model or self.watch.dropouts)

    def without_randomness(self) -> Pass:
        """Return the pass itself, or raise an error if it has drawn random numbers."""
        if self.is_random:
            raise NotApplicableError("The step draws random numbers of its own.")
        return self


class _GradientRecorder(TrainerCallback):
    """Notes the gradients of an update, and the output of the step.

    Args:
        names: the names of the parameters whose gradients are noted

    Attributes:
        result: the pass in which the gradients are noted
    """

    result: Pass

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self.names = names

    def on_optimizer_step_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.result.gradients |= gradients_of(self.names)

    def on_train_step_end(
        self, trainer: TrainerLike, batch: BatchData, batch_output: dict[str, Any], **kwargs: Any
    ) -> None:
        self.result.output = batch_output


def gradients_of(names: Mapping[nn.Parameter, str], scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Return copies of gradients by name, divided by a scale."""
    return {name: p.grad.detach().to_dense() / scale for p, name in names.items() if p.grad is not None}


# ------------------------------------------------------------------------------------------------- the program


class Probe:
    """A training program that a check tries. Whatever a check changes is restored after it.

    Args:
        trial: the trial that prepares the trainer
        callbacks: the user's own callbacks
        create_scheduler_fn: the argument of ``train()`` with this name
        seconds: how long the checks may take

    Attributes:
        trainer: the trainer, prepared for training
        run: a run that exists only for the checks
        create_scheduler_fn: the argument of ``train()`` with this name
        failed_callbacks: the errors that the user's own callbacks raised in updates, by class
        latest_watch: the calls of the latest pass, even if it failed
    """

    def __init__(
        self, trial: Trial, callbacks: list[TrainerCallback], create_scheduler_fn: Any, seconds: float
    ) -> None:
        self.trainer = trial.trainer
        self.run = trial.run
        self._trial = trial
        self.create_scheduler_fn = create_scheduler_fn
        self.failed_callbacks: dict[str, str] = {}
        self._callbacks = callbacks
        self._end = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until the checks must end."""
        return self._end - time.monotonic()

    @property
    def has_own_step(self) -> bool:
        """Whether the program makes its own updates, so that it cannot compute the loss of a batch alone."""
        return is_overridden(self.trainer, "train_step")

    def refuse_own_step(self) -> None:
        """Raise an error if the program makes its own updates, so that it cannot compute the loss of a batch alone."""
        if self.has_own_step:
            raise NotApplicableError(f"{type(self.trainer).__name__}.train_step makes its own updates.")

    # batches

    @cached_property
    def batches(self) -> list[Batch]:
        """The first training batches, at most four."""
        batches = list(islice(self.run.data.required_train_loader.steps(1), 4))
        if not batches:
            raise NotApplicableError("train_dataset gives no batch.")
        return batches

    @cached_property
    def eval_batches(self) -> list[Batch]:
        """The first evaluation batches, at most four."""
        loader = self.run.data.eval_loader
        return [] if loader is None else list(islice(loader.steps(1), 4))

    @cached_property
    def batch(self) -> Batch:
        """A few samples of a training batch, as many as no other dimension has; all if it cannot be divided."""
        return self._few(self.batches[0])

    @cached_property
    def eval_batch(self) -> Batch:
        """A few samples of an evaluation batch, or of a training batch if there is no evaluation dataset."""
        return self._few(self.eval_batches[0]) if self.eval_batches else self.batch

    def _few(self, batch: Batch) -> Batch:
        size = infer_batch_size(batch.data, batch.num_samples)
        batch = batch._replace(num_samples=size, total_samples=size)
        if not is_divisible(batch):
            return batch
        others = {length for tensor in tensors_in(batch.data) for length in tensor.shape[1:]}
        few = next((number for number in (8, 7, 6, 5, 4) if number <= size and number not in others), min(size, 8))
        selected = select(batch, range(few))
        whole = batch._replace(num_samples=None)  # nodes of a graph, say, belong together
        for candidate in (selected, whole) if few < size else ():
            with suppress(Exception):
                self.watch_step(candidate)
                return candidate
        return selected

    def require_samples(self, batch: Batch, least: int = 2) -> int:
        """Return the number of samples of a batch, after checking that it has at least ``least`` and can be divided."""
        if not batch.num_samples or not is_divisible(batch) or batch.num_samples < least:
            raise NotApplicableError(f"The batch cannot be divided into at least {least} samples.")
        return batch.num_samples

    # parameters and modules

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """The parts of the model and of the trainer's other modules, such as the loss function, by name."""
        parts = dict(self.trainer.get_model().named_modules())
        for attribute, module in other_modules(self.trainer).items():
            parts |= {f"{attribute}.{name}".rstrip("."): part for name, part in module.named_modules()}
        return parts

    @cached_property
    def names(self) -> dict[nn.Parameter, str]:
        """The names of the parameters of all ``modules``, and of further parameters of the optimizer."""
        names: dict[nn.Parameter, str] = {}
        for name, part in self.modules.items():
            for key, parameter in part.named_parameters(recurse=False):
                names.setdefault(parameter, f"{name}.{key}".lstrip("."))
        for number, parameter in enumerate(all_optimized_parameters(self.trainer)):
            names.setdefault(parameter, f"parameter {number} of the optimizer")
        return names

    @cached_property
    def optimized(self) -> dict[nn.Parameter, str]:
        """The names of the parameters that are trained."""
        trained = all_optimized_parameters(self.trainer)
        return {parameter: self.names[parameter] for parameter in trained if parameter.requires_grad}

    # forward and backward passes

    def train(self, batch: Batch, quiet: bool = False, gradients: bool = False, after: Batch | None = None) -> Pass:
        """Compute the loss of a training batch as a training step does, and optionally its gradients.

        Args:
            quiet: whether to compute in evaluation mode, without dropout and with the statistics of batch norm
            after: a batch to compute just before
        """
        self.refuse_own_step()
        return self._pass("quiet" if quiet else "training", batch, gradients, after=after)

    def evaluate(self, batch: Batch, seed: int = 0, after: Batch | None = None) -> Pass:
        """Compute the loss of a batch as an evaluation does; without an evaluation dataset, as a training step does.

        Args:
            after: a batch to compute just before
        """
        if self.run.data.eval_loader is None:
            self.refuse_own_step()
            return self._pass("quiet", batch, seed=seed, after=after)
        with self._trial.evaluating():
            return self._pass("evaluation", batch, seed=seed, after=after)

    @cached_property
    def change_after_another_batch(self) -> float:
        """How far the outputs for a batch move if a training batch is computed just before it."""
        first, second = (self.evaluate(self.eval_batch, after=after) for after in (None, self.batch))
        return largest_difference(first.numbers, second.numbers)

    def watch_step(self, batch: Batch) -> Watch:
        """Return the calls of a training step, which may make its own updates."""
        if not self.has_own_step:
            return self.train(batch).watch
        with self.training() as update:
            return update(batch).watch

    def _pass(
        self, mode: str, batch: Batch, gradients: bool = False, seed: int = 0, after: Batch | None = None
    ) -> Pass:
        trial, is_evaluation = self._trial, mode == "evaluation"
        with trial.keeping_step(batch), self._preserving_attributes():
            self._set_mode(mode)
            if after is not None:
                trial.output_of(after, is_evaluation, with_gradients=False)
            set_seed(seed)
            with self._watching() as watch:
                output = trial.output_of(batch, is_evaluation, with_gradients=gradients)
            result = Pass(output, watch)
            if gradients:
                self.trainer.backward_step(output["loss"])
                scaler = self.trainer.accelerator.scaler
                result.gradients = gradients_of(self.names, 1.0 if scaler is None else scaler.get_scale())
            return result

    def _set_mode(self, mode: str) -> None:
        if mode == "evaluation":
            self.trainer.eval_epoch_start()
        else:
            self.trainer.train_epoch_start()
        for part in self.modules.values() if mode == "quiet" else ():
            # cuDNN computes gradients of recurrent layers in training mode only.
            part.training = isinstance(part, nn.RNNBase) and not part.dropout
        if mode == "evaluation" and isinstance(self.trainer.loss_func, nn.Module):
            self.trainer.loss_func.eval()

    @contextmanager
    def _watching(self) -> Iterator[Watch]:
        model = self.trainer.get_model()
        watch = self.latest_watch = Watch(model, {part: name for name, part in self.modules.items()})
        of_parts = register_module_forward_pre_hook(watch.note_part)
        with of_parts, model.register_forward_hook(watch.note_call, with_kwargs=True), watch:
            yield watch

    def _preserving_attributes(self, *others: object) -> AbstractContextManager[None]:
        return self._trial.keeping_attributes(*dict.fromkeys(self.modules.values()), *others)

    # updates

    @cached_property
    def curves(self) -> list[list[float]]:
        """The learning rates of the run by parameter group and update; a single rate per group if they are unknown."""
        groups = self.trainer.optimizer.param_groups
        known = [{"lr": float(g.get("lr", 0.0)), "lr_scale": float(g.get("lr_scale", 1.0))} for g in groups]
        create, config = self.create_scheduler_fn, self.run.required_config
        updates, epochs = config.max_num_train_steps, config.num_epochs or 1
        if create is None or isinstance(create, Mapping) or updates is None or config.scheduler_metric is not None:
            return [[group["lr"]] for group in known]
        by_update = config.scheduler_interval == "update"
        return schedule_values(create, min(updates, 20_000) if by_update else epochs, known, epochs)

    @property
    def rates(self) -> list[float]:
        """The highest learning rate of each parameter group."""
        try:
            return [max(curve) for curve in self.curves]
        except Exception:  # the check of the schedule reports the error
            return [float(group.get("lr", 0.0)) for group in self.trainer.optimizer.param_groups]

    @contextmanager
    def training(self, quiet: bool = False, logical_processes: int | None = None) -> Iterator[Update]:
        """Train for a block: yields a function that makes an update from a batch, with a seed as its second argument.

        The user's own callbacks are called in each step.

        Args:
            quiet: whether to train in evaluation mode, without dropout and with the statistics of batch norm
            logical_processes: number of logical processes; updates then take a list with a batch for each
        """
        trainer, trial = self.trainer, self._trial
        if logical_processes is not None and "logical_processes" not in DIVISIONS:
            raise NotApplicableError("The extension 'logical' is not there.")
        recorder = _GradientRecorder(self.names)
        handler = UserCallbacks(self._callbacks)
        handler.failures = self.failed_callbacks
        handler.add_callback(recorder)
        with ExitStack() as before:
            before.enter_context(trial.keeping_training())
            before.enter_context(self._preserving_attributes(*self._callbacks))
            if logical_processes is not None:
                division = create_division("logical_processes", logical_processes, trainer.ranks, trainer.seed or 0)
                before.enter_context(replaced(trainer, division=division))
            before.enter_context(trial.epoch(handler))
            self._set_mode("quiet" if quiet else "training")

            def update(batch: Any, seed: int = 0) -> Pass:
                set_seed(seed)
                with self._watching() as watch:
                    recorder.result = Pass({}, watch)
                    joined = batch._replace(is_last=True) if logical_processes is None else joined_shares(batch)
                    trial.run_step(joined)
                return recorder.result

            yield update


# -------------------------------------------------------------------------------------- samples and comparisons


def is_divisible(batch: Batch) -> bool:
    """Whether a batch can be divided into samples, which lie along the first dimension of its tensors."""
    size = batch.num_samples or 0
    if any(len(tensor) != size and tensor.shape[1:2] == (size,) for tensor in tensors_in(batch.data)):
        return False  # the first dimension may be time
    try:
        select_samples(batch.data, [0], size)
    except (ValueError, IndexError, TypeError):
        return False
    return any(is_as_long(part, size) for part in parts_in([batch.data]))


def joined_shares(batches: Sequence[Batch]) -> Batch:
    """Return the last batch of an epoch on a single process, whose shares are the given batches."""
    last = len(batches) - 1
    total = sum(batch.num_samples or 0 for batch in batches)
    shares = [b._replace(total_samples=total, share=Share(n, 0, n == last)) for n, b in enumerate(batches)]
    return Batch(shares, total, total, True, share=shares[-1].share)


def select(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return some samples of a batch, in any order and as often as wanted."""
    indices = batch.indices
    if indices is not None:
        indices = indices[list(rows)] if isinstance(indices, torch.Tensor) else [indices[row] for row in rows]
    data = select_samples(batch.data, list(rows), batch.num_samples or 0)
    return batch._replace(data=data, num_samples=len(rows), total_samples=len(rows), indices=indices)


def parts_by_name(data: BatchData) -> dict[Part, BatchData]:
    """Return the parts of a batch by key, or by number; a batch that is a tensor is part 0."""
    if isinstance(data, (list, tuple)):
        return dict(enumerate(data))
    return dict(data) if isinstance(data, Mapping) else {0: data}


def tensors_by_name(data: BatchData) -> dict[Part, torch.Tensor]:
    """Return the parts of a batch that are tensors with at least one dimension."""
    return {name: part for name, part in parts_by_name(data).items() if isinstance(part, torch.Tensor) and part.ndim}


def with_parts(data: BatchData, changed: Mapping[Part, BatchData]) -> BatchData:
    """Return a batch in which some parts are replaced, by their names in ``parts_by_name()``."""
    parts = parts_by_name(data) | dict(changed)
    if isinstance(data, Mapping):
        return parts
    return honor_type(data, parts.values()) if isinstance(data, (list, tuple)) else parts[0]


def largest_difference(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> float:
    """Return how far tensors are apart: the greatest difference, as a share of the largest value of its tensor."""
    if [tensor.shape for tensor in first] != [tensor.shape for tensor in second]:
        raise NotApplicableError("The model's outputs have other shapes than before.")
    off = [0.0]
    for one, other in zip(first, second, strict=True):
        one, other = one.double(), other.double()
        apart = (one - other).abs().masked_fill((one == other) | (one.isnan() & other.isnan()), 0.0)
        scale = torch.maximum(one.abs().nan_to_num(0, 0, 0).amax(), other.abs().nan_to_num(0, 0, 0).amax())
        off += [float((apart / scale.clamp(min=1e-12)).nan_to_num(torch.inf).amax())] if one.numel() else []
    return max(off)


def distance(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> float:
    """Return how far gradients are apart, as a share of the norm of the first."""
    zero = torch.zeros(())
    differences = [
        first.get(name, zero.to(other.device)) - second.get(name, zero.to(other.device))
        for name, other in {**first, **second}.items()
    ]
    off, norm = (sum(float(t.double().square().sum()) for t in tensors) for tensors in (differences, first.values()))
    return (off / norm) ** 0.5 if norm else float("inf") if off else 0.0


def targets_of(batch: Batch, rows: list[int]) -> dict[Part, BatchData]:
    """Return the targets of some samples of a batch, by name; an empty dict if targets cannot be told apart."""
    size = batch.num_samples or 0
    targets = {name: part for name, part in parts_by_name(batch.data).items() if name in (*TARGET_KEYS, 1)}
    return {name: select_samples(part, rows, size) for name, part in targets.items() if is_as_long(part, size)}
