"""Names from other libraries, and suggestions of the corresponding names in this one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import TypeVar

from pytorch_accel_lite.base.origins import hide_frames, is_from_this_package, leave_out_libraries, warn_outside
from pytorch_accel_lite.base.text import did_you_mean
from pytorch_accel_lite.base.validation import check_booleans

C = TypeVar("C", bound=type)
T = TypeVar("T")

_PUBLIC_METHODS = (
    *("__init__", "train", "evaluate", "run_evaluation", "predict", "predict_iter"),
    *("find_lr", "find_batch_size", "check", "diagnose", "estimate_memory"),
    *("save_checkpoint", "load_checkpoint", "save_model", "save_training_state"),
)

#: Our names of arguments (of any method) and events, with the names in other libraries.
_NAMES = {
    # arguments of a trainer
    "loss_func": ("loss", "loss_fn", "loss_function", "criterion"),
    "optimizer": ("optim", "optimizers"),
    "callbacks": ("callback", "hooks"),
    "run_history": ("history",),
    "mixed_precision": ("precision",),
    "metrics": ("compute_metrics", "eval_metrics", "metric"),
    "seed": ("random_seed", "random_state"),
    "deterministic": ("full_determinism", "use_deterministic_algorithms"),
    "compile_model": ("compile", "torch_compile"),
    "activation_checkpointing": ("gradient_checkpointing", "use_gradient_checkpointing", "checkpoint_activations"),
    # arguments of its methods
    "train_dataset": (
        "dataset", "data", "train_data", "train_ds", "train_set", "train_dataloader", "train_dataloaders",
        "train_loader", "x",
    ),
    "eval_dataset": (
        "val_dataset", "valid_dataset", "validation_dataset", "validation_data", "val_data", "eval_data", "val_ds",
        "valid_ds", "val_dataloader", "val_dataloaders", "val_loader", "eval_loader", "test_dataset",
    ),
    "dataset": ("eval_dataset", "test_dataset", "test_data", "data", "dataloaders", "dataloader", "x"),
    "num_epochs": ("epochs", "epoch", "n_epochs", "max_epochs", "num_train_epochs"),
    "per_device_batch_size": (
        "batch_size", "bs", "train_batch_size", "per_device_train_batch_size", "per_device_eval_batch_size",
    ),
    "max_num_train_steps": ("max_steps", "num_steps", "total_steps", "max_updates", "num_updates"),
    "gradient_accumulation_steps": ("accumulate_grad_batches", "grad_accumulation_steps", "accumulation_steps"),
    "gradient_clip_norm": ("gradient_clip_val", "max_grad_norm", "clip_grad_norm", "grad_clip", "clip_norm"),
    "gradient_clip_value": ("clip_grad_value", "clip_value", "clipvalue"),
    "create_scheduler_fn": (
        "lr_scheduler", "scheduler", "schedulers", "lr_schedule", "create_scheduler", "lr_scheduler_type",
    ),
    "warmup_steps": ("warmup", "warmup_ratio", "num_warmup_steps"),
    "train_dataloader_kwargs": ("dataloader_kwargs", "loader_kwargs", "dl_kwargs", "train_dl_kwargs"),
    "dataloader_kwargs": ("eval_dataloader_kwargs", "loader_kwargs", "dl_kwargs"),
    "collate_fn": ("data_collator", "collate"),
    "resume_from": ("resume", "resume_from_checkpoint", "ckpt_path", "checkpoint"),
    "evaluate_every": (
        "eval_every", "eval_steps", "val_check_interval", "eval_every_n_steps", "eval_every_n_updates",
        "evaluation_interval", "eval_freq", "eval_strategy", "evaluation_strategy",
    ),
    "eval_every_n_epochs": ("check_val_every_n_epoch", "validation_freq", "eval_interval"),
    "auto_microbatch": ("auto_find_batch_size",),
    # arguments of callbacks
    "save_every_n_steps": (
        "save_every_n_updates", "save_steps", "every_n_train_steps", "every_n_steps", "save_interval", "save_freq",
    ),
    "save_every_n_epochs": ("every_n_epochs", "save_every_epochs"),
    "save_every_n_minutes": ("train_time_interval", "save_every_minutes"),
    "max_checkpoints": ("save_total_limit", "max_to_keep", "num_to_keep", "n_saved", "keep_last"),
    "save_dir": ("output_dir", "checkpoint_dir", "default_root_dir", "directory", "folder", "dirpath"),
    "asynchronous": ("async_save", "save_async", "background"),
    "early_stopping_patience": ("patience",),
    "early_stopping_threshold": ("min_delta", "threshold", "delta"),
    "watch_metric": ("monitor", "metric", "metric_for_best_model"),
    "greater_is_better": ("mode", "maximize", "higher_is_better"),
    "save_path": ("filepath", "dirpath", "path", "filename"),
    "keep": ("save_top_k",),
    "load_saved_checkpoint": ("load_best_model_at_end", "restore_best_weights"),
}  # fmt: skip

#: Our events, with the names of hooks at these points in detectron2, mmengine, fastNLP, Ignite, skorch, fastai,
#: Composer, Keras, Lightning and transformers. Some names mean different points in two of them.
HOOKS = {
    "on_init_end": ("on_after_trainer_initialized",),
    "on_training_run_start": (
        "on_train_begin", "on_train_start", "on_fit_start", "before_train", "before_run", "before_fit", "fit_start",
    ),
    "on_training_run_end": (
        "on_train_end", "on_fit_end", "after_train", "after_run", "after_fit", "fit_end",
    ),
    "on_train_epoch_start": (
        "on_epoch_begin", "on_epoch_start", "on_train_epoch_begin", "before_train_epoch", "before_epoch",
        "epoch_start", "epoch_started", "before_train",
    ),
    "on_train_epoch_end": ("after_train_epoch", "after_train"),
    "on_training_run_epoch_end": ("on_epoch_end", "after_epoch", "epoch_end", "epoch_completed"),
    "on_train_step_start": (
        "on_train_batch_begin", "on_train_batch_start", "on_batch_begin", "on_batch_start", "on_step_begin",
        "on_fetch_data_end", "before_step", "before_train_iter", "before_iter", "before_batch", "before_train_batch",
        "batch_start", "iteration_started", "after_dataloader", "before_forward",
    ),
    "on_train_step_end": (
        "on_train_batch_end", "on_batch_end", "on_substep_end", "after_step", "after_train_iter", "after_iter",
        "after_batch", "after_train_batch", "batch_end", "iteration_completed",
    ),
    "on_update_end": ("on_step_end",),
    "on_backward_start": (
        "on_before_backward", "before_backward", "after_pred", "after_forward", "before_loss", "after_loss",
    ),
    "on_backward_end": ("on_after_backward", "on_grad_computed", "after_backward"),
    "on_optimizer_step_start": (
        "on_before_optimizer_step", "on_before_optimizers_step", "on_pre_optimizer_step", "before_step",
    ),
    "on_optimizer_step_end": (
        "on_before_zero_grad", "on_after_optimizers_step", "on_after_zero_grad", "on_optimizer_step", "after_step",
    ),
    "on_eval_epoch_start": (
        "on_validation_start", "on_validation_epoch_start", "on_test_begin", "on_test_start", "on_test_epoch_start",
        "on_evaluate_begin", "before_val", "before_val_epoch", "before_test", "before_test_epoch", "before_validate",
        "eval_start",
    ),
    "on_eval_epoch_end": (
        "on_validation_end", "on_validation_epoch_end", "on_test_end", "on_test_epoch_end", "on_evaluate",
        "on_evaluate_end", "after_val", "after_val_epoch", "after_test", "after_test_epoch", "after_validate",
        "eval_end",
    ),
    "on_eval_step_start": (
        "on_validation_batch_start", "on_test_batch_begin", "on_test_batch_start", "before_val_iter",
        "before_test_iter", "eval_batch_start", "eval_before_forward",
    ),
    "on_eval_step_end": (
        "on_validation_batch_end", "on_test_batch_end", "on_prediction_step", "after_val_iter", "after_test_iter",
        "eval_batch_end", "eval_after_forward",
    ),
    "on_train_step_checkpoint": ("batch_checkpoint", "iteration_checkpoint"),
    "on_epoch_checkpoint": ("on_save", "on_save_model", "epoch_checkpoint", "before_save_checkpoint"),
    "on_exception": ("exception_raised",),
    "on_predict_run_start": ("on_predict_begin", "on_predict_start", "on_predict_epoch_start", "predict_start"),
    "on_predict_run_end": ("on_predict_end", "on_predict_epoch_end", "on_predict", "predict_end"),
    "on_predict_step_end": ("on_predict_batch_end", "predict_batch_end"),
    "state_dict": ("on_save_checkpoint",),
    "load_state_dict": ("on_load_checkpoint", "after_load_checkpoint"),
}  # fmt: skip

#: Advice for words without a corresponding argument.
_ADVICE = {
    ("fp16", "bf16", "fp8", "amp"): "pass mixed_precision='bf16', or 'fp16', to Trainer().",
    ("device", "devices", "gpus", "use_cpu", "num_gpus", "strategy", "num_nodes"): (
        "Accelerate finds the devices. Start several processes with accelerate launch, or pass "
        "accelerator=Accelerator(cpu=True) to Trainer() to stay on the CPU."
    ),
    ("logger", "loggers", "report_to", "log_with", "tracker"): "add TrackerCallback(<value>) to the callbacks.",
    ("patience", "early_stopping", "early_stopping_patience"): (
        "add EarlyStoppingCallback(early_stopping_patience=...) to the callbacks."
    ),
    ("monitor", "watch_metric", "metric_for_best_model", "load_best_model_at_end", "save_best"): (
        "pass watch_metric to a SaveBestModelCallback or an EarlyStoppingCallback among the callbacks."
    ),
    ("num_workers", "shuffle", "drop_last", "pin_memory", "sampler", "batch_sampler"): (
        "pass it in train_dataloader_kwargs or eval_dataloader_kwargs of train(), or in dataloader_kwargs elsewhere."
    ),
    ("lr", "learning_rate", "weight_decay", "momentum"): "pass it to the optimizer that you pass to Trainer().",
    ("save_every", "save_steps", "save_dir", "output_dir", "checkpoint_dir", "default_root_dir"): (
        "add SaveTrainingStateCallback(save_dir=...) to the callbacks."
    ),
    ("verbose", "progress_bar", "enable_progress_bar", "disable_tqdm"): (
        "pass callbacks=get_default_callbacks(progress_bar=False) to Trainer(), or callbacks=[] for no output."
    ),
    ("tf32", "allow_tf32"): "call torch.set_float32_matmul_precision('high') before training.",
    ("benchmark", "cudnn_benchmark"): "set torch.backends.cudnn.benchmark = True before training.",
    ("num_sanity_val_steps", "sanity_eval_batches"): (
        "train() tries one batch of each eval_dataset, unless sanity_check=False; check(train_dataset, eval_dataset) "
        "tries more."
    ),
    ("stopping_threshold", "divergence_threshold"): (
        "raise StopTrainingError in a callback's on_training_run_epoch_end once the metric in run_history is beyond it."
    ),
    ("limit_train_batches", "limit_val_batches", "fast_dev_run"): (
        "add LimitBatchesCallback(num_batches) to the callbacks."
    ),
    ("use_ema", "ema", "ema_decay"): "add ModelEmaCallback(decay=...) to the callbacks.",
    ("args", "training_args"): "there is no arguments object: pass the arguments to Trainer() and train().",
}

#: Methods of other libraries' trainers that are never called here, with those to override instead.
_REPLACED = {
    "training_step": ("calculate_train_batch_loss", "train_step"),
    "run_step": ("calculate_train_batch_loss", "train_step"),
    "train_step_single": ("calculate_train_batch_loss", "train_step"),
    "one_batch": ("calculate_train_batch_loss", "train_step"),
    "get_loss": ("calculate_train_batch_loss", "calculate_eval_batch_loss"),
    "eval_forward": ("calculate_eval_batch_loss",),
    "compute_loss": ("calculate_train_batch_loss", "train_step"),
    "validation_step": ("calculate_eval_batch_loss",),
    "test_step": ("calculate_eval_batch_loss",),
    "prediction_step": ("calculate_eval_batch_loss", "calculate_predict_batch_output"),
    "predict_step": ("calculate_predict_batch_output",),
    "get_train_dataloader": ("create_train_dataloader",),
    "get_eval_dataloader": ("create_eval_dataloader",),
    "build_train_loader": ("create_train_dataloader",),
    "build_test_loader": ("create_eval_dataloader",),
    "build_lr_scheduler": ("create_scheduler",),
    "val_dataloader": ("create_eval_dataloader",),
    "_clip_gradients": ("clip_gradients",),
    "_prepare_model_optimizer_and_dataloaders": ("_create_accelerator", "training_run_start"),
    "_perform_forward_and_backward_passes": ("calculate_train_batch_loss", "backward_step"),
    "_run_evaluation": ("evaluation_run_start", "evaluation_run_end", "evaluate"),
    "_update_loss_tracker": ("calculate_train_batch_loss", "calculate_eval_batch_loss"),
    "_add_epoch_loss_to_run_history": ("train_epoch_end", "eval_epoch_end"),
}
_OF_OPTIMIZERS = (
    "Pass the optimizer, or a function that creates it from the parameters, to the trainer, and create_scheduler_fn to "
    "train()."
)
#: Further ones, which have no counterpart to override, with what to do instead.
_GONE = {
    "configure_optimizers": _OF_OPTIMIZERS,
    "build_optimizer": _OF_OPTIMIZERS,
    "create_optimizer": _OF_OPTIMIZERS,
    "create_optimizer_and_scheduler": _OF_OPTIMIZERS,
    "build_hooks": "Pass callbacks to the trainer.",
    "_check_eval_batch_size": "Remove it: nothing needs it.",
}


def suggest(word: str, existing: Collection[str], cutoff: float = 0.6) -> str:
    """Return ``" Did you mean 'x'?"`` for the name that other libraries call ``word``, or a similar one, or nothing.

    Args:
        cutoff: how similar a word must be, from 0 to 1
    """
    ours = [ours for ours in _our_names(word) if ours in existing]
    return f" Did you mean {' or '.join(map(repr, ours))}?" if ours else did_you_mean(word, existing, cutoff)


def _our_names(word: str) -> list[str]:
    return [ours for ours, theirs in _NAMES.items() if word in theirs] + events_meant(word)


def events_meant(hook: str) -> list[str]:
    """Return our events at the points where other libraries call a hook of this name."""
    return [event for event, hooks in HOOKS.items() if hook in hooks]


def suggest_arguments(cls: C) -> C:
    """Make the public methods of a class suggest our name for an unknown argument, and check those that are bools."""
    for name in _PUBLIC_METHODS:
        if name in vars(cls):
            setattr(cls, name, _suggesting(vars(cls)[name], cls))
    return cls


def _suggesting(method: Callable[..., T], cls: type) -> Callable[..., T]:
    names = _arguments_of(cls, method)

    @wraps(method)
    def call(self: object, *args: object, **kwargs: object) -> T:
        __tracebackhide__ = True  # IPython and pytest hide this frame
        if not kwargs.keys() <= set(names):
            function = _called(cls, method.__name__)
            answers = {word: _answer(cls, method, word, kwargs[word]) for word in sorted(kwargs.keys() - set(names))}
            raise TypeError(
                " ".join(f"{function} has no argument {word!r}: {answer}" for word, answer in answers.items())
            )
        if method.__name__ != "__init__" and "current_run" not in vars(self):
            raise RuntimeError(
                f"{type(self).__name__}.__init__ does not call super().__init__(model, loss_func, optimizer)."
            )
        check_booleans(method, (self, *args), kwargs)
        try:
            return method(self, *args, **kwargs)
        except KeyboardInterrupt as interrupt:
            leave_out_libraries(interrupt)
            raise
        except Exception as error:
            hide_frames(error)
            raise

    return call


def _arguments_of(cls: type, method: Callable[..., object]) -> list[str]:
    """Return the arguments of a method, which may take those of ``train`` as ``**arguments``."""
    names = list(inspect.signature(method).parameters)[1:]
    if "arguments" not in names:
        return names
    names.remove("arguments")
    return list(dict.fromkeys([*names, *_arguments_of(cls, vars(cls)["train"])]))


def _answer(cls: type, method: Callable[..., object], word: str, value: object) -> str:
    """Return what to write instead of an unknown argument."""
    candidates = [word, *_our_names(word)]
    arguments = _arguments_of(cls, method)
    renamed = next((ours for ours in candidates if ours in arguments), None)
    if renamed:
        return f"it is called {renamed}."
    for other in ("__init__", "train") if hasattr(cls, "train") else ():
        parameters = inspect.signature(getattr(cls, other)).parameters
        moved = next((ours for ours in candidates if ours in parameters), None)
        if moved:
            return f"pass {moved} to {_called(cls, other)}."
    advice = next((advice for words, advice in _ADVICE.items() if word in words), "")
    advice = advice.replace("<value>", repr(value if isinstance(value, str) else "wandb"))
    return advice or did_you_mean(word, arguments).strip() or f"it has {', '.join(arguments)}."


def _called(cls: type, method: str) -> str:
    return f"{cls.__name__}()" if method == "__init__" else f"{method}()"


class AttributeElsewhere:
    """An attribute of other libraries' trainers: reading it raises an ``AttributeError`` that says what to use."""

    def __init__(self, name: str, advice: str) -> None:
        self._name = name
        self._advice = advice

    def __repr__(self) -> str:
        return f"<not there: {self._advice}>"

    def __get__(self, instance: object, owner: type) -> AttributeElsewhere:
        if instance is None:
            return self
        raise AttributeError(f"{owner.__name__} has no {self._name}. {self._advice}")


