"""Finding the tokenizer, processor or other preprocessors with which a model of transformers was trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytorch_accel_lite.extending import TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import warn_outside
from pytorch_accel_lite.extension_tools.data_and_batches import reachable_from

#: Preprocessors of a model's inputs, by their base class in transformers. A processor contains other preprocessors.
_KINDS = {
    "ProcessorMixin": "processor",
    "PreTrainedTokenizerBase": "tokenizer",
    "ImageProcessingMixin": "image processor",
    "FeatureExtractionMixin": "feature extractor",
}


def save_preprocessors(trainer: TrainerLike, folder: Path) -> None:
    """Save the preprocessors with which a model was trained."""
    for preprocessor in _preprocessors_of(trainer):
        preprocessor.save_pretrained(folder)


def _preprocessors_of(trainer: TrainerLike) -> Iterator[Any]:
    """Yield the preprocessors in attributes of the trainer, the function that collates its batches, and its datasets.

    These places are searched in this order. If several preprocessors of a kind are equally near, none is chosen, with a
    warning.
    """
    data = trainer.run.data
    places = [[*vars(trainer).values()], reachable_from([data.collate_fn])]
    places.append(reachable_from([data.train_dataset, data.eval_dataset]))
    kinds_left = dict.fromkeys(_KINDS.values())
    for place in places:
        found = {id(item): item for item in place if _kind_of(item) in kinds_left}
        for processor in [item for item in found.values() if _kind_of(item) == "processor"]:
            for part in vars(processor).values():
                found.pop(id(part), None)
        for kind in [*kinds_left]:
            of_kind = [item for item in found.values() if _kind_of(item) == kind]
            if of_kind:
                del kinds_left[kind]
            if len(of_kind) == 1:
                yield of_kind[0]
            elif of_kind:
                warn_outside(
                    f"{len(of_kind)} {kind}s were used for training, so none is saved with the model. Set "
                    f"trainer.{kind.replace(' ', '_')} to the one that belongs to it."
                )


def _kind_of(item: object) -> str | None:
    for base in type(item).__mro__:
        if base.__name__ in _KINDS and base.__module__.startswith("transformers."):
            return _KINDS[base.__name__]
    return None
