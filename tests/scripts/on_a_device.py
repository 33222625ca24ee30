"""What runs on the simulated device and, for comparison, on the CPU: python on_a_device.py FILE

There all cases run on the device, one after another; tests/base/test_devices.py calls them for the CPU.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Sampler, Subset, TensorDataset
from torchmetrics import MeanSquaredError, PearsonCorrCoef

from pytorch_accel_lite import NonFiniteLossError, Trainer, TrainerCallback, callbacks
from pytorch_accel_lite.callbacks import (
    MoveModulesToDeviceCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    StepBasedEvaluationCallback,
    TerminateOnNaNCallback,
)
from pytorch_accel_lite.trainer import DEFAULT_CALLBACKS
from tests.shipped_callbacks import RUN, SHIPPED, build
from tests.small_models import make_data, make_trainer, train

waits: Counter[str] = Counter()
copies: Counter[str] = Counter()
LAGS = (8, 32)  # times the usual
STEPS_OF_SHIPPED = 5


def on_host(tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), tree)


def results_of(trainer: Trainer) -> dict[str, Any]:
    return {
        "device": trainer.device.type,
        "weights": on_host(trainer.model.state_dict()),
        "history": trainer.run_history.to_dict(),
    }


def with_waits(run: Callable[[int], Trainer], steps: int = 40) -> dict[str, Any]:
    """Return the result of a run, and the waits of its steps after the first ten."""
    results, waited = {}, []
    for size in (20, 20 + 2 * steps):
        waits.clear()
        results = results_of(run(size))
        waited.append(waits.copy())
    return results | {"waits": dict(waited[1] - waited[0])}


def case_default_callbacks() -> Any:
    return with_waits(
        lambda size: train(make_trainer(DEFAULT_CALLBACKS), size=size, epochs=3, eval_dataset=make_data())
    )


def case_shipped_callbacks() -> Any:
    def run(callback_class: type[TrainerCallback], size: int) -> Trainer:
        special = callback_class is StepBasedEvaluationCallback
        callback = StepBasedEvaluationCallback(10_000) if special else build(callback_class)
        arguments = RUN.get(callback_class.__name__, {})
        return train(make_trainer([callback]), size=size, eval_dataset=make_data(), **arguments)

    def waited(callback_class: type[TrainerCallback]) -> int:
        return sum(with_waits(lambda size: run(callback_class, size), steps=STEPS_OF_SHIPPED)["waits"].values())

    return {callback_class.__name__: waited(callback_class) for callback_class in SHIPPED}


def case_monitors_and_rows() -> Any:
    """Everything that reads numbers of an update, with a row of them for each."""

    def run(size: int) -> Trainer:
        files = callbacks.MetricsFileCallback("rows.jsonl", every_n_updates=1)
        return train(
            make_trainer([callbacks.GradientNormCallback(), files, callbacks.AdviceCallback()]),
            size=size,
            epochs=2,
            gradient_clip_norm=0.3,
        )

    results = with_waits(run)
    return results | {"rows": [json.loads(line) for line in Path("rows_updates.jsonl").read_text().splitlines()]}


def case_accumulated_and_clipped() -> Any:
    """Windows of three micro-batches, the last of them short, of five samples, in a schedule."""
    return with_waits(
        lambda size: train(
            make_trainer(),
            size=2 * size + 1,
            batch_size=5,
            epochs=2,
            gradient_accumulation_steps=3,
            gradient_clip_norm=0.1,
            create_scheduler_fn=lambda optimizer: LambdaLR(optimizer, lambda update: 1 / (1 + update)),
        )
    )


class CountsItems(Trainer):
    """Losses over a number of items that only the device knows; two losses."""

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        inputs, targets = batch
        outputs = self.model(inputs)
        counted = (inputs[:, 0] > -10).sum().clamp(min=1)
        loss = ((outputs - targets) ** 2).sum() / counted
        return {
            "loss": {"fit": loss, "size": 0.01 * outputs.pow(2).sum() / counted},
            "model_outputs": outputs,
            "batch_size": len(inputs),
            "num_items_in_batch": counted,
        }


def case_items_counted_on_the_device() -> Any:
    def run(size: int) -> Trainer:
        trainer = make_trainer(DEFAULT_CALLBACKS, trainer_class=CountsItems)
        return train(trainer, size=2 * size + 1, batch_size=4, gradient_accumulation_steps=2)

    return with_waits(run)


def case_evaluation() -> Any:
    def run(size: int) -> Trainer:
        trainer = make_trainer(DEFAULT_CALLBACKS)
        trainer.evaluate(make_data(size), per_device_batch_size=2)
        return trainer

    return with_waits(run)


def case_bar() -> Any:
    """A bar that is drawn in each step, as soon as the loss has been copied."""

    from pytorch_accel_lite.callbacks import ProgressBarCallback

    def run(size: int) -> Trainer:
        bar = ProgressBarCallback(show_always=True, refresh_seconds=0.0)
        return train(make_trainer([bar]), size=size, epochs=2)

    return with_waits(run)


class Boxes(nn.Linear):
    """Gives a list with a dict for each sample, as detectors do."""

    def forward(self, x: torch.Tensor) -> Any:
        found = super().forward(x)
        return found if self.training else [{"boxes": row[None], "score": row.sum()} for row in found]


def case_predictions() -> Any:
    """Outputs of each step, which are copied during the next; those of detectors, too."""
    predicted: dict[str, Any] = {}

    def run(size: int) -> Trainer:
        trainer = make_trainer()
        predicted["tensors"] = trainer.predict(make_data(2 * size), per_device_batch_size=4)
        return trainer

    results = with_waits(run)
    torch.manual_seed(0)
    model = Boxes(4, 2)
    boxes = make_trainer(model=model, optimizer=None, loss_func=None)
    predicted["boxes"] = [list(sample.values()) for sample in boxes.predict(make_data(5), per_device_batch_size=2)]
    results["waits"].pop("event", None)  # the copies of the step before, while the device has the next one to compute
    return results | {"predicted": predicted}


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Pairs:
    pairs: list[Pair]
    weights: torch.Tensor = dataclasses.field(init=False)  # which some programs set later


def case_dataclasses() -> Any:
    """Batches that are dataclasses, or have them among their parts."""

    class OfPairs(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> Any:
            pair = batch["data"].pairs[0]
            return super().calculate_train_batch_loss((pair.x, pair.y))

    def collate_fn(samples: Any) -> Any:
        return {"data": Pairs([Pair(*map(torch.stack, zip(*samples, strict=True)))])}

    return results_of(
        train(make_trainer(trainer_class=OfPairs, seed=3), train_dataloader_kwargs={"collate_fn": collate_fn})
    )


def case_split_batches() -> Any:
    """Batches of six that do not fit into memory, which the first step finds out."""

    class Full(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> Any:
            if len(batch[0]) > 2:
                raise torch.OutOfMemoryError
            return super().calculate_train_batch_loss(batch)

    def run(size: int) -> Trainer:
        return train(make_trainer(trainer_class=Full), size=3 * size, batch_size=6, auto_microbatch=True)

    return with_waits(run)


class FullInEvaluation(Trainer):
    """Has memory for evaluation batches of two samples."""

    def calculate_eval_batch_loss(self, batch: Any) -> Any:
        if len(batch[0]) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return super().calculate_eval_batch_loss(batch)


def case_split_evaluation_batches() -> Any:
    def run(size: int) -> Trainer:
        trainer = make_trainer(trainer_class=FullInEvaluation)
        trainer.evaluate(make_data(3 * size), per_device_batch_size=6, auto_microbatch=True)
        return trainer

    return with_waits(run)


def case_out_of_memory() -> Any:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    trainer = make_trainer([callbacks.DeviceMemoryCallback], model, FullInEvaluation, optimizer=optimizer)
    try:
        train(trainer, epochs=1, eval_dataset=make_data(), batch_size=3)
    except torch.OutOfMemoryError as error:
        return error.__notes__, [path.read_text() for path in Path().glob("*.pickle")]
    return None


def case_data_on_the_device() -> Any:
    """Shuffled rows of tensors that lie on the device; their order is drawn on the CPU."""
    copied = []

    def run(size: int) -> Trainer:
        trainer = make_trainer(seed=3)
        data = TensorDataset(*(tensor.to(trainer.device) for tensor in make_data(size).tensors))
        waits.clear()
        copies.clear()
        train(trainer, train_dataset=Subset(data, range(size)), eval_dataset=data, train_dataloader_kwargs={})
        copied.append(copies.copy())
        return trainer

    return with_waits(run) | {"copies": [dict(counts) for counts in copied]}


def case_data_partly_on_the_device() -> Any:
    """Targets in host memory, in an order that a sampler draws as it is needed."""

    class Drawn(Sampler[int]):
        def __iter__(self) -> Any:
            return iter(torch.randperm(30).tolist())

    torch.manual_seed(2)
    trainer = make_trainer()
    x, y = make_data(30).tensors
    data = TensorDataset(x.to(trainer.device), y)
    return results_of(train(trainer, train_dataset=data, train_dataloader_kwargs={"sampler": Drawn()}))


def case_a_loss_that_is_nan() -> Any:
    x, y = make_data(400).tensors
    y[121] = float("nan")
    trainer = make_trainer([TerminateOnNaNCallback])
    try:
        train(trainer, train_dataset=TensorDataset(x, y))
    except NonFiniteLossError as error:
        return {"message": str(error), "step": trainer.progress.step}
    return None


def case_a_loss_that_is_nan_on_devices_that_lag_behind() -> Any:
    """The results by how many times as long as usual the device takes: a copy arrives after several looks at it."""
    simulated = sys.modules["tests.simulated_device"]
    results, usual = {}, simulated.LATENCY
    try:
        for lag in LAGS:
            simulated.LATENCY = usual * lag
            results[lag] = case_a_loss_that_is_nan()
    finally:
        simulated.LATENCY = usual
    return results


def case_memory() -> Any:
    return results_of(train(make_trainer([callbacks.DeviceMemoryCallback]), epochs=2))["history"]


def case_flops() -> Any:
    def run(size: int) -> Trainer:
        return train(
            make_trainer([callbacks.ThroughputCallback(count_flops=True)], trainer_class=CountsItems), size=size
        )

    return with_waits(run)


def case_peaks() -> Any:
    """The peaks of devices by their names, in TFLOPs per second; 0 where a warning asks for them."""
    names = ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"]
    names += ["NVIDIA RTX A4000", "NVIDIA GB200", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090 Laptop GPU"]
    found = {}
    for name in names:
        for dtype in (torch.bfloat16, torch.float32):
            torch.sim.name = name  # type: ignore[attr-defined]
            model = nn.Linear(4, 1).to(dtype)
            data = TensorDataset(*(tensor.to(dtype) for tensor in make_data().tensors))
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                trainer = train(
                    make_trainer([callbacks.ThroughputCallback(flops_per_sample=1)], model), train_dataset=data
                )
            rate, share = (trainer.step_metrics.get(name, 0) for name in ("flops_per_second", "mfu"))
            asked = any(f"the peak of the device {name!r}" in str(warning.message) for warning in said)
            found[name, str(dtype)] = 0 if asked else round(rate / share / 1e12, 1)
    return found


def case_evaluated_and_predicted() -> Any:
    from pytorch_accel_lite.callbacks import MetricsCallback, ModelEmaCallback

    callbacks = [
        MetricsCallback(MeanSquaredError(), train=True),
        ModelEmaCallback(decay=0.9, evaluate_during_training=True),
        StepBasedEvaluationCallback(5),
        SaveBestModelCallback("best.pt"),
    ]
    trainer = train(make_trainer(callbacks), size=20, epochs=3, eval_dataset=make_data(9))
    predictions = trainer.predict(make_data(7), per_device_batch_size=3)
    trainer.load_checkpoint("best.pt")
    trainer.evaluate(make_data(9), per_device_batch_size=2)
    return results_of(trainer) | {"predictions": on_host(predictions)}


def _flat(batch: Any, batch_output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return batch_output["model_outputs"].flatten(), batch[1].flatten()


def case_resumed() -> Any:
    from pytorch_accel_lite.callbacks import MetricsCallback

    def run(**kwargs: Any) -> Trainer:
        callbacks = [
            SaveTrainingStateCallback("states", save_every_n_steps=1),
            TerminateOnNaNCallback(),
            MetricsCallback(PearsonCorrCoef(), _flat, train=True),  # its states are vectors
        ]
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        trainer = make_trainer(callbacks, model, optimizer=torch.optim.AdamW(model.parameters()), seed=4)
        arguments = {"epochs": 2, "size": 12, "eval_dataset": make_data(), "train_dataloader_kwargs": {}}
        return train(trainer, **arguments, gradient_accumulation_steps=2, **kwargs)

    whole = results_of(run())
    states = sorted(Path("states").glob("update-*"))
    resumed = {state.name: results_of(run(resume_from=state)) for state in states[:4]}
    return {"whole": whole, "resumed": resumed}


def case_saved_in_the_background() -> Any:
    """States copied by the device during training: their contents, and the waits."""

    def run(folder: str, size: int, **kwargs: Any) -> Trainer:
        saving = SaveTrainingStateCallback(folder, save_every_n_steps=2, asynchronous=True, max_checkpoints=None)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.1)
        trainer = make_trainer([saving], model, optimizer=torch.optim.AdamW(model.parameters()), seed=4)
        return train(trainer, size=size, epochs=1, **kwargs)

    results = with_waits(lambda size: run(f"background-{size}", size))
    states = sorted(Path("background-20").glob("update-*"))
    resumed = [results_of(run("again", 20, resume_from=state)) for state in states]
    return results | {"whole": results_of(run("whole", 20)), "resumed": resumed}


class Scaled(nn.Module):
    """A loss with a learned scale and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        error = (outputs - targets).pow(2).mean()
        if self.training:
            self.mean.mul_(0.5).add_(error.detach(), alpha=0.5)
        return error * self.scale + self.mean


