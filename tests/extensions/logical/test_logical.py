"""Logical processes: a job gives the same bits on any number of real ones."""

from __future__ import annotations

import functools
import json
import random
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import MeanMetric, MeanSquaredError

from pytorch_accel_lite import (
    NonFiniteLossError,
    Trainer,
    TrainerCallback,
    TrainerPlaceholderValues,
    callbacks,
    finetuning,
)
from pytorch_accel_lite import data as sources
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback, StepBasedEvaluationCallback, TerminateOnNaNCallback
from pytorch_accel_lite.data import OwnShard
from pytorch_accel_lite.extension_tools.data_and_batches import share_bounds
from pytorch_accel_lite.extensions.logical import LogicalStep
from pytorch_accel_lite.extensions.logical.gradient_sum import Node, TreeSum, blocks_of
from tests.kinds_of_steps import PARTS, TWO_STEPS, Kind, check_kind
from tests.launching import SOAK, only_with_soak, two_are_enough
from tests.ranks import world_size
from tests.scripts.resumable import CopyStates, run_to_the_end
from tests.small_models import (
    Stream,
    adamw_trainer,
    float64_data,
    float64_model,
    largest_difference,
    listener,
    make_data,
    make_trainer,
    train,
    weights,
)
from tests.soak import soak

P = TrainerPlaceholderValues


FLOATS = torch.float32


class Noisy(Dataset[Any]):
    """Images with augmentation by all generators."""

    def __init__(self, size: int) -> None:
        self.images = torch.randn(size, 2, 5, 5, generator=torch.Generator().manual_seed(4))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        noise = 0.1 * torch.randn(2, 5, 5) + 0.1 * np.random.randn() + 0.1 * random.random()
        return self.images[index] + noise.float(), index % 3


def convolution() -> nn.Module:
    torch.manual_seed(2)
    layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(36, 3)
    return nn.Sequential(*layers)


def result_of(trainer: Trainer, **more: Any) -> dict[str, Any]:
    """The results that have to be equal bit for bit."""
    return {
        "weights": weights(trainer.model),
        "optimizer": trainer.optimizer.state_dict(),
        "history": trainer.run_history.to_dict(),
        "progress": trainer.progress.state_dict(),
        "random": (torch.rand(2), np.random.rand(), random.random()),
        **more,
    }


class Logs(Trainer):
    """Logs a number of its own in each step, and another one in every third step.

    Attributes:
        is_weighted: whether the loss is a weighted mean over the samples
    """

    is_weighted = False

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        if self.is_weighted:
            losses = nn.functional.cross_entropy(output["model_outputs"], batch[1], reduction="none")
            items = 0.3 + batch[1]
            output |= {"loss": (losses * items).sum() / items.sum(), "num_items_in_batch": items.sum()}
        self.log("size", output["model_outputs"].abs().mean())
        if self.progress.step % 3 == 0:
            self.log("largest", output["model_outputs"].max())
        return output


def images(
    logical: int | None = 8,
    size: int = 50,
    accumulation: int = 2,
    workers: int = 0,
    weighted: bool = False,
    extra: tuple[TrainerCallback, ...] = (),
    **kwargs: Any,
) -> dict[str, Any]:
    """Batch norm, dropout, augmentation, windows and batches that are not full, clipping, a schedule, an average."""
    from pytorch_accel_lite.callbacks import MetricsCallback

    model = convolution()
    ema = callbacks.ModelEmaCallback(0.9, save_path=None)
    squares = MetricsCallback(
        MeanSquaredError(), lambda batch, output: (output["model_outputs"][:, 0], batch[1]), train=True
    )
    trainer = Logs(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters(), lr=0.01),
        [ema, squares, StepBasedEvaluationCallback(2), callbacks.GradientNormCallback(), *extra],
        seed=3,
        logical_processes=logical,
    )
    trainer.is_weighted = weighted
    options = {"num_workers": workers}
    trainer.train(
        Noisy(size),
        2,
        Noisy(21),
        per_device_batch_size=3,
        gradient_accumulation_steps=accumulation,
        gradient_clip_norm=0.5,
        create_scheduler_fn=partial(OneCycleLR, max_lr=0.01, total_steps=P.MAX_NUM_TRAIN_STEPS),
        train_dataloader_kwargs=options,
        eval_dataloader_kwargs=options,
        **kwargs,
    )
    return result_of(trainer, average=weights(ema.ema_model.module), predicted=trainer.predict(Noisy(21)))