ATTRIBUTES = [
    AttributeElsewhere("fit()", "Call train(train_dataset, num_epochs, eval_dataset)."),
    AttributeElsewhere("test()", "Call evaluate(dataset)."),
    AttributeElsewhere("validate()", "Call evaluate(dataset)."),
    AttributeElsewhere("add_callback()", "Pass callbacks to Trainer(), or to its callback_handler.add_callbacks()."),
    AttributeElsewhere("global_step", "Read progress.update, the number of updates."),
    AttributeElsewhere("current_epoch", "Read progress.epoch, which counts from 1."),
]


def _warn_of_hooks(cls: type, defined: Collection[str], events: Collection[str]) -> None:
    """Warn of a trainer's methods that are named like events, or like hooks of other libraries, and never called."""
    for name in defined:
        meant = [name] if name in events else [event for event in events_meant(name) if event in events]
        methods = [event.removeprefix("on_") for event in meant if hasattr(cls, event.removeprefix("on_"))]
        if not meant or any(method in defined for method in methods):
            continue
        override = f"Override {' or '.join(methods)}, or define" if methods else "Define"
        warn_outside(
            f"{cls.__name__}.{name} is never called by the trainer: only callbacks have events. {override} "
            f"{' or '.join(meant)} in a TrainerCallback."
        )


