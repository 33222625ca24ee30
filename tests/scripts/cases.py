"""Cases run on every process of a job; what each returns is saved for the tests to look at.

Started by tests/launching.py as: torchrun --nproc_per_node N tests/scripts/cases.py FOLDER
A case named ``case_x`` is the entry ``x``. With one process, tests call the functions directly.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, WeightedRandomSampler
from torchmetrics import CatMetric, MaxMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from pytorch_accel_lite import (
    NonFiniteLossError,
    StopTrainingError,
    Trainer,
    TrainerCallback,
    TrainerPlaceholderValues,
    get_default_callbacks,
)
from pytorch_accel_lite.callbacks import (
    ConvertSyncBatchNormCallback,
    EarlyStoppingCallback,
    GradualUnfreezingCallback,
    LimitBatchesCallback,
    MetricsCallback,
    MetricsFileCallback,
    ModelEmaCallback,
    NaNReportCallback,
    PredictionWriterCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    SkipFailedBatchesCallback,
    TerminateOnNaNCallback,
    ThroughputCallback,
    TimeLimitCallback,
    TimingCallback,
    WorstSamplesCallback,
    WSDCheckpointCallback,
    read_predictions,
)
from pytorch_accel_lite.callbacks.batch_norm import synchronised
from pytorch_accel_lite.data import NamedDatasets, OwnShard
from pytorch_accel_lite.finetuning import ModelFreezer
from pytorch_accel_lite.schedulers import WSDLrScheduler
from pytorch_accel_lite.utils import local_process_zero_first, local_process_zero_only, world_process_zero_only
from tests.launching import Failed
from tests.shipped import RUN, SHIPPED, build
from tests.tasks import Rows, equal, quiet_trainer, regression_data, small_model, weights

IN_ORDER = {"shuffle": False}


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Give a folder that the ranks share."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(sys.argv[1] if world_size() > 1 else own)


class Recorder(TrainerCallback):
    """Keeps the gradients of each update and the samples of each step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.inputs: list[torch.Tensor] = []
        self.counts: list[int] = []

    def on_optimizer_step_start(self, trainer, **kwargs):
        named = trainer.get_model().named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named})

    def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
        if batch_output["batch_size"]:
            self.inputs.append(batch[0])
            self.counts.append(batch_output["batch_size"])


def _global_batch(size: int) -> int:
    assert size % world_size() == 0
    return size // world_size()


def case_training() -> Any:
    """Weights, gradients and losses for ragged data, accumulation 1 to 3; the global batch is 6 samples."""
    results = {}
    for accumulation in (1, 2, 3):
        for size in (37, 30, 4):
            model = small_model()
            recorder = Recorder()
            trainer = quiet_trainer(model, callbacks=[recorder])
            trainer.train(
                regression_data(size),
                3,
                regression_data(11),
                per_device_batch_size=_global_batch(6),
                gradient_accumulation_steps=accumulation,
                train_dataloader_kwargs=IN_ORDER,
                gradient_clip_norm=1.0,
            )
            results[accumulation, size] = {
                "weights": weights(model),
                "gradients": recorder.gradients,
                "history": trainer.run_history.to_dict(),
                "updates": trainer.progress.update,
                "samples": trainer.progress.samples,
            }
    return results


class TokenTrainer(Trainer):
    """A loss that is a mean over the elements that are not masked, as for tokens."""

    def calculate_train_batch_loss(self, batch):
        x, y, mask = batch
        outputs = self.model(x)
        loss = ((outputs - y) ** 2)[mask].mean()
        return {"loss": loss, "model_outputs": outputs, "batch_size": len(x), "num_items_in_batch": mask.sum()}


def case_tokens() -> Any:
    results = {}
    for accumulation in (1, 3):
        data = regression_data(40)
        mask = torch.rand(40, 1, generator=torch.Generator().manual_seed(1)) < 0.6
        mask[::2] = True
        model, recorder = small_model(), Recorder()
        trainer = TokenTrainer(model, None, torch.optim.SGD(model.parameters(), lr=0.05), callbacks=[recorder])
        trainer.train(
            TensorDataset(*data.tensors, mask),
            2,
            per_device_batch_size=_global_batch(6),
            gradient_accumulation_steps=accumulation,
            train_dataloader_kwargs=IN_ORDER,
        )
        results[accumulation] = {
            "weights": weights(model),
            "gradients": recorder.gradients,
            "history": trainer.run_history.to_dict(),
        }
    return results


def case_schedule() -> Any:
    """Updates and learning rates of runs limited to seven updates, and of whole epochs."""
    results = {}
    placeholders = TrainerPlaceholderValues
    for accumulation in (1, 2, 3):
        for limit in (7, None):
            model = small_model()
            trainer = quiet_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            rates = []

            class Rates(TrainerCallback):
                def on_optimizer_step_start(self, trainer, rates=rates, **kwargs):
                    rates.append(trainer.optimizer.param_groups[0]["lr"])

            trainer.callback_handler.add_callback(Rates())
            total = placeholders.MAX_NUM_TRAIN_STEPS
            if limit is None:
                total = placeholders.NUM_EPOCHS * placeholders.NUM_UPDATE_STEPS_PER_EPOCH
            trainer.train(
                regression_data(37),
                2,
                per_device_batch_size=_global_batch(6),
                max_num_train_steps=limit,
                gradient_accumulation_steps=accumulation,
                create_scheduler_fn=partial(OneCycleLR, max_lr=0.1, total_steps=total),
            )
            results[accumulation, limit] = {
                "updates": trainer.progress.update,
                "rates": rates,
                "lowest": trainer.scheduler.optimizer.param_groups[0]["min_lr"],
                "scheduler_steps": trainer.scheduler.last_epoch,
            }
    return results


