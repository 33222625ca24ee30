"""The file to begin with: every key of an experiment, with its meaning and its default."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pytorch_accel_lite.experiment.experiment import create_parser
from pytorch_accel_lite.experiment.yaml_files import PARTS

_HEAD = """\
# An experiment: python -m pytorch_accel_lite train THIS_FILE
# Classes and functions are given by their path, with their arguments; those of torch
# and of pytorch_accel_lite by name alone. Remove what you leave at its default.
# base: other.yaml  # a file of which this one overrides some values

"""
_EXAMPLES = {
    "model": ("your model: a class, or a function that returns it", "my_module.MyModel", "width: 64"),
    "loss_func": (
        "the loss: a class, or a function of outputs and targets",
        "CrossEntropyLoss",
        "label_smoothing: 0.1",
    ),
    "optimizer": ("its arguments, without the parameters", "AdamW", "lr: 1e-3"),
    "scheduler": (
        "likewise, without the optimizer; may contain 3 * NUM_UPDATE_STEPS_PER_EPOCH",
        "OneCycleLR",
        "max_lr: 1e-2\n    total_steps: NUM_EPOCHS * NUM_UPDATE_STEPS_PER_EPOCH",
    ),
    "data.train": ("classes, or functions that return a dataset", "my_module.load_data", "split: train"),
}
_DATA = """\
# Classes, or functions that return a dataset.
data:
  train:
    class_path: my_module.load_data
    init_args:
      split: train
  # eval: likewise, evaluated after each epoch
  # test: likewise, for the commands test and predict

"""


def starting_file(path: str | os.PathLike[str] | None, overrides: Sequence[str]) -> str:
    """Return a complete experiment file with comments.

    :param path: a file of which the values are taken; ``None`` for examples in their place
    :param overrides: arguments of the command line
    """
    parser = create_parser(path, overrides)
    missing = [key for key in PARTS if key not in parser.parts and path is None]
    blocks = [_example(key) for key in missing if key in _EXAMPLES and key != "data.train"]
    if "data.train" in missing:
        blocks.append(_DATA)
    return "".join([_HEAD, *blocks, parser.commented()])


def _example(key: str) -> str:
    text, path, arguments = _EXAMPLES[key]
    return f"# {text[0].upper()}{text[1:]}.\n{key}:\n  class_path: {path}\n  init_args:\n    {arguments}\n\n"