def check_subclass(cls: type, trainer_class: type, events: Collection[str] = ()) -> None:
    """Warn of overrides that are never called when a subclass of the trainer is defined.

    Args:
        events: names of the events of callbacks

    Raises:
        TypeError: if it redefines a read-only attribute of the trainer, on which the trainer relies
    """
    classes = [c for c in cls.__mro__ if c is not object and (c is cls or not issubclass(c, trainer_class))]
    defined = {name: value for c in reversed(classes) for name, value in vars(c).items()}
    never_called = {name: advice for name, advice in _GONE.items() if name in defined}
    for name in defined.keys() & _REPLACED.keys():
        if defined.keys().isdisjoint(_REPLACED[name]):
            never_called[name] = f"Override {' or '.join(_REPLACED[name])} instead."
    if not hasattr(cls, "configure_run"):  # it is not a callback, too
        _warn_of_hooks(cls, defined, events)
    for name, advice in never_called.items():
        warn_outside(f"{cls.__name__}.{name} is never called: pytorch_accel_lite has no such method. {advice}")
    for name, value in defined.items() if not is_from_this_package(cls) else ():
        existing = vars(trainer_class).get(name)
        is_read_only = isinstance(existing, property) and existing.fset is None and not isinstance(value, property)
        if is_read_only or name in ("_check_scheduler", "_step_after_epoch"):
            raise TypeError(f"{cls.__name__}.{name} is reserved: the trainer itself has and uses it. Rename yours.")