class NaNOnOneRank(Trainer):
    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        if self.progress.step == 3 and rank() == world_size() - 1:
            output["loss"] = output["loss"] * float("nan")
        return output


def case_nan_on_one_rank() -> Any:
    events = []

    class Events(TrainerCallback):
        def on_exception(self, trainer, exception, **kwargs):
            events.append(("on_exception", type(exception).__name__))

        def on_training_run_end(self, trainer, **kwargs):
            events.append(("on_training_run_end",))

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = NaNOnOneRank(model, nn.MSELoss(), optimizer, callbacks=[TerminateOnNaNCallback, Events])
    try:
        trainer.train(regression_data(60), 2, per_device_batch_size=2)
    except NonFiniteLossError as error:
        return {"message": str(error), "events": events, "update": trainer.progress.update}
    return None


class StopOnOneRank(TrainerCallback):
    def on_train_step_end(self, trainer, step, **kwargs):
        if step == 2 and trainer.accelerator.process_index == world_size() - 1:
            raise StopTrainingError("rank asked for an end")


def case_stop_on_one_rank() -> Any:
    model = small_model()
    trainer = quiet_trainer(model, callbacks=[StopOnOneRank])
    trainer.train(regression_data(2000), 2, per_device_batch_size=1)
    return {"reason": trainer.stop_reason, "update": trainer.progress.update, "weights": weights(model)}


class StopAtEpochEnd(TrainerCallback):
    def on_train_epoch_end(self, trainer, **kwargs):
        if trainer.accelerator.process_index == trainer.accelerator.num_processes - 1:
            raise StopTrainingError("at the end of the epoch")


def case_stop_before_talking_callbacks() -> Any:
    """The others of the event still run on the rank that asks for a stop: they talk to the other ranks."""
    timing = TimingCallback(show=False)
    trainer = quiet_trainer(small_model(), callbacks=[StopAtEpochEnd(), ThroughputCallback(), timing])
    trainer.train(regression_data(16), num_epochs=3, per_device_batch_size=4)
    return {"reason": trainer.stop_reason, "epoch": trainer.progress.epoch, "run": timing.totals["run"]}


def case_nan_with_logger() -> Any:
    """All ranks end together: the rows until then are written."""
    with shared_folder() as folder:
        log = MetricsFileCallback(folder / "m.jsonl", every_n_updates=1)
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = NaNOnOneRank(model, nn.MSELoss(), optimizer, callbacks=[TerminateOnNaNCallback, log])
        with suppress(NonFiniteLossError):
            trainer.train(regression_data(64), num_epochs=1, per_device_batch_size=2)
        trainer.barrier()
        rows = (folder / "m_updates.jsonl").read_text().splitlines()
        trainer.barrier()
    return [json.loads(row)["update"] for row in rows], trainer.progress.update


def case_shipped_callbacks() -> Any:
    """Each shipped callback in a run of its own: the weights, and what ranks but the first print."""
    results, home = {}, Path.cwd()
    with shared_folder() as folder:
        for callback_class in SHIPPED:
            name = callback_class.__name__
            work = folder / f"shipped {name}"
            work.mkdir(exist_ok=True)
            model = small_model()
            output = io.StringIO()
            os.chdir(work)  # where callbacks write by default
            with redirect_stdout(output), redirect_stderr(output):
                trainer = quiet_trainer(model, callbacks=[build(callback_class)])
                data = regression_data(20)
                trainer.train(data, 2, regression_data(7), per_device_batch_size=3, **RUN.get(name, {}))
                evaluated = trainer.evaluate(regression_data(5), per_device_batch_size=2)
                predicted = trainer.predict(regression_data(5), per_device_batch_size=2)
            results[name] = {
                "weights": weights(model),
                "evaluated": evaluated,
                "predicted": predicted,
                "printed": output.getvalue() if rank() else "",
            }
            os.chdir(home)
    return results


