"""The names of arguments and events in other libraries, and the answers to them: which of ours is meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

from pytorch_accel_lite.base.text import did_you_mean

_METHODS = ("__init__", "train")

# Our names of arguments, whichever method takes them, and of events, with the names that other libraries use.
_NAMES: dict[str, tuple[str, ...]] = {
    ours: tuple(theirs.split())
    for ours, theirs in {
        # arguments of a trainer
        "loss_func": "loss loss_fn loss_function criterion",
        "optimizer": "optim optimizers",
        "callbacks": "callback hooks",
        "run_history": "history logger loggers",
        "seed": "random_seed random_state",
        "deterministic": "full_determinism use_deterministic_algorithms",
        "cudnn_benchmark": "benchmark",
        "tf32": "allow_tf32",
        "compile_model": "compile torch_compile",
        # arguments of its methods
        "train_dataset": "dataset data train_data train_ds train_set train_dataloader train_dataloaders train_loader x",
        "eval_dataset": "val_dataset valid_dataset validation_dataset validation_data val_data eval_data valid_ds "
        "val_ds val_dataloader val_dataloaders val_loader eval_loader test_dataset",
        "dataset": "eval_dataset test_dataset test_data data dataloaders dataloader x",
        "num_epochs": "epochs epoch n_epochs max_epochs num_train_epochs",
        "per_device_batch_size": "batch_size bs train_batch_size per_device_train_batch_size eval_batch_size "
        "per_device_eval_batch_size",
        "max_num_train_steps": "max_steps num_steps total_steps max_updates num_updates",
        "gradient_accumulation_steps": "accumulate_grad_batches grad_accumulation_steps accumulation_steps",
        "gradient_clip_norm": "gradient_clip_val max_grad_norm clip_grad_norm grad_clip clip_norm",
        "gradient_clip_value": "clip_grad_value clip_value clipvalue",
        "create_scheduler_fn": "lr_scheduler scheduler schedulers lr_schedule create_scheduler lr_scheduler_type",
        "train_dataloader_kwargs": "dataloader_kwargs loader_kwargs dl_kwargs train_dl_kwargs",
        "dataloader_kwargs": "eval_dataloader_kwargs loader_kwargs dl_kwargs",
        "collate_fn": "data_collator collate",
        "resume_from": "resume resume_from_checkpoint ckpt_path checkpoint",
        "eval_every_n_epochs": "eval_every check_val_every_n_epoch validation_freq eval_interval",
        "auto_microbatch": "auto_find_batch_size",
        # arguments of callbacks
        "early_stopping_patience": "patience",
        "early_stopping_threshold": "min_delta threshold delta",
        "watch_metric": "monitor metric metric_for_best_model",
        "greater_is_better": "mode maximize higher_is_better",
        "save_path": "filepath dirpath path filename",
        "keep": "save_top_k",
        "load_saved_checkpoint": "load_best_model_at_end restore_best_weights",
        # events of callbacks
        "on_training_run_start": "on_train_begin on_train_start on_fit_start",
        "on_training_run_end": "on_train_end on_fit_end",
        "on_train_epoch_start": "on_epoch_begin on_epoch_start",
        "on_training_run_epoch_end": "on_epoch_end",
        "on_train_step_start": "on_train_batch_begin on_train_batch_start on_batch_begin on_batch_start on_step_begin",
        "on_train_step_end": "on_train_batch_end on_batch_end on_substep_end",
        "on_update_end": "on_step_end",
        "on_backward_start": "on_before_backward",
        "on_backward_end": "on_after_backward",
        "on_optimizer_step_start": "on_before_optimizer_step on_pre_optimizer_step",
        "on_optimizer_step_end": "on_before_zero_grad on_optimizer_step",
        "on_eval_epoch_start": "on_validation_start on_validation_epoch_start on_test_begin on_test_start",
        "on_eval_epoch_end": "on_validation_end on_validation_epoch_end on_test_end on_evaluate",
        "on_eval_step_start": "on_validation_batch_start on_test_batch_begin on_test_batch_start",
        "on_eval_step_end": "on_validation_batch_end on_test_batch_end on_prediction_step",
        "on_epoch_checkpoint": "on_save",
        "on_predict_run_start": "on_predict_begin on_predict_start",
        "on_predict_run_end": "on_predict_end on_predict",
        "on_predict_step_end": "on_predict_batch_end",
        "state_dict": "on_save_checkpoint",
        "load_state_dict": "on_load_checkpoint",
    }.items()
}

# Advice for words without a corresponding argument.
_ADVICE: dict[str, str] = {
    word: advice
    for words, advice in {
        "mixed_precision precision fp16 bf16 amp": "pass accelerator=Accelerator(mixed_precision='bf16') to Trainer().",
        "device devices gpus use_cpu num_gpus strategy num_nodes": (
            "Accelerate finds the devices. Start several processes with accelerate launch, or pass "
            "accelerator=Accelerator(cpu=True) to Trainer() to stay on the CPU."
        ),
        "metrics compute_metrics metric eval_metrics": (
            "add MetricsCallback({'accuracy': ...}) with torchmetrics metrics to the callbacks of Trainer()."
        ),
        "patience early_stopping early_stopping_patience": (
            "add EarlyStoppingCallback(early_stopping_patience=...) to the callbacks of Trainer()."
        ),
        "monitor watch_metric metric_for_best_model load_best_model_at_end save_best": (
            "pass watch_metric to a SaveBestModelCallback or an EarlyStoppingCallback among the callbacks of Trainer()."
        ),
        "num_workers shuffle drop_last pin_memory sampler batch_sampler": (
            "pass it in train_dataloader_kwargs={'{word}': ...}, eval_dataloader_kwargs or dataloader_kwargs."
        ),
        "lr learning_rate weight_decay momentum": "pass it to the optimizer that you pass to Trainer().",
        "save_every save_steps save_dir output_dir checkpoint_dir default_root_dir": (
            "add SaveTrainingStateCallback(save_dir=...) to the callbacks of Trainer()."
        ),
        "verbose progress_bar enable_progress_bar disable_tqdm": (
            "pass callbacks=get_default_callbacks(progress_bar=False) to Trainer() for no bar, or callbacks=[] for no "
            "output."
        ),
        "limit_train_batches limit_val_batches fast_dev_run": (
            "add LimitBatchesCallback(num_batches) to the callbacks of Trainer()."
        ),
        "use_ema ema ema_decay": "add ModelEmaCallback(decay=...) to the callbacks of Trainer().",
        "args training_args": "there is no arguments object: pass the arguments to Trainer() and train().",
    }.items()
    for word in words.split()
}


def suggest(word: str, known: Collection[str], cutoff: float = 0.6) -> str:
    """Return ``" Did you mean 'x'?"`` for what others call ``word``, or for what is spelt alike, or nothing.

    :param cutoff: how similar a word must be, from 0 to 1
    """
    ours = next((ours for ours, theirs in _NAMES.items() if word in theirs and ours in known), None)
    return f" Did you mean {ours!r}?" if ours else did_you_mean(word, known, cutoff)


def answers(cls: type, method: Callable[..., Any], words: set[str]) -> Iterator[str]:
    """Yield a sentence for each argument that a method does not have."""
    for word in sorted(words):
        yield f"{_called(cls, method.__name__)} has no argument {word!r}: {_answer(cls, method, word)}"


def _answer(cls: type, method: Callable[..., Any], word: str) -> str:
    candidates = [word, *(ours for ours, theirs in _NAMES.items() if word in theirs)]
    known = list(inspect.signature(method).parameters)[1:]
    for ours in candidates:
        if ours in known:
            return f"it is called {ours}."
    for other in _METHODS:
        for ours in candidates if hasattr(cls, "train") and method.__name__ != other else ():
            if ours in inspect.signature(getattr(cls, other)).parameters:
                return f"pass {ours} to {_called(cls, other)}."
    if word in _ADVICE:
        return _ADVICE[word].replace("{word}", word)
    return did_you_mean(word, known).strip() or f"it has {', '.join(known)}."


def _called(cls: type, name: str) -> str:
    return f"{cls.__name__}()" if name == "__init__" else f"{name}()"
