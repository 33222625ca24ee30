"""Averaging the weights of the model during training."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Literal

import torch
from torch.nn.parameter import is_lazy

from pytorch_accel_lite.checkpoint import file_path, model_state, write_checkpoint
from pytorch_accel_lite.extending import CallbackHandler, RunRequest, TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import (
    check_choice,
    check_function,
    check_range,
    checked_calls,
    warn_outside,
)
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import ExpectedMetrics, MetricWatcher, set_own_listening
from pytorch_accel_lite.extension_tools.modules_and_devices import are_sharded, quantised_entries
from pytorch_accel_lite.extension_tools.plain_types import StateDict
from pytorch_accel_lite.extension_tools.states_and_files import LEFT_OUT, leave_out_frozen, sharded_like
from pytorch_accel_lite.extensions.model_ema.moving_averages import ModelEma, ShardedEma


@checked_calls("__init__")
class ModelEmaCallback(MetricWatcher):
    """Keep an exponential moving average (EMA) of the model's weights, evaluate it, and save the best.

    Place this callback before callbacks that use its metrics. The averaged weights never replace the trained ones: they
    are in ``callback.ema.module`` and in the saved file.

    Args:
        decay: fraction of the average retained at each update, from 0 to 1
        evaluate_during_training: evaluate the averaged model whenever the model is evaluated at the end of an epoch,
            and save it if it is the best so far; if ``False``, save it after every epoch
        save_path: portable checkpoint file for the averaged model; ``None`` does not save it. If the same callback is
            used in several runs, only a better average replaces the best one.
        watch_metric: name, including the prefix, of the metric that determines the best average; defaults to the
            evaluation loss, ``ema_model_eval_loss_epoch``
        greater_is_better: whether larger values are better; ``None`` uses what the metric declares, see
            ``SaveBestModelCallback``
        model_ema: the averaging class, called as ``model_ema(model, decay=decay)``
        callbacks: callbacks, such as metrics, for the evaluation of the averaged model; no others take part in it
        update_every: ``"update"``, or ``"epoch"`` to average once per epoch
        warmup: start with a smaller decay, see ``ModelEma``
        prefix: prefix of the averaged model's metric names; must be unique if there are several averages

    Attributes:
        ema: the ``ModelEma`` of the current or last run, also available as ``ema_model``

    Raises:
        ValueError: at the start of a run, if two averages share a prefix, or the weights are sharded by an engine that
            does not show them (FSDP1, DeepSpeed)
    """

    def __init__(
        self,
        decay: float = 0.99,
        evaluate_during_training: bool = True,
        save_path: str | os.PathLike[str] | None = "ema_model.pt",
        watch_metric: str | None = None,
        greater_is_better: bool | None = None,
        model_ema: Callable[..., ModelEma] = ModelEma,
        callbacks: Iterable[TrainerCallback | type[TrainerCallback]] = (),
        *,
        update_every: Literal["update", "epoch"] = "update",
        warmup: bool = False,
        prefix: str = "ema_model_",
    ) -> None:
        check_choice("update_every", update_every, ("update", "epoch"))
        if not isinstance(prefix, str):
            raise TypeError(f"prefix={prefix!r} must be text, not {type(prefix).__name__}.")
        if not prefix:
            raise ValueError(f"prefix={prefix!r} must not be empty: it distinguishes the averaged model's metrics.")
        self._must_watch = save_path is not None or watch_metric is not None  # also if several datasets are evaluated
        watch_metric = f"{prefix}eval_loss_epoch" if watch_metric is None else watch_metric
        super().__init__(watch_metric, greater_is_better, reset_on_train=False)
        self.decay = check_range("decay", decay, most=1)
        self.evaluate_during_training = evaluate_during_training
        self.save_path = None if save_path is None else file_path("save_path", save_path, "a checkpoint")
        self.model_ema = check_function("model_ema", model_ema)
        self.update_every = update_every
        self.warmup = warmup
        self.prefix = prefix
        self.ema: ModelEma | None = None
        self._handler = CallbackHandler(callbacks)
        for callback in self._handler:
            if isinstance(callback, MetricWatcher):
                raise ValueError(
                    f"callbacks=[{type(callback).__name__}(...)]: it acts at the ends of epochs, which callbacks of an "
                    f"evaluation do not see. Pass it to the trainer, with watch_metric={watch_metric!r}, for example."
                )
        self._follows = False  # whether it evaluates whenever the run does
        self._loaded: StateDict = {}
        self._settings_before: dict[str, object] = {}

    @property
    def ema_model(self) -> ModelEma | None:
        """The average of the current or last run."""
        return self.ema

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        request.claim_path(self, "save_path", self.save_path, "averaged model")
        if self.evaluate_during_training:
            nested = ExpectedMetrics()
            nested.record(self, {"eval_loss_epoch": False}, in_evaluation=True)
            self._handler.configure_run(trainer, replace(request, metrics=nested, state_sources=[]))
            request.metrics.include(nested, self.prefix, self._handler)
            if self._is_watching(trainer):
                request.metrics.watch(self._watched)

    def on_dataloaders_created(self, trainer: TrainerLike, **kwargs: object) -> None:
        if trainer.train_dataloader is None or trainer.run_config is not None:  # an evaluation, alone or within a run
            return
        # Copy the model before Accelerate wraps its forward: the copy needs a forward of its own.
        self.ema = None if trainer.is_sharded else self._create(trainer, self.model_ema)
        self._handler.call_event("on_dataloaders_created", trainer)

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self.evaluate_during_training:
            self._check_evaluation(trainer)
        if trainer.is_sharded:
            self._average_shards(trainer)
        if self.evaluate_during_training and self._is_watching(trainer):
            self._watched.start(trainer)
        self._is_due = False
        self._follows = self.evaluate_during_training and trainer.run.evaluates_within_epochs
        set_own_listening(trainer, self, self._follows, "on_train_step_start", "on_train_step_checkpoint")
        self._average.to(trainer.device)
        # By now, rank 0's weights have been broadcast to all ranks. A resumed run restores the average later, if its
        # state has one.
        self._average.set(trainer.get_model(keep_torch_compile=False))

    def _is_watching(self, trainer: TrainerLike) -> bool:
        """Whether a metric decides which average is the best. Those of several datasets have no common loss."""
        data = trainer.eval_dataset
        return data is not None and (self._must_watch or not isinstance(data, Mapping))

    def _create(self, trainer: TrainerLike, model_ema: Callable[..., ModelEma]) -> ModelEma:
        model = trainer.get_model(keep_torch_compile=False)
        if any(map(is_lazy, chain(model.parameters(), model.buffers()))):
            raise ValueError(
                "ModelEmaCallback cannot average uninitialised lazy layers. Pass the model a batch before training: "
                "model(inputs)."
            )
        average = model_ema(model, decay=self.decay, **({"warmup": True} if self.warmup else {}))
        self._settings_before = _settings_of(average)
        return average

    def _average_shards(self, trainer: TrainerLike) -> None:
        """Create the average of sharded weights, which only exist once the model is prepared."""
        if not are_sharded(trainer.get_model().parameters()) or self.model_ema is not ModelEma:
            raise ValueError(
                "ModelEmaCallback can average sharded weights only with fully_shard, tensor parallelism or "
                "fsdp_version=2, and without a model_ema of your own. Leave it out, or train without sharding."
            )
        self.ema = self._create(trainer, ShardedEma)

    def _check_evaluation(self, trainer: TrainerLike) -> None:
        if self.save_path is not None and not trainer.eval_dataloaders:
            warn_outside(
                "ModelEmaCallback has no evaluation data to find the best average, so it saves none. Pass eval_dataset "
                "to train(), or set evaluate_during_training=False to save the average after every epoch."
            )
        averages = [other for other in trainer.callback_handler if isinstance(other, ModelEmaCallback)]
        if [other.prefix for other in averages if other.evaluate_during_training].count(self.prefix) > 1:
            raise ValueError(
                f"prefix={self.prefix!r} is used by two ModelEmaCallbacks, which would record the same metric names. "
                "Give each its own prefix."
            )

    @property
    def _average(self) -> ModelEma:
        assert self.ema is not None
        return self.ema

    def on_optimizer_step_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self.update_every == "update" and not trainer.update_was_skipped:
            assert self.ema is not None  # the property would cost a call in each step
            self.ema.update(trainer.get_model(keep_torch_compile=False))

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self.update_every == "epoch":
            self._average.update(trainer.get_model(keep_torch_compile=False))

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if not self.evaluate_during_training:
            self._save(trainer, {})
        elif trainer.run.evaluation_is_due:
            self._handle_new(trainer, mid_epoch=False)

    def on_eval_epoch_end(self, trainer: TrainerLike, *, is_intermediate: bool = False, **kwargs: object) -> None:
        self._is_due |= self._follows and not is_intermediate and trainer.run.kind == "training"

    def _handle_new(self, trainer: TrainerLike, mid_epoch: bool) -> None:
        """Evaluate the average after an evaluation of the run, and save it if it is the best."""
        self._evaluate(trainer)
        if self._is_watching(trainer):
            super()._handle_new(trainer, mid_epoch)
        self._is_due = False

    def _handle_value(self, trainer: TrainerLike, metric: float) -> None:
        if self._watched.is_better(metric, self.best_metric):
            self.best_metric = metric
            self._save(trainer, {self.watch_metric: metric})

    def _evaluate(self, trainer: TrainerLike) -> None:
        average = self._average
        if isinstance(average, ShardedEma):
            with average.in_place_of(trainer.get_model(keep_torch_compile=False)):
                trainer.run_evaluation(None, self.prefix, is_intermediate=False, callbacks=self._handler)
        else:
            trainer.run_evaluation(average.module, self.prefix, is_intermediate=False, callbacks=self._handler)

    def _save(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        if self.save_path is None:
            return
        path = self.save_path
        module = self._average.module
        trainer.sync_buffers(module)
        weights = trainer.ranks.repeat_if_process_lost(lambda: model_state(module))
        left_out = leave_out_frozen(module, weights, only_quantised=True)
        checkpoint = {"model_state_dict": weights, "epoch": trainer.progress.epoch, **metrics}
        checkpoint |= {LEFT_OUT: left_out} if left_out else {}
        writes = partial(getattr, trainer.accelerator, "is_local_main_process")  # read when saving, as it may change
        trainer.ranks.run_together(lambda: write_checkpoint(checkpoint, path) if writes() else None)

    def state_dict(self) -> StateDict:
        """Return the averaged weights, the number of updates, and the best value."""
        if self.ema is None:
            return self._loaded
        weights = dict(self.ema.module.state_dict())
        for name in quantised_entries(self.ema.module, weights):  # quantised weights of the model, not averaged
            del weights[name]
        state = {**super().state_dict(), "module": weights, "num_updates": self.ema.num_updates}
        before, settings = self._settings_before, _settings_of(self.ema)
        # What the program has changed since. It may create a resumed average with other settings than before.
        state["settings"] = {name: value for name, value in settings.items() if value != before.get(name)}
        buffers = {name: buffer.detach() for name, buffer in self._unsaved_buffers().items()}
        return {**state, "buffers": buffers} if buffers else state

    def _unsaved_buffers(self) -> dict[str, torch.Tensor]:
        """Return the averaged buffers that are not in the state of the averaged model (``persistent=False``)."""
        module = self._average.module
        saved = module.state_dict().keys()
        # Masks do not change.
        return {name: b for name, b in module.named_buffers() if name not in saved and b.dtype is not torch.bool}

    def load_state_dict(self, state: StateDict) -> None:
        """Load the state returned by ``state_dict()``. Outside a run, the state is kept until the average exists."""
        self._loaded = state
        if self.ema is not None and state:
            super().load_state_dict(state)
            current = self.ema.module.state_dict()
            weights = {name: sharded_like(current.get(name), value) for name, value in state["module"].items()}
            quantised = quantised_entries(self.ema.module, current)
            self.ema.module.load_state_dict(weights, strict=not quantised)
            self.ema.num_updates = state["num_updates"]
            for name, value in state.get("settings", {}).items():
                setattr(self.ema, name, value)
            saved = state.get("buffers", {})
            for name, buffer in self._unsaved_buffers().items():
                if name in saved and saved[name].shape == buffer.shape:
                    buffer.copy_(saved[name])


def _settings_of(average: ModelEma) -> dict[str, object]:
    """Return the attributes of an average that are numbers or text, such as the decay, or those of a subclass."""
    names = vars(average).keys() - {"num_updates", "training"}
    return {name: vars(average)[name] for name in names if isinstance(vars(average)[name], (int, float, str))}