class Fussy(nn.Module):
    """Refuses, on the last rank, batches with certain samples or more than one sample."""

    def __init__(self, poison: float | None = None, alone: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(small_model(), nn.BatchNorm1d(1, momentum=0.5).double())
        self.poison, self.alone = poison, alone

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner[0](x) if self.alone else self.inner(x)
        if rank() == world_size() - 1 and self.training:
            if self.alone and len(x) > 1:
                raise torch.OutOfMemoryError("out of memory.")
            if self.poison is not None and (x[:, 0] == self.poison).any():
                raise ValueError("cannot digest this")
        return y


def _poisoned(size: int) -> TensorDataset:
    """Data in which one sample of the last rank's second batch is poison."""
    data = regression_data(size)
    data.tensors[0][11, 0] = 7.0
    return data


def case_failed_batches() -> Any:
    """What is left trains as data without the failed batch; with accumulation the windows differ."""
    results = {}
    batches = [[*range(6 * i, 6 * i + 6)] for i in (0, 2, 3)]  # of all ranks, without the second
    for name, accumulation in (("each", 1), ("window", 2)):
        skip = SkipFailedBatchesCallback()
        model = Fussy(poison=7.0)
        trainer = quiet_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[skip])
        options = {"per_device_batch_size": _global_batch(6), "gradient_accumulation_steps": accumulation}
        trainer.train(_poisoned(24), 2, train_dataloader_kwargs=IN_ORDER, **options)
        order = [sample for batch in batches for sample in batch]
        unharmed = Fussy()
        data = Subset(_poisoned(24), order)
        expected = quiet_trainer(unharmed, optimizer=torch.optim.SGD(unharmed.parameters(), lr=0.1))
        expected.train(data, 2, train_dataloader_kwargs=IN_ORDER, **options)
        results[name] = {
            "failures": skip.failures,
            "progress": trainer.progress.state_dict(),
            "found": weights(model),
            "expected": weights(unharmed),
        }
    return results


def case_nan_report() -> Any:
    """One rank meets a batch that is not finite: it alone writes a report, and all end together."""
    with shared_folder() as folder:
        report = NaNReportCallback(folder / "nan reports")
        data = regression_data(60)
        data.tensors[0][11, 0] = float("nan")
        trainer = quiet_trainer(small_model(), callbacks=[report])
        try:
            trainer.train(data, 1, per_device_batch_size=_global_batch(6), train_dataloader_kwargs=IN_ORDER)
        except NonFiniteLossError as error:
            return {"error": str(error), "report": None if report.report is None else report.report.name}


class NotOnTheLast(nn.Module):
    """Has room for three samples on the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if rank() == world_size() - 1 and len(x) > 3:
            raise MemoryError
        return self.inner(x)


def case_finding() -> Any:
    data = regression_data(24)
    model, alone = NotOnTheLast(), small_model()
    before = weights(model)
    trainer = quiet_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    batch = trainer.find_batch_size(data)
    found = trainer.find_lr(data, _global_batch(6), 1e-3, 0.1, 12, train_dataloader_kwargs=IN_ORDER)
    optimizer, losses = torch.optim.SGD(alone.parameters(), lr=0.1), []
    for step, lr in enumerate(found.lrs):  # the same by hand, with the batches of all ranks together
        x, y = (tensor[6 * (step % 4) : 6 * (step % 4) + 6] for tensor in data.tensors)
        optimizer.param_groups[0]["lr"] = lr
        loss = nn.functional.mse_loss(alone(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {
        "batch": batch,
        "lr": found.suggestion,
        "losses": found.losses,
        "alone": losses,
        "unchanged": equal(weights(model), before),
    }


def case_predictions() -> Any:
    with shared_folder() as folder:
        data, directory = regression_data(23), folder / "predictions"
        trainer = quiet_trainer(small_model(), callbacks=[PredictionWriterCallback(directory, shard_size=3)])
        for _ in trainer.predict_iter(data, per_device_batch_size=2):
            pass
        written = read_predictions(directory)
        by_hand = small_model()(data.tensors[0]).detach()
        names = [path.stem.partition("rank")[2] for path in directory.glob("shard-*")]
        return {"equal": bool(torch.allclose(written, by_hand)), "ranks": sorted(set(map(int, names)))}


def case_worst_samples() -> Any:
    """Twice, with fewer samples than ranks too; by hand on the whole set."""
    found, expected = [], []
    for size in (23, 2):
        data, model, worst = regression_data(size), small_model(), WorstSamplesCallback(6)
        quiet_trainer(model, callbacks=[worst]).evaluate(data, per_device_batch_size=2)
        losses = nn.functional.mse_loss(model(data.tensors[0]), data.tensors[1], reduction="none")[:, 0]
        found.append([sample.index for sample in worst.samples])
        expected.append(losses.sort(descending=True).indices[:6].tolist())
    return {"found": found, "expected": expected}


def case_out_of_memory() -> Any:
    """One rank alone runs out of memory: all split, and the gradients are those of the whole batch."""
    results = {}
    for alone in (True, False):
        model = Fussy(alone=alone)
        model.inner[1] = nn.Identity()
        trainer = quiet_trainer(model)
        trainer.train(
            regression_data(27),
            2,
            per_device_batch_size=_global_batch(12),
            gradient_accumulation_steps=2,
            train_dataloader_kwargs=IN_ORDER,
            auto_microbatch=True,
        )
        results["split" if alone else "whole"] = {
            "weights": weights(model),
            "history": trainer.run_history.to_dict(),
            "parts": trainer.num_microbatches,
        }
    return results


def case_time_limit() -> Any:
    """A run that pauses again and again, and one that does not."""
    outcomes = []
    with shared_folder() as folder:
        for limit in (1e-9, 3600):
            updates, reason = [], ""
            while reason is not None:
                model = small_model()
                saving = SaveTrainingStateCallback(folder / f"limit {limit}", save_at_end=False)
                trainer = quiet_trainer(model, callbacks=[TimeLimitCallback(limit), saving], seed=3)
                trainer.train(regression_data(24), 2, per_device_batch_size=3, resume_from="latest")
                reason = trainer.stop_reason
                updates.append(trainer.progress.update)
            outcomes.append({"updates": updates, "weights": weights(model)})
    return outcomes


def _classes(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (size,), generator=generator))


class AccuracyTrainer(Trainer):
    """Metrics in the loop, as the ancestor's users write them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.accuracy = MulticlassAccuracy(num_classes=3, average="macro", sync_on_compute=True)

    def calculate_eval_batch_loss(self, batch):
        output = super().calculate_eval_batch_loss(batch)
        self.accuracy.update(output["model_outputs"], batch[1])
        return output

    def eval_epoch_end(self):
        self.run_history.update_metric("accuracy", self.accuracy.compute().item())
        self.accuracy.reset()


