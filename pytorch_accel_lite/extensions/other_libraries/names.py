"""Names from other libraries, and the corresponding names in this one."""

from __future__ import annotations

#: Our names of arguments (of any method) and events, with the names in other libraries.
ARGUMENTS = {
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
ADVICE = {
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

#: Attributes of other libraries' trainers, with what to use instead.
ATTRIBUTES = {
    "fit()": "Call train(train_dataset, num_epochs, eval_dataset).",
    "test()": "Call evaluate(dataset).",
    "validate()": "Call evaluate(dataset).",
    "add_callback()": "Pass callbacks to Trainer(), or to its callback_handler.add_callbacks().",
    "global_step": "Read progress.update, the number of updates.",
    "current_epoch": "Read progress.epoch, which counts from 1.",
}
