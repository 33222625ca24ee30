"""Steps compiled with ``torch.compile``: the forward pass and the loss as one graph, and their backward pass."""

from __future__ import annotations

import builtins
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytorch_accel_lite.extending import Batch, BatchAdapter, BatchOutput, LossFunction, Run, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import warn_outside
from pytorch_accel_lite.extension_tools.data_and_batches import BatchData, infer_batch_size, shapes_are_known
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import Count, optimized_parameters
from pytorch_accel_lite.extension_tools.plain_types import Tree

_REPLAYING_MODES = ("reduce-overhead", "max-autotune")  # modes of torch.compile with CUDA graphs


@cache
def _dynamo() -> Any:
    """Return torch's compiler. Importing it takes a second, so it is imported only if needed."""
    from torch._dynamo import eval_frame, exc

    backend_error, limit_error = exc.BackendCompilerFailed, exc.FailOnRecompileLimitHit  # torch 2.7 has further ones
    return SimpleNamespace(
        Error=exc.TorchDynamoException,
        backend_errors=(backend_error, getattr(exc, "ShortenTraceback", backend_error)),
        limit_errors=(limit_error, getattr(exc, "RecompileLimitExceeded", limit_error)),
        reset_code=getattr(eval_frame, "reset_code"),  # noqa: B009 (not in its stubs)
    )