def _classifier() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    model(torch.randn(50, 5, dtype=torch.float64))  # running statistics that are not the initial ones
    return model


def case_evaluation() -> Any:
    """Loss, metric and predictions for every dataset size from 1 to 40."""
    results = {}
    model = _classifier()
    trainer = AccuracyTrainer(model, nn.CrossEntropyLoss(), None, callbacks=[])
    for size in range(1, 41):
        data = _classes(size)
        metrics = trainer.evaluate(data, per_device_batch_size=3)
        predictions = trainer.predict(data, per_device_batch_size=3)
        results[size] = metrics, predictions
    return results


def case_predict_structures() -> Any:
    class Structured(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 2).double()

        def forward(self, x):
            return {"out": self.linear(x), "pair": (x[:, 0], [x[:, 1:]]), "mean": x.mean()}

    torch.manual_seed(0)
    trainer = Trainer(Structured(), None, None, callbacks=[])
    return trainer.predict(regression_data(7), per_device_batch_size=2)


def case_gather() -> Any:
    trainer = Trainer(small_model(), None, None, callbacks=[])
    mine = torch.arange(rank() + 1) + 10 * rank()
    return {
        "ragged": trainer.gather(mine),
        "padded": trainer.gather(mine, padding_value=-1),
        "nested": trainer.gather({"a": mine.float(), "b": (torch.tensor(rank()),)}),
        "empty": trainer.gather(torch.arange(rank())),
    }


