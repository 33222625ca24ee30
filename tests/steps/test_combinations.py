"""Features that cannot be combined: an error before training or a warning, and a page of the documentation."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.base.user_code import is_from_this_package
from pytorch_accel_lite.run.run import Step
from pytorch_accel_lite.steps import step_choice
from pytorch_accel_lite.steps.plain_step import PlainStep
from pytorch_accel_lite.steps.step_choice import STEP_KINDS, Feature, all_features
from tests.launching import CAN_SHARD, ROOT
from tests.sharded import create_model, shard, sharding_accelerator
from tests.small_models import adamw_trainer, float64_data, float64_model, make_model, make_trainer, train

PAGE = ROOT / "docs" / "combinations.md"


class OwnStep(Trainer):
    def train_step(self, batch):
        raise AssertionError("it is refused before")


class Recomputes(Trainer):
    def optimizer_step(self):
        self.recompute_gradients()


class NormsItsErrors(nn.MSELoss):
    def __init__(self):
        super().__init__()
        self.norm = nn.SyncBatchNorm(1, affine=False)


SPLITS: dict[str, Any] = {"auto_microbatch": True}


class Skips(TrainerCallback):
    def configure_run(self, trainer, request, **kwargs):
        request.skips_failed_batches = True


SKIPS = {"callbacks": [Skips]}
LOGICAL = {"seed": 1, "logical_processes": 3}
needs = pytest.mark.extension
NEEDS_CLOSURES, NEEDS_LOGICAL = needs("closures"), needs("logical")
OWN_STEPS_MAY_FAIL = needs("manual_optimization", "failed_batches")
CLOSURES_MAY_FAIL = needs("closures", "failed_batches")


def with_closure(**kwargs: Any) -> dict[str, Any]:
    model = make_model()
    return {"model": model, "optimizer": torch.optim.LBFGS(model.parameters()), **kwargs}


def check_refused(settings: dict[str, Any], arguments: dict[str, Any], message: str) -> None:
    """Check that a trainer with these settings refuses to train with these arguments, before its first step."""
    trainer = make_trainer(**settings)
    with pytest.raises(ValueError, match=message):
        train(trainer, **arguments)
    assert trainer.progress.step == 0


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        pytest.param(
            {"trainer_class": OwnStep},
            SPLITS,
            "an overridden train_step .* with auto_microbatch=True",
            marks=OWN_STEPS_MAY_FAIL,
        ),
        pytest.param(
            {"trainer_class": OwnStep, **SKIPS}, {}, "train_step .* SkipFailedBatchesCallback", marks=OWN_STEPS_MAY_FAIL
        ),
        pytest.param(
            with_closure(),
            SPLITS,
            r"a closure \(LBFGS\) does not work with auto_microbatch=True",
            marks=CLOSURES_MAY_FAIL,
        ),
        pytest.param(with_closure(**SKIPS), {}, "a closure .* SkipFailedBatchesCallback", marks=CLOSURES_MAY_FAIL),
        pytest.param(
            with_closure(trainer_class=OwnStep), {}, "a closure .* an overridden train_step", marks=NEEDS_CLOSURES
        ),
    ],
)
def test_conflicting_features_are_refused_before_training(settings, arguments, message):
    check_refused(settings, arguments, message)


@NEEDS_LOGICAL
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (with_closure(), "a closure .* logical_processes"),
        ({"trainer_class": OwnStep}, "logical_processes .* Override calculate_train_batch_loss"),
        ({"loss_func": NormsItsErrors()}, "logical_processes .* SyncBatchNorm: .* Use BatchNorm"),
        ({"model": nn.Embedding(4, 1, sparse=True)}, r"sparse gradients \(nn.Embedding.* sparse=False"),
    ],
)
def test_features_unsupported_by_logical_processes_are_refused(settings, message):
    check_refused({**LOGICAL, **settings}, {}, message)


@pytest.mark.parametrize(
    "settings", [pytest.param(with_closure(), marks=NEEDS_CLOSURES), pytest.param(LOGICAL, marks=NEEDS_LOGICAL)]
)
def test_features_unsupported_by_a_scaler_are_refused(settings, scaled_accelerator):
    with pytest.raises(ValueError, match=r"does not work with mixed_precision='fp16': .* Use bf16\."):
        train(make_trainer(accelerator=scaled_accelerator, **settings))


def closure_with_shards() -> str:
    """Return the error of LBFGS with a model that Accelerate shards."""
    model = float64_model()
    optimizer = torch.optim.LBFGS(model.parameters())
    trainer = adamw_trainer(model, optimizer=optimizer, accelerator=sharding_accelerator())
    with pytest.raises(ValueError, match=r"\(LBFGS\) does not work with sharded weights") as caught:
        trainer.train(float64_data(26), 1)
    return str(caught.value)


def logical_with_shards() -> str:
    """The error for a model in tensor parallelism."""
    accelerator = Accelerator(cpu=True)
    model = shard(create_model(), "tp")
    trainer = adamw_trainer(model, seed=1, logical_processes=8, accelerator=accelerator)
    with pytest.raises(ValueError, match=r"^logical_processes does not work with weights sharded") as caught:
        trainer.train(float64_data(16), 1, per_device_batch_size=1)
    return str(caught.value)


@CAN_SHARD
@NEEDS_CLOSURES
@pytest.mark.processes
def test_closures_with_sharded_weights_are_refused(two_ranks):
    for message in two_ranks(closure_with_shards):
        assert message.startswith("an optimizer that needs a closure (LBFGS) does not work with sharded weights: ")


@CAN_SHARD
@NEEDS_LOGICAL
@pytest.mark.processes
def test_logical_processes_in_tensor_parallelism_are_refused(two_ranks):
    for message in two_ranks(logical_with_shards):
        assert message.startswith(
            "logical_processes does not work with weights sharded by other means than fully_shard"
        )


@pytest.mark.parametrize(
    ("settings", "arguments", "other"),
    [
        pytest.param({}, SPLITS, "auto_microbatch=True", marks=CLOSURES_MAY_FAIL),
        pytest.param(SKIPS, {}, "SkipFailedBatchesCallback", marks=CLOSURES_MAY_FAIL),
        pytest.param(LOGICAL, {}, "logical_processes", marks=needs("closures", "logical")),
    ],
)
def test_gradients_are_not_recomputed_where_it_does_not_work(settings, arguments, other):
    trainer = make_trainer(trainer_class=Recomputes, **settings)
    with pytest.raises(RuntimeError, match=rf"optimizer_step, .*: it does not work with {other}"):
        train(trainer, **arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer_class": OwnStep}, "an overridden train_step belongs to the extension 'manual_optimization'"),
        (with_closure(), r"a closure \(LBFGS\) belongs to the extension 'closures'"),
        ({"trainer_class": Recomputes}, r"recompute_gradients\(\) belongs to the extension 'closures'"),
    ],
)
def test_without_any_kind_of_step_the_error_names_the_extension(monkeypatch, settings, message):
    monkeypatch.setattr(step_choice, "STEP_KINDS", [])
    check_refused(settings, {}, message)


def kinds_of_steps(kind: type[Step] = Step) -> set[Any]:
    """All classes of steps."""
    return {kind}.union(*map(kinds_of_steps, kind.__subclasses__()))


def table_of_conflicts() -> str:
    """The table of conflicts in the documentation."""
    pairs = [(feature, conflict) for feature in all_features() for conflict in feature.conflicts]
    rows = [f"| {feature.name} | {other.name} | {why} |" for feature, (other, why) in pairs]
    return "\n".join(["| feature | does not work with | because |", "|---|---|---|", *rows])


def test_the_kinds_of_steps_that_have_features_are_listed():
    shipped = {kind for kind in kinds_of_steps() if is_from_this_package(kind)}
    assert {kind for kind in shipped if "features" in vars(kind)} == {*STEP_KINDS}


@pytest.mark.extension("closures", "failed_batches", "logical", "manual_optimization")
def test_the_documentation_has_the_table_of_all_combinations():
    assert table_of_conflicts() in PAGE.read_text(encoding="utf-8")


class Halves(PlainStep):
    """A kind of step that a program adds."""

    features = (Feature("halved gradients", lambda trainer, run: getattr(trainer, "halves", False)),)


@pytest.mark.extension("failed_batches")
def test_a_run_that_asks_for_two_kinds_of_steps_is_refused(monkeypatch):
    monkeypatch.setattr(step_choice, "STEP_KINDS", [*STEP_KINDS, Halves])
    trainer = make_trainer()
    trainer.halves = True
    train(trainer, 1)
    assert isinstance(trainer.run.training_step, Halves)
    with pytest.raises(
        ValueError, match="auto_microbatch=True does not work with halved gradients: a run has one kind"
    ):
        train(trainer, 1, auto_microbatch=True)


def test_shipped_kinds_of_steps_say_why_they_do_not_combine():
    for pair in combinations([kind.features for kind in STEP_KINDS], 2):
        for one in pair[0]:
            for other in pair[1]:
                conflicts = {c.other.name for c in one.conflicts} | {c.other.name for c in other.conflicts}
                assert conflicts & {one.name, other.name}, (one.name, other.name)