def with_workers() -> dict[str, Any]:
    return images(workers=1)


def few_samples() -> dict[str, Any]:
    """Fewer samples than logical processes, so that real ones have none in a step."""
    return images(size=3, accumulation=1) | {"5 of 8": images(size=5), "of 3": images(logical=3, size=16)}


class Tokens(Trainer):
    """A mean over some of the elements; a layer that not all shares use, and one that none does; own numbers."""

    def calculate_train_batch_loss(self, batch):
        x, y, mask = batch
        outputs = self.model["body"](x)
        if bool(mask[0, 0]):
            outputs = outputs + self.model["sometimes"](x)
        self.log("size", outputs.abs().mean())
        count = mask.sum() + (0.1 if self.fractions else 0)
        losses = {"first": ((outputs - y) ** 2 * mask).sum() / count.clamp(min=1), "second": outputs.square().mean()}
        return {"loss": losses, "model_outputs": outputs, "batch_size": len(x), "num_items_in_batch": count}


def tokens() -> dict[str, Any]:
    results = {}
    for fractions in (False, True):
        data = float64_data(70, dtype=FLOATS)
        mask = (torch.rand(70, 1, generator=torch.Generator().manual_seed(1)) < 0.6).float()
        torch.manual_seed(0)
        layers = {"body": float64_model(dtype=FLOATS), "sometimes": nn.Linear(5, 1), "never": nn.Linear(1, 1)}
        model = nn.ModuleDict(layers)
        optimizers = {
            "body": torch.optim.AdamW(model["body"].parameters(), lr=0.01),
            "rest": torch.optim.SGD([*model["sometimes"].parameters(), *model["never"].parameters()], lr=0.1),
        }
        trainer = Tokens(model, None, optimizers, [], seed=1, logical_processes=5)
        trainer.fractions = fractions
        trainer.train(TensorDataset(*data.tensors, mask), 2, per_device_batch_size=2, gradient_accumulation_steps=3)
        results[fractions] = result_of(trainer)
    return results