class NoisyRows(Rows):
    """Augmentation with all three generators."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.randn(5) + np.random.randn() + random.random(), y


def case_shuffled_order() -> Any:
    """Ranks whose own generators differ agree on an order; each sample is seen once in an epoch."""
    results = {}
    data = regression_data(23)
    tagged = TensorDataset(torch.arange(23, dtype=torch.float64)[:, None].expand(-1, 5).contiguous(), data.tensors[1])
    for seed in (None, 5):
        for name, dataset in (("memory", tagged), ("rows", Rows(tagged))):
            torch.manual_seed(1 + rank())
            recorder = Recorder()
            trainer = quiet_trainer(small_model(), callbacks=[recorder], seed=seed)
            trainer.train(dataset, 2, per_device_batch_size=2, train_dataloader_kwargs={"num_workers": 0})
            results[seed, name] = [batch[:, 0].tolist() for batch in recorder.inputs]
    sampler = WeightedRandomSampler(torch.ones(23), 23)
    torch.manual_seed(1 + rank())
    recorder = Recorder()
    trainer = quiet_trainer(small_model(), callbacks=[recorder])
    trainer.train(tagged, 1, per_device_batch_size=2, train_dataloader_kwargs={"sampler": sampler})
    results["weighted"] = [batch[:, 0].tolist() for batch in recorder.inputs]
    return results


def case_seeded_augmentation() -> Any:
    """With a seed, the same weights for 0, 1 and 2 workers, whatever the number of processes."""
    results = {}
    for workers in (0, 1, 2):
        model = small_model()
        trainer = quiet_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), seed=3)
        trainer.train(
            NoisyRows(regression_data(26)),
            2,
            per_device_batch_size=_global_batch(6),
            train_dataloader_kwargs={"num_workers": workers},
        )
        results[workers] = weights(model)
    return results


class Stream(IterableDataset):
    def __init__(self, size):
        self.data = regression_data(size)

    def __iter__(self):
        order = list(range(len(self.data)))
        random.shuffle(order)  # differs from rank to rank
        return (self.data[index] for index in order)


def case_streams() -> Any:
    """An iterable dataset is dealt out; own shards of unequal length are used up without a hang."""
    results = {}
    random.seed(rank())
    for size in (1, 7, 24):
        recorder = Recorder()
        trainer = quiet_trainer(small_model(), callbacks=[recorder])
        trainer.train(Stream(size), 2, per_device_batch_size=2, gradient_accumulation_steps=2)
        results["stream", size] = torch.cat(recorder.inputs) if recorder.inputs else torch.empty(0, 5)
        results["updates", size] = trainer.progress.update

    class OwnShards(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            mine = TensorDataset(*(tensor[rank() :: world_size()] for tensor in self.train_dataset.tensors))
            keep = len(mine) if rank() == 0 else 1
            return OwnShard(DataLoader(TensorDataset(*(t[:keep] for t in mine.tensors)), batch_size))

    recorder = Recorder()
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = OwnShards(model, nn.MSELoss(), optimizer, callbacks=[recorder])
    trainer.train(regression_data(20), 2, per_device_batch_size=2)
    results["own"] = {
        "inputs": torch.cat(recorder.inputs),
        "weights": weights(model),
        "updates": trainer.progress.update,
        "samples": trainer.progress.samples,
    }
    return results


class OrderedStream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


def case_predicted_streams() -> Any:
    """Predictions and losses of streams, of full and of incomplete last rounds of batches."""
    results = {}
    for size in range(1, 14):
        trainer, data = quiet_trainer(small_model()), regression_data(size)
        stream = OrderedStream(data)
        results[size] = {
            "predictions": trainer.predict(stream, per_device_batch_size=2),
            "losses": trainer.evaluate(stream, per_device_batch_size=2),
            "expected": small_model()(data.tensors[0]).detach(),
            "expected_losses": trainer.evaluate(data, per_device_batch_size=2),
        }
    return results


class SavesEachUpdate(TrainerCallback):
    saves_training_states = True

    def __init__(self, folder):
        self.folder = folder

    def on_train_step_checkpoint(self, trainer, **kwargs):
        trainer.save_training_state(self.folder / str(trainer.progress.update))


class OwnOfSix(Trainer):
    """Six batches of each process."""

    def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
        return list(zip(*(t[rank() :: world_size()].split(2) for t in self.train_dataset.tensors), strict=True))


def case_resumed_streams() -> Any:
    """Streams go on with other batch sizes, own batches after as many as there were; both may have too few."""
    results = {}

    def run(name, data, batch_size, callbacks=(), trainer_class=Trainer, **kwargs):
        recorder, model = Recorder(), small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = trainer_class(model, nn.MSELoss(), optimizer, callbacks=[recorder, *callbacks], seed=0)
        try:
            trainer.train(data, 1, per_device_batch_size=batch_size, **kwargs)
        except (ValueError, RuntimeError) as error:
            results[name] = str(error)
        else:
            results[name] = recorder.inputs

    with shared_folder() as folder:
        data, fewer = regression_data(50), regression_data(5)
        saving = SavesEachUpdate(folder / "of a stream")
        run("stream", OrderedStream(data), 4, [saving])
        run("stream with other batches", OrderedStream(data), 5, resume_from=saving.folder / "2")
        run("stream of fewer", OrderedStream(fewer), 4, resume_from=saving.folder / "2")
        saving, limit = SavesEachUpdate(folder / "of own"), LimitBatchesCallback(4)
        data, fewer = regression_data(12 * world_size()), regression_data(2 * world_size())
        run("own", data, 1, [saving, limit], OwnOfSix)
        run("own again", data, 1, [limit], OwnOfSix, resume_from=saving.folder / "2")
        run("own of fewer", fewer, 1, [limit], OwnOfSix, resume_from=saving.folder / "2")
    return results


class LengthBuckets:
    """A batch sampler with batches of different sizes."""

    def __iter__(self):
        yield from ([0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10])

    def __len__(self):
        return 5


def case_batch_sampler() -> Any:
    recorder, model = Recorder(), small_model()
    trainer = quiet_trainer(model, callbacks=[recorder])
    trainer.train(
        regression_data(11), 2, per_device_batch_size=2, train_dataloader_kwargs={"batch_sampler": LengthBuckets()}
    )
    return {"sizes": recorder.counts, "samples": trainer.progress.samples, "updates": trainer.progress.update}


class EndlessOrder:
    """Draws from a generator that differs from rank to rank."""

    def __iter__(self):
        while True:
            yield random.randrange(50)


def case_sampler_without_an_end() -> Any:
    """Without a seed all take their share of what the first draws."""
    random.seed(rank())
    seen = []

    class Keep(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs):
            seen.append(trainer.batch_indices)

    trainer = quiet_trainer(small_model(), callbacks=[Keep])
    data, sampler = regression_data(50), EndlessOrder()
    kwargs = {"train_dataloader_kwargs": {"sampler": sampler}, "per_device_batch_size": _global_batch(120)}
    trainer.train(data, max_num_train_steps=20, **kwargs)
    random.seed(0)
    return {"seen": seen, "drawn": [random.randrange(50) for _ in range(20 * 120)]}


def case_callbacks() -> Any:
    """Everything on: what is printed is looked at by the test, through the output of the launch."""
    with shared_folder() as folder:
        model = small_model()
        best = SaveBestModelCallback(folder / "best.pt")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        trainer = Trainer(
            model, nn.MSELoss(), optimizer, callbacks=[*get_default_callbacks(), best, EarlyStoppingCallback(2, 0.0)]
        )
        trainer.train(regression_data(20), 3, regression_data(9), per_device_batch_size=2)
        return {"weights": weights(model), "best": best.best_metric, "history": trainer.run_history.to_dict()}


class EvaluateInside(TrainerCallback):
    """Evaluates other data in the middle of an epoch."""

    def on_train_step_end(self, trainer, step, **kwargs):
        if step == 1:
            self.metrics = trainer.evaluate(regression_data(5), per_device_batch_size=2)
            self.training = trainer.model.training


def case_evaluate_inside() -> Any:
    results = {}
    for callbacks in ([], [EvaluateInside()]):
        model = small_model()
        trainer = quiet_trainer(model, callbacks=callbacks)
        trainer.train(
            regression_data(20),
            2,
            regression_data(6),
            per_device_batch_size=_global_batch(6),
            train_dataloader_kwargs=IN_ORDER,
        )
        losses = trainer.run_history.to_dict()
        results[len(callbacks)] = weights(model), {k: v for k, v in losses.items() if k != "evaluation_loss"}
        if callbacks:
            results["metrics"], results["training"] = callbacks[0].metrics, callbacks[0].training
    return results


class TwoTasks(Trainer):
    def calculate_train_batch_loss(self, batch):
        losses = {name: self.loss_func(self.model(x), y) for name, (x, y) in batch.items()}
        return {"loss": losses, "batch_size": len(batch["a"][0])}


def case_named() -> Any:
    """A dict of training datasets, one of which is shorter, and a dict of evaluation datasets."""
    model = small_model()
    trainer = TwoTasks(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.05), callbacks=[], seed=1)
    trainer.train(
        NamedDatasets({"a": regression_data(13), "b": regression_data(22)}, length="max"),
        2,
        {"few": regression_data(2), "many": regression_data(25)},
        per_device_batch_size=_global_batch(6),
        eval_dataloader_kwargs={"batch_size": 4},
    )
    parts = list(trainer.predict_iter(regression_data(25), per_device_batch_size=_global_batch(6)))
    return {"weights": weights(model), "history": trainer.run_history.to_dict(), "parts": parts}


class GathersEveryBatch(TrainerCallback):
    """As the ancestor's users do: every rank has as many evaluation batches where there are samples for all."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_eval_step_end(self, trainer, batch, **kwargs):
        self.seen.append(trainer.gather(batch[0]))


