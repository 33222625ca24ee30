"""The names of the extensions: what each offers, the arguments that need it, and what it needs itself."""

from __future__ import annotations

#: Names in the package; names in its modules and in ``Trainer`` are prefixed with these.
OFFERED = {
    "advice": ("callbacks.AdviceCallback",),
    "batch_parts": (),  # for steps that compute batches in parts
    "blocks": (),  # Trainer(activation_checkpointing=...), Trainer(compile_model="blocks")
    "checking": ("Trainer.check",),
    "closures": ("Trainer.recompute_gradients",),  # and optimizers that need a closure
    "common_mistakes": (),  # warnings about programs that run
    "compiled_step": (),  # Trainer(compile_step=True)
    "data_fingerprints": (),  # data that differ between processes, or from those of a state
    "energy": ("callbacks.EnergyCallback",),
    "error_notes": (),  # notes on the errors of runs
    "experiment": ("compare_runs", "compare_seeds", "cross_validate"),
    "failed_batches": ("callbacks.SkipFailedBatchesCallback",),  # and train(auto_microbatch=True)
    "finetuning": (
        "finetuning.BN_MODULES",
        "finetuning.Layer",
        "finetuning.LayerGroup",
        "finetuning.ModelFreezer",
        "finetuning.find_blocks",
        "finetuning.layer_group_parameters",
        "finetuning.parameters_by_group",
    ),
    "gradient_spikes": ("callbacks.GradientSpikeCallback",),
    "hang_watch": ("callbacks.HangWatchCallback",),
    "idle_gpus": ("utils.use_idle_gpus",),
    "kept_workers": (),  # persistent workers that have the data as they are
    "logical": ("Trainer.logical",),
    "manual_optimization": (),  # a trainer that overrides train_step
    "memory_estimate": ("Trainer.estimate_memory",),
    "metrics": ("callbacks.MetricsCallback",),  # and Trainer(metrics=...)
    "metrics_file": ("callbacks.MetricsFileCallback",),
    "mixtures": ("callbacks.MixtureScheduleCallback", "data.Mixture", "data.MixtureSampler", "data.MixtureStream"),
    "model_ema": ("callbacks.ModelEma", "callbacks.ModelEmaCallback", "ema.ModelEma", "utils.ModelEma"),
    "model_summary": ("Trainer.summary", "callbacks.ModelSummaryCallback"),
    "momentum_teacher": ("callbacks.MomentumTeacherCallback",),
    "monitoring": (
        "callbacks.DeviceMemoryCallback",
        "callbacks.GradientNormCallback",
        "callbacks.LearningRateMonitorCallback",
        "callbacks.LossScaleCallback",
    ),
    "muon": ("optimizers.ParameterKinds", "optimizers.muon_with_adamw", "optimizers.split_parameters"),
    "named_schedules": (  # train(create_scheduler_fn="cosine")
        "callbacks.WSDCheckpointCallback",
        "schedulers.WSDLrScheduler",
        "schedulers.wsd_scheduler.DECAYS",
        "schedulers.wsd_scheduler.WSDLrScheduler",
        "schedulers.wsd_scheduler.estimate_checkpoint_steps",
    ),
    "nan_report": ("callbacks.NaNReportCallback",),
    "optuna": ("integrations.OptunaPruningCallback",),
    "other_libraries": (),  # errors that know the names of others
    "packing": (
        "data.PackSequences",
        "data.TokenBatchSampler",
        "data.packed_attention",
        "data.packed_mask",
        "data.packed_mask_function",
        "data.unpack",
    ),
    "plots": (  # and the methods plot()
        "plotting.NothingToPlotError",
        "plotting.new_figure",
        "plotting.overlay_style",
        "plotting.plot_curves",
        "plotting.plot_range_test",
        "plotting.plot_schedule",
        "plotting.plot_sheet",
        "plotting.svg_overlays",
        "plotting.svg_panels",
    ),
    "predictions": (
        "callbacks.PredictionWriterCallback",
        "callbacks.iterate_predictions",
        "callbacks.read_predictions",
    ),
    "pretrained": (),  # save_model(directory) for models of transformers, PEFT, diffusers and timm
    "profiling": ("callbacks.ProfilerCallback", "callbacks.TimingCallback"),
    "progress_bar": ("callbacks.ProgressBarCallback",),
    "progress_table": ("callbacks.ProgressTableCallback",),
    "ray": ("integrations.RayReportCallback",),
    "recorded_settings": (),  # compared by a run that resumes another one
    "remote": (),  # states and models at URLs
    "reports": (  # and the card of save_model()
        "callbacks.PlotMetricsCallback",
        "callbacks.RunLogCallback",
        "callbacks.ShowOutputsCallback",
    ),
    "sanity_check": (),  # train(sanity_check=True)
    "sharding": (),  # models with sharded weights
    "shuffled_streams": ("data.ShuffledStream",),
    "slurm": (),  # SaveTrainingStateCallback(requeue=True)
    "step_logging": (),  # rows of loggers
    "streams": (),  # data that are read in turn
    "sync_batch_norm": ("callbacks.ConvertSyncBatchNormCallback",),
    "takeover": (),  # the command launch
    "throughput": ("callbacks.ThroughputCallback",),
    "trackers": ("callbacks.TrackerCallback",),
    "trials": (),  # what the checks and searches before a training are made with
    "tuning": ("Trainer.find_lr", "Trainer.find_batch_size", "Trainer.diagnose"),
    "unfreezing": ("callbacks.GradualUnfreezingCallback",),
    "user_attributes": (),  # attributes of users in training states
    "worst_samples": ("callbacks.WorstSample", "callbacks.WorstSamplesCallback"),
}
#: The extensions that have arguments of a trainer.
ARGUMENTS = {"logical_processes": "logical", "metrics": "metrics"}
#: The extensions that another one needs: it uses their public names, and is deleted with them.
NEEDED = {
    "advice": ("monitoring",),
    "checking": ("trials",),
    "experiment": ("metrics_file", "plots", "predictions", "worst_samples"),
    "failed_batches": ("batch_parts",),
    "logical": ("batch_parts", "sharding"),
    "memory_estimate": ("finetuning", "model_ema", "sharding", "trials"),
    "metrics_file": ("step_logging",),
    "mixtures": ("streams",),
    "momentum_teacher": ("model_ema",),
    "progress_table": ("progress_bar",),
    "recorded_settings": ("data_fingerprints",),
    "reports": ("plots",),
    "shuffled_streams": ("streams",),
    "takeover": ("hang_watch", "logical", "sharding"),
    "throughput": ("batch_parts", "profiling"),
    "trackers": ("step_logging",),
    "tuning": ("trials",),
    "unfreezing": ("finetuning",),
}