class NoisyUpdates(TrainerCallback):
    """Draws random numbers between the steps, as in Langevin dynamics, and gathers the batches of a step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_optimizer_step_end(self, trainer, **kwargs):
        with torch.no_grad():
            for parameter in trainer.get_model().parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape) + 0.01 * np.random.rand())

    def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
        rows = batch[0][: batch_output["batch_size"]]
        self.seen.append(trainer.gather(rows))


def metrics() -> dict[str, Any]:
    """Metrics of training and evaluation that are sums of floats; half precision; noise between the steps."""
    from pytorch_accel_lite.callbacks import MetricsCallback

    model = float64_model(dtype=FLOATS)
    noise = NoisyUpdates()
    scores = {"squares": MeanSquaredError(), "mean": MeanMetric()}
    callback = MetricsCallback(scores["squares"], train=True)
    only = MetricsCallback(scores["mean"], lambda batch, output: (output["model_outputs"],))
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    trainer = adamw_trainer(
        model, callbacks=[callback, only, noise], seed=4, logical_processes=7, accelerator=accelerator
    )
    data = float64_data(45, dtype=FLOATS)
    has_finders = hasattr(trainer, "find_lr")
    tried = trainer.find_lr(data, per_device_batch_size=2, num_steps=10).losses if has_finders else []
    trainer.train(data, 2, data, per_device_batch_size=2)
    evaluated = trainer.evaluate(data, per_device_batch_size=3)
    found = result_of(trainer, rates=tried, evaluated=evaluated, seen=noise.seen, predicted=trainer.predict(data, 4))
    AcceleratorState._reset_state(reset_partial_state=world_size() == 1)
    return found


class OwnModel(nn.Module):
    """Computes its own losses, with a frozen layer and a trained adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)).requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(5, 2, bias=False), nn.Dropout(0.3), nn.Linear(2, 8, bias=False))
        self.head = nn.Linear(8, 1)

    def losses(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        outputs = self.head(torch.tanh(self.frozen(x) + self.adapter(x)))
        return {"loss": nn.functional.mse_loss(outputs, y), "model_outputs": outputs, "size": outputs.abs().mean()}


class OwnLosses(Trainer):
    """Takes the losses from the model."""

    def calculate_train_batch_loss(self, batch):
        return self.model.losses(*batch)

    calculate_eval_batch_loss = calculate_train_batch_loss


def mixture() -> Any:
    datasets = {"small": float64_data(12, dtype=FLOATS), "large": float64_data(40, dtype=FLOATS)}
    return sources.Mixture(datasets, {"small": 1.0, "large": 2.0})


def combined() -> dict[str, Any]:
    """Losses of the model, an adapter, optimizers and schedules by name, batches of a mixture."""
    model = OwnModel()
    optimizers = {
        "adapter": torch.optim.AdamW(model.adapter.parameters(), lr=0.01),
        "head": torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9),
    }
    schedules = {"head": partial(OneCycleLR, max_lr=0.1, total_steps=P.MAX_NUM_TRAIN_STEPS)}
    trainer = OwnLosses(model, None, optimizers, [], seed=2, logical_processes=5)
    trainer.train(
        mixture(),
        2,
        float64_data(13, dtype=FLOATS),
        per_device_batch_size=2,
        gradient_accumulation_steps=2,
        create_scheduler_fn=schedules,
    )
    return result_of(trainer)


def unfreezing() -> dict[str, Any]:
    """Layers that are frozen first, an optimizer that the trainer makes, batches of a mixture."""
    torch.manual_seed(0)
    layers = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.Dropout(0.2), nn.Linear(6, 1)
    model = nn.Sequential(*layers)
    finetuning.ModelFreezer(model).freeze()
    factory = partial(torch.optim.AdamW, lr=0.01)
    trainer = adamw_trainer(
        model, optimizer=factory, callbacks=[callbacks.GradualUnfreezingCallback(1)], seed=2, logical_processes=4
    )
    trainer.train(mixture(), 3, per_device_batch_size=3)
    return result_of(trainer)