def case_gather_in_evaluation() -> Any:
    results = {}
    for size in range(world_size(), 25):
        gathers = GathersEveryBatch()
        trainer = Trainer(small_model(), nn.MSELoss(), None, callbacks=[gathers])
        trainer.evaluate(regression_data(size), per_device_batch_size=3)
        results[size] = torch.cat(gathers.seen)
    return results


class StopsFirstEvaluation(TrainerCallback):
    stops = 1

    def on_eval_step_end(self, trainer, **kwargs):
        if self.stops and trainer.accelerator.process_index == 0:
            self.stops -= 1
            raise StopTrainingError("seen enough")


def case_stopped_evaluation() -> Any:
    trainer = Trainer(small_model(), nn.MSELoss(), None, callbacks=[StopsFirstEvaluation])
    reasons = []
    for _ in range(2):
        trainer.evaluate(regression_data(20), per_device_batch_size=2)
        reasons.append(trainer.stop_reason)
    return reasons


def case_batch_norm() -> Any:
    """Running statistics are the same on all ranks when it matters: in evaluations, and at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).double()
    trainer = quiet_trainer(model)
    trainer.train(regression_data(24), 2, regression_data(9), per_device_batch_size=_global_batch(6))
    return {"weights": weights(model), "history": trainer.run_history.to_dict()}


def case_ema() -> Any:
    """The average with its buffers, and what its evaluation gave; the expected loss is that of the whole set."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()
    ema = ModelEmaCallback(0.5, save_path=None)
    trainer = quiet_trainer(model, callbacks=[ema], seed=0)
    data = regression_data(10)
    trainer.train(regression_data(24), 1, data, 2)
    average = ema.ema.module
    with torch.no_grad():
        expected = nn.functional.mse_loss(average(data.tensors[0]), data.tensors[1]).item()
    return {"average": weights(average), "history": trainer.run_history.to_dict(), "expected": expected}


def case_metrics() -> Any:
    """Metrics over more samples than ranks and over fewer, computed by the job and from the whole set."""
    torch.manual_seed(0)
    model, results = nn.Linear(5, 3), {}
    for name, size in (("many", 23), ("few", 1)):
        x, y = torch.randn(size, 5), torch.arange(size) % 3
        classes = {"accuracy": MulticlassAccuracy(3, average="micro")}
        if size > 1:
            classes["auroc"] = MulticlassAUROC(3)  # keeps all predictions
        callbacks = [
            MetricsCallback(classes, _probabilities),
            MetricsCallback({"largest": MaxMetric()}, _largest_output),
        ]
        if size == 1:
            callbacks.append(MetricsCallback({"all": CatMetric()}, _largest_output))
        found = Trainer(model, nn.CrossEntropyLoss(), None, callbacks=callbacks).evaluate(TensorDataset(x, y), 2)
        with torch.no_grad():
            outputs = model(x)
        expected = {key: metric.clone().cpu()(outputs.softmax(1), y).item() for key, metric in classes.items()}
        expected |= {"largest": outputs.max().item()} | ({"all": outputs.max().item()} if size == 1 else {})
        results[name], results[f"expected_{name}"] = {key: found[key] for key in expected}, expected
    return results


def _probabilities(batch: Any, batch_output: Any) -> Any:
    return batch_output["model_outputs"].softmax(1), batch[1]


def _largest_output(batch: Any, batch_output: Any) -> Any:
    return (batch_output["model_outputs"].max(),)