class CompiledForward:
    """Calls a trainer's ``calculate_train_batch_loss`` in compiled form, for any kind of step.

    A batch that cannot be compiled is computed as usual, so that mistakes are reported as usual, too. A last batch of
    another size is never compiled, as it would slow down all others: code for one size is faster than code for any.

    Args:
        trainer: the trainer whose method is called
        options: arguments for ``torch.compile``
        adapter: feeds batches to the trainer's model

    Attributes:
        logged: names, values and weights that the compiled code has logged
        num_samples: number of samples that were collated into the batch; ``None`` if unknown
    """

    def __init__(self, trainer: TrainerLike, options: dict[str, Any], adapter: BatchAdapter) -> None:
        self._trainer = trainer
        self._options = options
        self._usual = trainer.calculate_train_batch_loss
        self._compiled: Callable[[BatchData], BatchOutput] | None = None
        self._run: Run | None = None  # the run whose steps have begun
        self._runs_compiled = True
        self._has_warned = False
        self._is_unchecked = False  # whether shapes of outputs and targets are still to be checked
        self.logged: list[tuple[str, torch.Tensor | float, Count | None]] = []
        self._adapter = adapter
        self.num_samples: int | None = None
        requested = options.get("options") or {}
        replays = options.get("mode") in _REPLAYING_MODES or requested.get("triton.cudagraphs", False)
        self._replays = replays and trainer.device.type == "cuda"
        self._last_cloned = -1  # number of updates before the window with the latest cloned gradients

    def outputs_and_loss(
        self, model: nn.Module, loss_func: LossFunction | None, batch: BatchData, read: Batch | None
    ) -> BatchOutput:
        """Return the adapter's output for a batch, so that torch traces only its data."""
        output = self._adapter.outputs_and_loss(model, loss_func, batch, None)
        if self.num_samples:
            output["batch_size"] = infer_batch_size(batch, self.num_samples)
        return output

    def __call__(self, batch: BatchData) -> BatchOutput:
        """Return the output of the trainer's method."""
        run = self._trainer.current_run
        read = run.batch
        self.num_samples = read.num_samples if read is not None and batch is read.data else None
        if not (self._runs_compiled and torch.is_grad_enabled()) or _has_other_size(run, batch):
            return self._trainer.calculate_train_batch_loss(batch)
        if run is not self._run:
            self._begin(run)
        if self._replays:
            self._begin_replay(run)
        try:
            output = self._call(batch)
        except (_dynamo().Error, *_dynamo().limit_errors) as error:
            output = self._compute_fallback(batch, error)
        if self._replays:
            output["loss"] = _copied(output["loss"])
        if self._is_unchecked and type(output) is dict:
            targets = batch[1] if type(batch) in (tuple, list) and len(batch) > 1 else None
            outputs = output.get("model_outputs")
            self._is_unchecked = not shapes_are_known(self._trainer.loss_func, outputs, targets)
        return output

    def _call(self, batch: BatchData) -> BatchOutput:
        assert self._compiled is not None
        self.logged.clear()
        output = self._compiled(batch)
        for name, value, weight in self.logged:
            self._trainer.log(name, _copied(value) if self._replays else value, weight)
        return output

    def disable(self, reason: str) -> None:
        """Compute all further batches without compilation, and warn once of the reason."""
        if self._runs_compiled:
            self._runs_compiled = False
            self._compiled = None
            warn_outside(f"compile_step: the step is not compiled, because {reason}.")

    def _begin(self, run: Run) -> None:
        """Prepare for the steps of a run."""
        trainer = self._trainer
        self._run = run
        self._last_cloned = -1
        if trainer.calculate_train_batch_loss != self._usual:  # the user has replaced the method meanwhile
            self._usual, self._compiled = trainer.calculate_train_batch_loss, None
        if self._adapter.is_new:
            self._adapter.is_new = False  # otherwise the check would be compiled, too
            self._is_unchecked = "calculate_train_batch_loss" not in run.overridden
        is_wrapped = isinstance(trainer.model, DistributedDataParallel)
        if self._compiled is None:
            self._compile(fullgraph=not is_wrapped)  # the graph does not contain the work of DistributedDataParallel

    def _compile(self, fullgraph: bool) -> None:
        usual = self._usual

        def compute(batch: BatchData) -> BatchOutput:
            return usual(batch)

        # torch keeps compiled code with a code object, permanently, and in globals. Copies separate the trainers.
        scope = {"__builtins__": builtins}
        copied = FunctionType(compute.__code__.replace(), scope, "compute", None, compute.__closure__)
        weakref.finalize(copied, _dynamo().reset_code, copied.__code__).atexit = False
        options = {"fullgraph": fullgraph} | self._options
        if not options["fullgraph"]:
            # The user's code is compiled, too, and torch counts its versions over all trainers. A reset drops the
            # versions of earlier trainers with their models; code that they use again is compiled again.
            torch.compiler.reset()
        self._compiled = torch.compile(copied, **options)

    def _compute_fallback(self, batch: BatchData, error: Exception) -> BatchOutput:
        """Compute a batch for which compilation failed: in several graphs, or if that fails too, without compilation.

        A mistake of the user raises an error in this second attempt as well, without a warning.
        """
        if "fullgraph" in self._options:
            self._usual(batch)  # raises the error of a mistake unchanged
            raise error
        if isinstance(error, _dynamo().limit_errors):
            output = self._usual(batch)
            self._warn(
                "some batches are computed without compilation, because torch has compiled as many versions as it "
                "keeps (torch._dynamo.config.recompile_limit; before torch 2.7, cache_size_limit). Shapes that vary "
                "need compile_step={'dynamic': True}"
            )
            return output
        if not isinstance(error, _dynamo().backend_errors):
            try:
                self._compile(fullgraph=False)
                output = self._call(batch)
                reason = _summarize(error)
                self._warn(f"the step is compiled in parts, because torch cannot compile it as one: {reason}")
                return output
            except _dynamo().Error as other:
                error = other
        output = self._usual(batch)
        self.disable(_summarize(error))
        return output

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_outside(f"compile_step: {reason}.")

    def _begin_replay(self, run: Run) -> None:
        """Start a replay of the CUDA graphs. It overwrites their earlier outputs, such as gradients of this window."""
        if run.window.steps > 1 and run.window.has_gradients and self._last_cloned != run.progress.update:
            self._last_cloned = run.progress.update
            for parameter in optimized_parameters(self._trainer.optimizer):
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


def _has_other_size(run: Run, batch: BatchData) -> bool:
    """Whether a batch is the last of several in an epoch, and has a different number of samples."""
    read = run.batch
    if read is None or not read.is_last or run.progress.step == 0 or run.config is None:
        return False
    size = infer_batch_size(batch) if read.num_samples is None else read.num_samples
    return size != run.config.train_per_device_batch_size


def _copied(values: Tree) -> Tree:
    if isinstance(values, Mapping):
        return {name: _copied(value) for name, value in values.items()}
    return values.clone() if isinstance(values, torch.Tensor) else values


def _summarize(error: Exception) -> str:
    """Return the first line of a compiler error, and the location in the user's code."""
    cause = error.__cause__ or getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    locations = [line for line in lines if line.startswith("File ")]
    return " at ".join([f"{type(cause).__name__}: {lines[0] if lines else ''}".rstrip(".:"), *locations[-1:]])
