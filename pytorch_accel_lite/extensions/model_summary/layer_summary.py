"""Computing torchinfo's table of a model: its layers, the shapes of their outputs, parameters and operations."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import torch

from pytorch_accel_lite.data import BatchData, CollateFunction, Data, LoaderKwargs
from pytorch_accel_lite.extending import RunRequest, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_positive_int
from pytorch_accel_lite.extension_tools.data_and_batches import DEFAULT_BATCH_SIZE
from pytorch_accel_lite.extension_tools.modules_and_devices import mixed_precision, preserving_modes
from pytorch_accel_lite.extension_tools.plain_types import Tree
from pytorch_accel_lite.extension_tools.random_numbers import preserving_generators
from pytorch_accel_lite.extension_tools.runs_and_steps import DataArguments, check_dataset, inference, inference_run
from pytorch_accel_lite.utils import import_extra

if TYPE_CHECKING:
    from torchinfo import ModelStatistics


def summary(
    self: TrainerLike,
    dataset: Data | None = None,
    per_device_batch_size: int = DEFAULT_BATCH_SIZE,
    dataloader_kwargs: LoaderKwargs | None = None,
    collate_fn: CollateFunction | None = None,
    *,
    depth: int = 3,
) -> ModelStatistics:
    """Return torchinfo's summary of the model, which prints as a table. Needs the extra ``summary``.

    The shapes of the outputs and the multiply-adds come from a forward pass of one batch in evaluation mode, which
    changes nothing. Call this method on every process.

    Args:
        dataset: the data from which the batch is taken, read as by ``predict()``; ``None`` for a table without shapes
        depth: number of levels of nested modules to list
    """
    torchinfo = _torchinfo("trainer.summary()")
    check_positive_int("depth", depth)
    if dataset is None:
        return torchinfo.summary(self.get_model(keep_torch_compile=False), depth=depth, verbose=0)
    arguments = DataArguments(dataset, per_device_batch_size, dataloader_kwargs, collate_fn)
    check_dataset(self, "dataset", arguments)
    request = RunRequest("prediction", num_epochs=1)
    with preserving_generators(), inference_run(self, request, arguments) as run, inference(self):
        for batch in run.data.required_eval_loader.steps(run.progress.epoch):
            return summarise(self, batch.data, depth)
    raise ValueError(f"dataset={dataset!r} gave no batch.")


def _torchinfo(purpose: str) -> ModuleType:
    return import_extra("torchinfo", "summary", purpose)


def summarise(trainer: TrainerLike, batch: BatchData, depth: int) -> ModelStatistics:
    """Return the summary of the model with the inputs that the trainer gives it for a batch."""
    model = trainer.get_model(keep_torch_compile=False)
    calls: list[tuple[tuple[Tree, ...], dict[str, Tree]]] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    with preserving_modes(model.modules()), mixed_precision(trainer.accelerator):
        model.eval()
        try:
            with torch.compiler.set_stance("force_eager"):
                trainer.calculate_predict_batch_output(batch)
        finally:
            hook.remove()
        if not calls:
            raise RuntimeError(
                f"calculate_predict_batch_output() does not call the model, {type(model).__name__}, so the shapes of "
                "its inputs are unknown. Call torchinfo.summary() with inputs of your own."
            )
        args, kwargs = calls[0]
        return _torchinfo("A summary").summary(model, input_data=[*args], depth=depth, verbose=0, **kwargs)