def case_sync_batch_norm() -> Any:
    """On the CPU the conversion is refused with a warning, and training goes on; a converted model can be evaluated."""
    found: dict[str, Any] = {}
    for name, callbacks in (("with", [ConvertSyncBatchNormCallback]), ("without", [])):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).double()
        trainer = quiet_trainer(model, callbacks=callbacks)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train(regression_data(24), 1, per_device_batch_size=4, train_dataloader_kwargs=IN_ORDER)
        found[name] = weights(model)
        found[f"warnings {name}"] = [str(w.message) for w in caught if "SyncBatchNorm" in str(w.message)]
    plain = trainer.evaluate(regression_data(9))["evaluation_loss"]
    trainer.model = synchronised(trainer.model)
    return found | {"losses": (plain, trainer.evaluate(regression_data(9))["evaluation_loss"])}


def image_data(size: int = 26) -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    return TensorDataset(torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.float64), torch.arange(size) % 3)


def image_model() -> nn.Module:
    torch.manual_seed(2)
    layers = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(64, 3)
    return nn.Sequential(*layers).double()


def case_channels_last() -> Any:
    found = {}
    for channels_last in (False, True):
        model = image_model().eval()  # batch norm without the statistics of each process's own batch
        trainer = type("Frozen", (Trainer,), {"train_epoch_start": lambda self: None})(
            model,
            nn.CrossEntropyLoss(),
            torch.optim.SGD(model.parameters(), lr=0.1),
            callbacks=[],
            channels_last=channels_last,
        )
        trainer.train(image_data(), 2, per_device_batch_size=_global_batch(6), train_dataloader_kwargs=IN_ORDER)
        found[channels_last] = weights(model)
    return found


def case_diagnosis() -> Any:
    model = small_model()
    before = weights(model)
    found = quiet_trainer(model).diagnose(regression_data(48), num_steps=4)
    return {"unchanged": equal(weights(model), before), "steps": found.steps, "step": found.step}


def case_limits() -> Any:
    model = small_model()
    trainer = quiet_trainer(model, callbacks=[LimitBatchesCallback(2)])
    data = regression_data(30)
    trainer.train(data, 2, data, per_device_batch_size=_global_batch(6), train_dataloader_kwargs=IN_ORDER)
    return {"weights": weights(model), "samples": trainer.progress.samples, "updates": trainer.progress.update}


def case_wsd() -> Any:
    """A run with a decay, one that goes on from before it, and the same in one go: 8, 4 + 8 and 12 updates."""
    with shared_folder() as folder:

        def run(name: str, epochs: int, ratio: float, initial: Path | None = None) -> Any:
            model = small_model()
            trainer = quiet_trainer(
                model, callbacks=[WSDCheckpointCallback(folder / f"wsd {name}", initial_checkpoint=initial)]
            )
            create = WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=0, decay_phase_ratio=ratio)
            batch = {"per_device_batch_size": _global_batch(6), "train_dataloader_kwargs": IN_ORDER}
            trainer.train(regression_data(24), epochs, create_scheduler_fn=create, **batch)
            return weights(model)

        run("first", 2, 0.5)
        continued = run("second", 2, 0.5, folder / "wsd first" / "checkpoint_4_wsd_pre_decay.pt")
        names = sorted(path.name for path in (folder / "wsd first").iterdir())
        return {"files": names, "continued": continued, "in one go": run("whole", 3, 1 / 3)}


def model_to_unfreeze() -> nn.Module:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 6), nn.Tanh()), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    torch.set_rng_state(state)
    return model.double()


def case_gradual_unfreezing() -> Any:
    """Weights after each number of epochs, for an optimizer over the head; also by hand with rewrap_model()."""
    results = {}

    class UnfreezesByHand(TrainerCallback):
        def on_train_epoch_start(self, trainer, **kwargs):
            if trainer.progress.epoch == 2:
                ModelFreezer(trainer.get_model()).unfreeze()
                trainer.rewrap_model()

    for how in ("callback", "accumulation", "by hand"):
        for epochs in (1, 2, 4):
            model = model_to_unfreeze()
            optimizer = torch.optim.AdamW((model if how == "by hand" else model[-1]).parameters(), lr=0.01)
            if how == "by hand":
                ModelFreezer(model).freeze()
            callbacks = [UnfreezesByHand() if how == "by hand" else GradualUnfreezingCallback()]
            quiet_trainer(model, None, optimizer, callbacks=callbacks).train(
                regression_data(37),
                epochs,
                regression_data(11),
                per_device_batch_size=_global_batch(6),
                gradient_accumulation_steps=2 if how == "accumulation" else 1,
                train_dataloader_kwargs=IN_ORDER,
                gradient_clip_norm=1.0,
            )
            results[how, epochs] = weights(model)
    return results


def case_process_helpers() -> Any:
    trainer = quiet_trainer(small_model())
    folder = Path(trainer.broadcast_object(tempfile.mkdtemp()))

    def leave_a_file(name: str) -> list[str]:
        before = sorted(file.name for file in folder.iterdir())
        (folder / name).touch()
        return before

    results = {
        "local only": local_process_zero_only(lambda value: value)(rank() + 5),
        "world only": world_process_zero_only(lambda value: value)(rank() + 5),
        "first": local_process_zero_first(leave_a_file)(f"rank{rank()}"),
        "broadcast": trainer.broadcast_object({"rank": rank()}),
        "gathered": trainer.all_gather_object(("rank", rank())),
        "numbers": {
            reduce: trainer.tensor_to_numeric(torch.tensor([rank() + 1]), reduce)
            for reduce in (None, "sum", "mean", "max")
        },
    }
    trainer.barrier()
    results["after the barrier"] = len(list(folder.iterdir()))
    trainer.barrier()
    return results


class LearnedScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 1.0 + rank(), dtype=torch.float64))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().mean() * torch.exp(-self.scale) + self.scale


def case_learned_loss() -> Any:
    model, loss_func = small_model(), LearnedScale()
    optimizer = torch.optim.SGD([*model.parameters(), *loss_func.parameters()], lr=0.05)
    trainer = quiet_trainer(model, loss_func, optimizer)
    trainer.train(
        regression_data(25),
        2,
        per_device_batch_size=_global_batch(6),
        gradient_accumulation_steps=2,
        train_dataloader_kwargs=IN_ORDER,
    )
    return {"weights": weights(model), "scale": loss_func.scale.detach()}


def case_sparse_gradients() -> Any:
    """The same with a guard, which averages gradients itself, and without."""
    results = {}
    for guarded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(30, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1)).double()
        data = TensorDataset(torch.arange(24).reshape(12, 2), torch.randn(12, 1, dtype=torch.float64))
        trainer = quiet_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        trainer.train(data, 2, per_device_batch_size=2, train_dataloader_kwargs=IN_ORDER, auto_microbatch=guarded)
        results[guarded] = weights(model)
    return results


class OfFirstRank(nn.Module):
    """A loss with a sparse gradient that only the first rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Embedding(4, 1, sparse=True).double()
        nn.init.ones_(self.centres.weight)

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = (outputs - targets).square().mean()
        return loss + self.centres(torch.tensor([2])).sum() if rank() == 0 else loss


def case_sparse_gradient_of_one_rank() -> Any:
    model, loss_func = small_model(), OfFirstRank()
    optimizer = torch.optim.SGD([*model.parameters(), *loss_func.parameters()], lr=0.1)
    quiet_trainer(model, loss_func, optimizer).train(regression_data(12), 1, per_device_batch_size=12)
    return loss_func.centres.weight.detach().flatten()


class StopsAtTheEnd(TrainerCallback):
    def on_train_epoch_end(self, trainer, **kwargs):
        raise StopTrainingError("enough")


class NaNAtTheEnd(TrainerCallback):
    def on_stop_training_error(self, trainer, **kwargs):
        raise NonFiniteLossError("found while ending")


def case_nan_while_ending() -> Any:
    trainer = quiet_trainer(small_model(), callbacks=[StopsAtTheEnd(), NaNAtTheEnd()])
    raised = None
    try:
        trainer.train(regression_data(12), 1)
    except NonFiniteLossError as error:
        raised = str(error)
    return raised, "evaluation_loss" in trainer.evaluate(regression_data(6))


def case_trainers_in_turn() -> Any:
    """One trainer after another, each in a block of its own, as for folds of a cross-validation."""
    means = []
    for _ in range(2):
        model = small_model()
        with quiet_trainer(model) as trainer:
            trainer.train(regression_data(12), 1)
            means.append(trainer.gather(torch.tensor([float(model[0].weight.mean())])).tolist())
    return means


def case_states_with_nan() -> Any:
    """Only one rank sees the NaN, and the ranks talk rarely; states are saved often."""
    data = regression_data(400)
    data.tensors[0][23] = math.nan
    with shared_folder() as folder:
        saver = SaveTrainingStateCallback(folder / "nan", save_every_n_steps=1, max_checkpoints=2)
        trainer = quiet_trainer(small_model(), callbacks=[TerminateOnNaNCallback, saver], seed=0)
        failed = None
        try:
            trainer.train(data, 2, per_device_batch_size=2, train_dataloader_kwargs=IN_ORDER)
        except NonFiniteLossError as error:
            failed = str(error)
        trainer.barrier()
        kept = {path.name: load_file(path / "model.safetensors") for path in (folder / "nan").glob("update-*")}
    finite = {name: all(bool(weight.isfinite().all()) for weight in state.values()) for name, state in kept.items()}
    return {"failed": failed, "finite": finite}


def case_stop_before_others() -> Any:
    """What a callback after the one that stops the run has heard."""
    heard: list[int] = []
    callbacks = [StopsAtEpochTwo(), Hears(heard)]
    quiet_trainer(small_model(), callbacks=callbacks).train(regression_data(12), 3, regression_data(6))
    return heard


class StopsAtEpochTwo(TrainerCallback):
    def on_eval_epoch_end(self, trainer, **kwargs):
        if trainer.progress.epoch == 2:
            raise StopTrainingError("enough")


class Hears(TrainerCallback):
    def __init__(self, heard: list[int]) -> None:
        self.heard = heard

    def on_eval_epoch_end(self, trainer, **kwargs):
        self.heard.append(trainer.progress.epoch)


def main() -> None:
    torch.set_num_threads(1)
    first = local_process_zero_only(lambda: True)()  # before anything else has made a process of this one
    results: dict[str, Any] = {"world_size": Accelerator().num_processes, "first of all": first}
    for name, case in list(globals().items()):
        if name.startswith("case_"):
            try:
                results[name.removeprefix("case_")] = case()
            except Exception:
                results[name.removeprefix("case_")] = Failed(traceback.format_exc())
    torch.save(results, Path(sys.argv[1]) / f"rank{rank()}.pt")


if __name__ == "__main__":
    main()
