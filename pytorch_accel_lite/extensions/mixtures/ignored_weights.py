"""Mixtures that a run reads in another order than their own, so that their weights have no effect."""

from __future__ import annotations

from torch.utils.data import Dataset, RandomSampler, SequentialSampler

from pytorch_accel_lite.extending import RUN_CHECKS, Run, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import warn_outside
from pytorch_accel_lite.extension_tools.data_and_batches import nested_in
from pytorch_accel_lite.extensions.mixtures.mixture import Mixture


def ignores_weights(run: Run) -> bool:
    """Whether a run on a mixture reads it with a plain sampler of torch, rather than in its own order."""
    loader = run.data.train_loader
    has_batch_sampler = getattr(loader, "batch_size", None) is None  # of the user, who decides about the order
    return not has_batch_sampler and type(getattr(loader, "sampler", None)) in (RandomSampler, SequentialSampler)


def warn_of_ignored_weights(trainer: TrainerLike, run: Run) -> None:
    """Warn if a mixture with weights, or with a length of its own, is shuffled by torch or inside another dataset."""
    data = run.data.train_dataset
    if run.ranks.rank:
        return
    for part in nested_in(data, lambda value: isinstance(value, Dataset)):
        if not isinstance(part, Mixture) or part.samples_per_epoch == part.sizes:
            continue
        if part is data and not ignores_weights(run):
            continue
        how = "by a sampler of torch" if part is data else f"inside a {type(data).__name__}"
        warn_outside(
            f"{part!r} is read {how}, so its weights and num_samples have no effect. Pass the Mixture itself to "
            "train(), or create its loader by DataLoader(mixture, **mixture.loader_kwargs(batch_size))."
        )


RUN_CHECKS.before_training.append(warn_of_ignored_weights)  # not on import of the folder, which the seams import
