"""What each extension gives the facade, and slots that one extension fills; errors that name a missing extension."""

from __future__ import annotations

from pathlib import Path
from typing import Generic, TypeVar

C = TypeVar("C", bound=type)
T = TypeVar("T")

#: Names in the package; names in its modules and in ``Trainer`` are prefixed with these.
OFFERED = {
    "advice": ("callbacks.AdviceCallback",),
    "batch_parts": (),  # for steps that compute batches in parts
    "blocks": (),  # Trainer(activation_checkpointing=...), Trainer(compile_model="blocks")
    "checking": ("Trainer.check",),
    "closures": ("Trainer.recompute_gradients",),  # and optimizers that need a closure
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
    "wsd": (  # and schedules by name: train(create_scheduler_fn="cosine")
        "callbacks.WSDCheckpointCallback",
        "schedulers.WSDLrScheduler",
        "schedulers.wsd_scheduler.DECAYS",
        "schedulers.wsd_scheduler.WSDLrScheduler",
        "schedulers.wsd_scheduler.estimate_checkpoint_steps",
    ),
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


def missing_name_error(name: str, prefix: str = "") -> Exception:
    """Return the error about a missing name in the package, or in ``prefix`` in it.

    If a missing extension has the name of a module, it is an ``ImportError``: ``from ... import`` would replace the
    message of an ``AttributeError``.
    """
    kind = AttributeError if prefix[:1].isupper() else ImportError
    qualified = f"{prefix}.{name}" if prefix else name
    for extension, names in OFFERED.items():
        if qualified in names:
            return kind(f"{qualified} {missing_extension_text(extension)}")
    folder = Path(__file__).parent.name
    owner = f"{prefix!r} object" if prefix[:1].isupper() else f"module {f'{folder}.{prefix}'.rstrip('.')!r}"
    return AttributeError(f"{owner} has no attribute {name!r}")


class _MissingMethod:
    """Stands for a method from a missing extension."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __get__(self, instance: object, owner: type) -> object:
        raise AttributeError(str(self._error))


def add_missing_method_errors(cls: C) -> C:
    """Give a class errors for the methods that it lacks because an extension is missing.

    A ``__getattr__`` would make each attribute of each instance slower to read, and hide the errors of properties.
    """
    for name in [name for names in OFFERED.values() for name in names]:
        prefix, _, method = name.rpartition(".")
        if prefix == cls.__name__ and not hasattr(cls, method):
            setattr(cls, method, _MissingMethod(missing_name_error(method, prefix)))
    return cls


def missing_extension_text(extension: str) -> str:
    """Return the end of an error about a missing extension, which begins with the name that needs it."""
    folder = Path(__file__).parent.name
    return (
        f"belongs to the extension {extension!r}, which is not installed: its folder "
        f"{folder}/extensions/{extension} is missing. Reinstall the package."
    )


class Slot(Generic[T]):
    """A seam that a single extension fills.

    Args:
        extension: the name of the extension, for the error if it is missing
    """

    def __init__(self, extension: str) -> None:
        self.extension = extension
        self.content: T | None = None

    def fill(self, content: T) -> None:
        """Fill the slot.

        Raises:
            RuntimeError: if it is filled already
        """
        if self.content is not None:
            raise RuntimeError(f"The extension {self.extension!r} has filled this slot already, with {self.content!r}.")
        self.content = content

    def get(self, wanted_by: str, kind: type[Exception] = ValueError) -> T:
        """Return the content; without it, raise an error of a kind, which begins with what wants it."""
        if self.content is None:
            raise kind(f"{wanted_by} {missing_extension_text(self.extension)}")
        return self.content