class WithCritic(Trainer):
    """Trains a second module, which is made on the CPU, by an optimizer of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.critic = nn.Linear(1, 1)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=0.1)

    def optimizer_step(self) -> None:
        super().optimizer_step()
        self.critic(torch.ones(2, 1, device=self.device)).pow(2).sum().backward()
        self.critic_optimizer.step()
        self.critic_optimizer.zero_grad()


def case_beside_the_model() -> Any:
    """A loss that learns, and a critic that a callback moves after its optimizer was restored."""

    def run(**kwargs: Any) -> Any:
        torch.manual_seed(0)
        saving = SaveTrainingStateCallback("beside", save_every_n_steps=1)
        callbacks = [MoveModulesToDeviceCallback, saving]
        trainer = make_trainer(callbacks, trainer_class=WithCritic, loss_func=Scaled(), seed=4)
        trainer.optimizer.add_param_group({"params": trainer.loss_func.parameters()})
        train(trainer, epochs=2, size=8, eval_dataset=make_data(), **kwargs)
        parts = {"loss": trainer.loss_func.state_dict(), "critic": trainer.critic.state_dict()}
        places = {tensor.device.type for part in parts.values() for tensor in part.values()}
        return on_host(parts), places, trainer.run_history.to_dict()

    whole = run()
    states = sorted(Path("beside").glob("update-*"))
    return {"whole": whole, "resumed": [run(resume_from=state) for state in states[:3]]}


def case_finding_settings() -> Any:
    trainer = make_trainer()
    before = on_host(trainer.model.state_dict())
    found = trainer.find_lr(make_data(40), per_device_batch_size=4, num_steps=20)
    diagnosis = trainer.diagnose(make_data(40), per_device_batch_size=4, num_steps=5)
    after = on_host(trainer.model.state_dict())
    return {
        "losses": found.losses,
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "steps": diagnosis.steps,
        "seconds": diagnosis.step,
    }


def case_timing() -> Any:
    timing = callbacks.TimingCallback(show=False)
    train(make_trainer([timing]), size=300, epochs=2, eval_dataset=make_data())  # some events are read in the epoch
    return timing.totals


def run(case: str) -> Any:
    """Run a case in its own folder, without its output."""
    before, output = os.getcwd(), io.StringIO()
    with tempfile.TemporaryDirectory() as workplace:
        os.chdir(workplace)
        try:
            with redirect_stdout(output), redirect_stderr(output):
                return globals()[f"case_{case}"]()
        finally:
            os.chdir(before)


def main(file: str) -> None:
    from tests import simulated_device

    global waits, copies
    waits, copies = simulated_device.waits, simulated_device.copies
    os.environ["ACCELERATE_TORCH_DEVICE"] = "sim"
    torch.set_num_threads(1)
    gc.freeze()  # what is imported
    results: dict[str, Any] = {}
    for name in [name.removeprefix("case_") for name in globals() if name.startswith("case_")]:
        try:
            results[name] = run(name), None
        except Exception:
            results[name] = None, traceback.format_exc()
    torch.save(results, file)


if __name__ == "__main__":
    main(sys.argv[1])
