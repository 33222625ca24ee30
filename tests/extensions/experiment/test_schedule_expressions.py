"""Schedules in experiment files: expressions of the run's numbers."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("jsonargparse", reason="needs the extra cli")

from pytorch_accel_lite.experiment import Experiment
from pytorch_accel_lite.extensions.experiment.schedule_expressions import parse
from tests.extensions.experiment.small_experiment import read


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("3 * NUM_EPOCHS", "(3 * TrainerPlaceholderValues.NUM_EPOCHS)"),
        ("min(10, -NUM_EPOCHS)", "min(10, -TrainerPlaceholderValues.NUM_EPOCHS)"),
        ("round(0.1 * MAX_NUM_TRAIN_STEPS) // 2", "(round((0.1 * TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS)) // 2)"),
        ("2 * (3 + 4)", "14"),
    ],
)
def test_expressions_become_placeholders(text, shown):
    assert repr(parse(text)) == shown


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("NUM_EPOCH + 1", "'NUM_EPOCH' is not a placeholder. Did you mean 'NUM_EPOCHS'?"),
        ("__import__('os').system('true')", "cannot be part of an expression"),
        ("NUM_EPOCHS.resolve", "cannot be part"),
        ("2 ** NUM_EPOCHS", "cannot be part"),
        ("'a' * 3", "cannot be part"),
        ("NUM_EPOCHS if 1 else 2", "cannot be part"),
        ("round(NUM_EPOCHS, ndigits=1)", "cannot be part"),
        ("3 *", "is not an expression"),
        ("1 / 0", "has no value: division by zero"),
        ("floor(1e400)", "has no value: cannot convert"),
        ("floor(NUM_EPOCHS, 2)", "'floor(NUM_EPOCHS, 2)' has no value: math.floor() takes exactly one argument"),
        ("round()", "has no value: round() missing required argument"),
    ],
)
def test_invalid_expressions_are_refused(text, error):
    with pytest.raises(ValueError, match=re.escape(error)):
        parse(text)


def test_a_schedule_counts_in_the_units_of_the_run(file):
    scheduler = [
        "--scheduler",
        "StepLR",
        "--scheduler.step_size",
        "NUM_UPDATE_STEPS_PER_EPOCH",
        "--scheduler.gamma=0.5",
    ]
    trainer = read(file, *scheduler).train()
    assert trainer.optimizer.param_groups[0]["lr"] == 0.01 / 4


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("scheduler", "arguments", "rate"),
    [
        ("MultiStepLR", {"milestones": [1, "2 * NUM_UPDATE_STEPS_PER_EPOCH - 1"]}, 0.01 / 100),
        ("LambdaLR", {"lr_lambda": "tests.extensions.experiment.parts.half"}, 0.01 / 2**6),
        ("LambdaLR", {"lr_lambda": ["tests.extensions.experiment.parts.half"]}, 0.01 / 2**6),
        ("MultiplicativeLR", {"lr_lambda": "tests.extensions.experiment.parts.half"}, 0.01 / 2**21),
    ],
)
def test_schedulers_with_type_checking_imports_work(file, scheduler, arguments, rate):
    overrides = {"scheduler": scheduler} | {f"scheduler.{name}": value for name, value in arguments.items()}
    experiment = Experiment.from_file(file, overrides)
    assert experiment.train().optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    assert experiment.config["scheduler"]["init_args"].items() >= arguments.items()