class StopsAfter(TrainerCallback):
    def __init__(self, update: int, event: str) -> None:
        self.update = update
        setattr(self, event, self._stop)

    def _stop(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update == self.update:
            raise callbacks.StopTrainingError("enough")


def stopped() -> list[dict[str, Any]]:
    """Runs that callbacks stop: within an update, after one, and after one that an evaluation follows."""
    results = []
    for stop in (
        StopsAfter(4, "on_optimizer_step_start"),
        StopsAfter(5, "on_update_end"),
        StopsAfter(6, "on_update_end"),
    ):
        trainer = adamw_trainer(float64_model(dtype=FLOATS), callbacks=[stop], seed=2, logical_processes=4)
        trainer.train(mixture(), 3, float64_data(5, dtype=FLOATS), per_device_batch_size=1, evaluate_every="3 updates")
        results.append(result_of(trainer, reason=trainer.run.end.reason))
    return results


ALL: list[Callable[[], Any]] = [images, with_workers, few_samples, tokens, metrics, combined, unfreezing, stopped]
FEW = [with_workers, few_samples, combined, stopped]
NEEDED: dict[Callable[[], Any], tuple[str, ...]] = {
    **dict.fromkeys([images, with_workers, few_samples], ("model_ema", "monitoring")),
    **dict.fromkeys([combined, stopped], ("mixtures",)),
    unfreezing: ("mixtures", "unfreezing"),
}


@functools.cache
def alone(case):
    """The result of one process."""
    return case()


def differences(first: Any, second: Any, path: str = "") -> list[str]:
    """The paths of nested values that are not equal bit for bit."""
    if isinstance(first, torch.Tensor):
        same = first.dtype == second.dtype and torch.equal(first, second)
        return [] if same else [path]
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return [f"{path}: {sorted(map(str, first.keys() ^ second.keys()))}"]
        return [found for key in first for found in differences(first[key], second[key], f"{path}/{key}")]
    if isinstance(first, (list, tuple)):
        if len(first) != len(second):
            return [f"{path}: {len(first)} and {len(second)}"]
        pairs = enumerate(zip(first, second, strict=True))
        return [found for place, (a, b) in pairs for found in differences(a, b, f"{path}/{place}")]
    return [] if first == second or first != first else [f"{path}: {first} and {second}"]


# --------------------------------------------------------------------------------------------------- the sum


@pytest.mark.parametrize("terms", range(1, 10))
def test_the_order_of_a_sum_does_not_depend_on_who_adds(terms):
    def add(left: str, right: str) -> str:
        return f"({left}+{right})"

    written = set()
    for processes in range(1, terms + 1):
        whole = TreeSum(add)
        for rank in range(processes):
            own = range(*share_bounds(terms, rank, processes))
            part = TreeSum(add)
            for number in own:
                part.push(Node(0, number, str(number)))
                assert len(part.nodes) <= 2 * terms.bit_length()
            assert [(node.level, node.start) for node in part.nodes] == blocks_of(own)
            for node in part.nodes:
                whole.push(node)
        written.add(whole.total())
    assert len(written) == 1
    assert all(str(number) in str(written) for number in range(terms))


# --------------------------------------------------------------------------------------- training and the rest


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=[pytest.mark.extension(*NEEDED.get(case, ())), *[pytest.mark.thorough] * (case is with_workers)]
        )
        for case in (ALL if SOAK else FEW)
    ],
    ids=lambda case: case.__name__,
)
def test_any_number_of_processes_gives_the_same_bits(ranks, case):
    for result in ranks(case):
        assert differences(alone(case), result) == []


@only_with_soak
@pytest.mark.extension("model_ema", "monitoring")
@pytest.mark.processes
@pytest.mark.parametrize("processes", [4, 8])
def test_eight_logical_processes_have_the_same_bits_on_4_and_8(job, processes):
    for case in (images, with_workers):
        for result in job(processes)(case):
            assert differences(alone(case), result) == [], case.__name__


@pytest.mark.extension("monitoring")
def test_logical_processes_train_as_one_with_the_whole_batch():
    found = []
    for count, batch in ((4, 3), (None, 12)):
        model = float64_model()
        trainer = adamw_trainer(model, seed=1, logical_processes=count, callbacks=[callbacks.GradientNormCallback()])
        trainer.train(
            float64_data(41),
            2,
            float64_data(9),
            per_device_batch_size=batch,
            gradient_accumulation_steps=2,
            gradient_clip_norm=0.5,
        )
        found.append((weights(model), trainer.run_history.to_dict(), trainer.progress))
    (ours, history, progress), (theirs, expected, of_plain) = found
    assert largest_difference(ours, theirs) < 1e-12
    assert progress == of_plain
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, abs=1e-12)


