"""check(): each mistake is found by its check, and correct programs pass."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from pytorch_accel_lite.checking import ProgramError, doubt
from tests.extensions.checking.program_parts import CLASSES, Program, classifier, labelled, mlp
from tests.extensions.checking.right_programs import RIGHT
from tests.extensions.checking.wrong_programs import WRONG
from tests.launching import some_of
from tests.small_models import adamw_trainer, float64_data, float64_model, same_bits

pytestmark = pytest.mark.usefixtures("no_accelerator")  # some programs compute in bfloat16


OWNERS = {"gradients depend on the processes": "logical", "logical processes": "logical", "LBFGS": "closures"}
OWNERS |= dict.fromkeys(["generative adversarial", "two updates in a step"], "manual_optimization")
OWNERS |= dict.fromkeys(["nodes of a graph", "stream"], "streams")


def marked(names: Iterable[str]) -> list[Any]:
    """Names of programs, of which a few need an extension."""
    return [pytest.param(n, marks=pytest.mark.extension(OWNERS[n])) if n in OWNERS else n for n in names]


def check(program: Program, **arguments: Any) -> Any:
    trainer, data, own_arguments = program
    return trainer.check(data, **{**own_arguments, **arguments})


@pytest.mark.sampled
@pytest.mark.parametrize("name", marked(WRONG))
def test_a_mistake_is_found_by_the_check_that_should_find_it(name):
    torch.manual_seed(0)
    expected, make = WRONG[name]
    found = check(make(), only=[expected])[expected]
    assert found.status in ("failed", "warned"), found
    assert found.message
    assert found.advice


@pytest.mark.sampled
@pytest.mark.soak
@pytest.mark.parametrize("name", some_of(marked(RIGHT)))
def test_correct_programs_pass_and_are_left_unchanged(name):
    torch.manual_seed(0)
    program = RIGHT[name]()
    trainer = program[0]

    def state():
        generators = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        return copy.deepcopy((trainer.model.state_dict(), trainer.optimizer.state_dict(), generators))

    before = state()
    report = check(program)
    assert report.failures == report.warnings == [], report
    assert len(report.passed) >= 4
    assert same_bits(before, state())
    assert not trainer.is_running
    assert len(trainer.run_history) == 0


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", marked(["images, batch norm, dropout, one cycle", "generative adversarial", "callback of one's own"])
)
def test_training_after_a_check_is_unchanged(name):
    def train(checks: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        trainer, data, arguments = program = RIGHT[name]()
        if checks:
            check(program)
        trainer.train(data, **{"num_epochs": 1, **arguments})
        return trainer.model.state_dict()

    assert same_bits(train(checks=True), train(checks=False))


class DrawsNoise(nn.Module):
    """Draws from generators of its own."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.generators = torch.Generator(), np.random.default_rng(0), np.random.RandomState(0), random.Random(0)
        self.first, self.second, self.third, self.fourth = self.generators

    def forward(self, x):
        drawn = self.second.normal(), self.third.rand(), self.fourth.random()
        return self.body(x + 0.01 * torch.randn(x.shape, generator=self.first) + 0.01 * sum(drawn))


def test_custom_generators_are_restored():
    model, loading, order = DrawsNoise(), torch.Generator(), torch.Generator()
    data = labelled(64)
    loader = DataLoader(data, batch_size=8, sampler=RandomSampler(data, generator=order), generator=loading)
    ways = (model.generators[0].get_state, lambda: model.second.bit_generator.state, model.third.get_state)
    states = [*ways, model.fourth.getstate, loading.get_state, order.get_state]
    before = [str(state()) for state in states]
    torch_before = [generator.get_state() for generator in (model.first, loading, order)]
    trainer, _, _ = classifier(model)
    assert trainer.check(loader).ok
    assert [str(state()) for state in states] == before
    after = [generator.get_state() for generator in (model.first, loading, order)]
    assert all(map(torch.equal, after, torch_before))


def test_a_check_report_shows_findings_and_advice():
    program = WRONG["softmax before cross entropy"][1]()
    report = check(program, only=["initial_loss", "precision", "schedule", "broadcast"])
    assert [result.name for result in report.results] == ["broadcast", "initial_loss", "schedule", "precision"]
    assert not report.ok
    (failure,) = report.failures
    assert report["initial_loss"] is failure
    assert [result.name for result in report.passed] == ["broadcast"]
    assert [result.name for result in report.not_applicable] == ["schedule", "precision"]
    lines = repr(report).splitlines()
    assert lines[:3] == [
        "Checks: 1 failed, 1 passed, 2 not applicable",
        "  broadcast     passed",
        "  initial_loss  failed",
    ]
    assert "  precision     not applicable: The program does not use mixed precision." in lines
    assert "- initial_loss failed: cross_entropy is given probabilities, and applies a softmax or" in repr(report)
    assert "    To change: Give it logits: remove the last function of the model." in lines
    assert "cross_entropy is given probabilities" in report._repr_html_()
    with pytest.raises(KeyError, match="no check 'padding', only broadcast"):
        report["padding"]


def test_details_name_parameters_and_samples():
    report = check(WRONG["detached features"][1](), only=["gradients"])
    assert report["gradients"].details["parameters"] == ["body.weight", "body.bias"]
    report = check(WRONG["NaN in a sample"][1](), only=["data"])
    assert report["data"].details["samples"] == [137]
    report = check(WRONG["statistics are no buffers"][1](), only=["reload"])
    assert report["reload"].details["lost"] == ["mean"]
    report = check(RIGHT["classifier"](), only=["learns"])
    assert report["learns"].details["shuffled"] > report["learns"].details["after"]


def test_a_failed_check_raises_an_error_if_strict():
    with pytest.raises(ProgramError, match="would be broadcast") as caught:
        check(WRONG["mse of a column and a row"][1](), only=["broadcast"], strict=True)
    assert caught.value.report["broadcast"].status == "failed"
    assert check(RIGHT["regression"](), only=["broadcast"], strict=True).ok


def test_checks_can_be_left_out_and_added():
    def check_width(probe):
        """Look at the model's outputs.

        They should be wide.

        Add some.
        """
        width = probe.evaluate(probe.eval_batch).outputs[0].shape[1]
        if width < 100:
            yield doubt(f"There are {width} outputs.", width=width)

    report = check(RIGHT["classifier"](), skip=["learns", "leakage"], extra=[check_width])
    assert {"learns", "leakage"}.isdisjoint(result.name for result in report.results)
    found = report["width"]
    assert (found.status, found.details, found.advice) == ("warned", {"width": CLASSES}, "Add some.")
    assert report.ok


def test_callbacks_that_fail_outside_of_a_run_are_named():
    report = check(RIGHT["callback of one's own"](), only=["runs"])
    assert "Clips could not be tried outside of a run: AttributeError" in report["runs"].message


def test_checks_skipped_for_lack_of_time_are_reported():
    report = check(RIGHT["classifier"](), seconds=1e-9)
    assert {result.message for result in report.not_applicable} == {"left out after 1e-09 seconds"}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"only": ["gradient"]}, ValueError, "only=.*there are the checks runs, broadcast"),
        ({"skip": "learns"}, ValueError, "skip='learns'.*Pass a list"),
        ({"only": 3}, ValueError, "only=3: there are the checks runs, broadcast.*Pass a list"),
        ({"extra": "learns"}, TypeError, "extra='learns' must be a list of checks: functions"),
        ({"seconds": 0}, ValueError, "seconds=0 must be"),
        ({"epochs": 3}, TypeError, "no argument 'epochs': it is called num_epochs"),
    ],
)
def test_check_refuses_unknown_checks_and_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        check(RIGHT["classifier"](), **arguments)


def test_check_accepts_arguments_of_train():
    arguments = {"num_epochs": 2, "eval_every_n_epochs": 2, "gradient_clip_norm": 1.0}
    assert check(RIGHT["classifier"](), only=["gradients"], **arguments).ok


@pytest.mark.extension("streams")
def test_a_loader_without_batches_is_reported():
    data = float64_data(16)
    loader = DataLoader(data, batch_size=None)
    report = adamw_trainer(float64_model()).check(loader, only=["runs"])
    assert "it takes each item of the dataset for a whole batch" in report["runs"].message
    assert report["runs"].status == "warned"
    batches = DataLoader([data[i : i + 4] for i in range(0, 16, 4)], batch_size=None)
    assert adamw_trainer(float64_model()).check(batches, only=["runs"])["runs"].status == "passed"