def test_a_run_computes_with_one_thread():
    """Launchers set one thread for each of several processes, but not for a single process."""
    seen = []
    look = listener(on_train_step_end=lambda trainer, **kwargs: seen.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    train(make_trainer([look], seed=1, logical_processes=2), size=4)
    assert seen == [1]
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


def test_a_step_of_logical_processes_is_one_event():
    seen = []

    def look(trainer, batch, batch_output, **kwargs):
        seen.append((batch[0], batch_output["model_outputs"], batch_output["batch_size"], trainer.batch_indices))

    train(make_trainer([listener(on_train_step_end=look)], seed=1, logical_processes=3), size=7)
    (inputs, outputs, size, indices), (last, *_) = seen
    assert torch.equal(inputs, make_data(7).tensors[0][:6])
    assert (outputs.shape, size, indices) == ((6, 1), 6, [0, 1, 2, 3, 4, 5])
    assert torch.equal(last, make_data(7).tensors[0][6:])


class Fails(Trainer):
    """The loss of the second logical process is not finite."""

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        return output | {"loss": output["loss"] + (torch.nan if self.logical.current == 1 else 0)}


def test_a_non_finite_loss_of_any_process_ends_the_run():
    trainer = make_trainer([TerminateOnNaNCallback], trainer_class=Fails, seed=1, logical_processes=3)
    with pytest.raises(NonFiniteLossError):
        train(trainer)
    assert trainer.progress.step == 1


@pytest.mark.extension("nan_report")
def test_a_nan_report_has_the_samples_of_each_share(tmp_path):
    report = callbacks.NaNReportCallback(tmp_path)
    trainer = make_trainer([report], trainer_class=Fails, seed=1, logical_processes=3)
    with pytest.raises(NonFiniteLossError):
        train(trainer)
    assert json.loads(report.report.read_text())["indices"] == [[0, 1], [2, 3]]


def fires_every_event() -> None:
    check_kind(Kind(LogicalStep, PARTS, partial(make_trainer, logical_processes=2, seed=1), TWO_STEPS))


def test_their_step_fires_every_event_in_the_documented_order():
    fires_every_event()


@two_are_enough
def test_logical_processes_fire_every_event_on_each_process(ranks):
    ranks.run(fires_every_event)


# ---------------------------------------------------------------------------------------------------- states


def save(folder: Path, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """A run that keeps a state after each update and each epoch."""
    saving = SaveTrainingStateCallback(folder / "states", save_every_n_steps=1, save_every_n_epochs=1)
    return images(extra=(saving, CopyStates(folder)), **(options or {}))


@pytest.fixture(scope="module")
def uninterrupted_run(tmp_path_factory):
    """A run of one process, and its states after each update and each epoch."""
    folder = tmp_path_factory.mktemp("logical")
    result = save(folder)
    return result, sorted((folder / "copies").glob("*/update-*"))


def resumed(state: Path, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """The result of a resumed run; generators are changed before it resumes."""
    torch.manual_seed(99)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The training state holds the state of callback 'SaveTrainingStateCallback'")
        return images(resume_from=state, **(options or {}))


@only_with_soak
@pytest.mark.extension("model_ema", "monitoring")
def test_a_run_resumes_the_same_bits_on_any_number_of_processes(uninterrupted_run, job):
    """Resumes within an epoch and at its end."""
    whole, states = uninterrupted_run
    assert len(states) == whole["progress"]["update"] + 2
    for processes, state in zip((1, 3, 2), states[1::2], strict=False):
        if processes == 1:
            assert differences(whole, resumed(state)) == []
        else:
            assert [differences(whole, found) for found in job(processes).run(resumed, state)] == [[]] * processes


@pytest.mark.thorough
@pytest.mark.extension("model_ema", "monitoring")
def test_states_of_several_processes_resume_on_others(uninterrupted_run, job, tmp_path):
    whole, states = uninterrupted_run
    for found in job(3).run(save, tmp_path):
        assert differences(whole, found) == []
    saved = sorted((tmp_path / "copies").glob("*/update-*"))
    assert [state.parent.name for state in saved] == [state.parent.name for state in states]
    assert differences(whole, resumed(saved[0])) == []
    for found in job(2).run(resumed, saved[2]):
        assert differences(whole, found) == []


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_sigkill_and_other_process_counts_change_no_bit(tmp_path):
    """A short version of tests/soak.py --logical 4; ``make soak`` makes it long."""

    def run_whole(folder, **options):
        run_to_the_end(folder, **options)

    found, expected = soak(tmp_path, 200 if SOAK else 2, logical=4, run_whole=run_whole)
    del found["processes"], expected["processes"]
    assert differences(expected, found) == []


@only_with_soak
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore:The last batch of an epoch has a single sample")
def test_any_run_resumes_from_any_update_on_any_process_count(job, tmp_path):
    """20 runs drawn at random, each resumed from 10 states drawn at random."""
    draw = random.Random(0)

    def results(case: Any, folder: Any, options: dict[str, Any]) -> list[Any]:
        processes = draw.randint(1, min(options["logical"], 4))
        return [case(folder, options)] if processes == 1 else job(processes).run(case, folder, options)

    for number in range(20):
        options = {
            "logical": draw.randint(2, 8),
            "size": draw.randint(5, 60),
            "accumulation": draw.randint(1, 3),
            "workers": int(draw.random() < 0.1),
            "weighted": draw.random() < 0.5,
        }
        folder = tmp_path / str(number)
        whole, *others = results(save, folder, options)
        states = sorted((folder / "copies").glob("*/update-*"))
        for _ in range(10):
            others += results(resumed, draw.choice(states), options)
        assert [differences(whole, other) for other in others] == [[]] * len(others), options


@pytest.mark.thorough
@pytest.mark.extension("model_ema", "monitoring")
def test_resuming_with_other_logical_processes_loses_no_sample(uninterrupted_run, capsys):
    whole, states = uninterrupted_run
    for count in (4, None):
        capsys.readouterr()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Training metrics cover only the rest of this epoch")
            found = resumed(states[0], {"logical": count})
        said = f"saved with logical_processes=8 and is resumed with logical_processes={count}"
        assert said in " ".join(capsys.readouterr().out.split())
        assert found["progress"]["samples"] == whole["progress"]["samples"]


@pytest.mark.extension("printed_states", "model_ema", "monitoring")
def test_a_state_records_its_environment(uninterrupted_run, capsys):
    from pytorch_accel_lite.checkpoint import print_contents

    _, states = uninterrupted_run
    print_contents(states[0])
    shown = capsys.readouterr().out
    assert "logical processes: 8" in shown
    assert re.search(r"machine: device cpu, torch .*threads 1", shown)


@pytest.mark.extension("model_ema", "monitoring")
def test_a_machine_that_computes_other_bits_is_reported(uninterrupted_run, capsys):
    _, states = uninterrupted_run
    torch.set_float32_matmul_precision("high")
    try:
        resumed(states[-1])
    finally:
        torch.set_float32_matmul_precision("highest")
    said = "The state was saved with precision of float32 products highest (now high): the last bits of the run may"
    assert said in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ what does not work


def test_invalid_logical_processes_are_refused():
    for count in (0, -1, 2.5, True, "8"):
        with pytest.raises((TypeError, ValueError), match=f"logical_processes={count!r} must be"):
            make_trainer(seed=1, logical_processes=count)
    with pytest.raises(ValueError, match="logical_processes=8 needs a seed"):
        make_trainer(logical_processes=8)


def test_a_step_that_gathers_is_refused():
    class Contrastive(Trainer):
        def calculate_train_batch_loss(self, batch):
            return {"loss": self.gather(self.model(batch[0]), with_gradients=True).mean()}

    with pytest.raises(RuntimeError, match=r"gather\(\) does not work in the forward and backward passes"):
        train(make_trainer(trainer_class=Contrastive, seed=1, logical_processes=2))


@pytest.mark.extension("tuning")
def test_tools_that_look_at_one_batch_are_refused():
    trainer = make_trainer(seed=1, logical_processes=2)
    for tool in (trainer.find_batch_size, trainer.diagnose):
        with pytest.raises(ValueError, match=r"does not work with logical_processes=2\. Use a trainer without them"):
            tool(make_data())


@pytest.mark.parametrize("source", [Stream(), OwnShard([(torch.ones(1, 4), torch.ones(1, 1))])])
def test_sequential_data_are_refused(source):
    class Given(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return source if isinstance(source, OwnShard) else super().create_train_dataloader(batch_size)

    trainer = make_trainer(trainer_class=Given, seed=1, logical_processes=2)
    with pytest.raises(ValueError, match=r"logical_processes=2 needs data that can be indexed.*is read in turn"):
        trainer.train(source, max_num_train_steps=2)


def too_few() -> str:
    try:
        adamw_trainer(float64_model(), seed=1, logical_processes=1)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_fewer_than_the_real_processes_are_refused(two_ranks):
    for message in two_ranks(too_few):
        assert message == (
            "logical_processes=1: there are 2 processes, and each needs at least one. Launch fewer processes."
        )
