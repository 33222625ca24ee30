"""Comparison of what trainers compute when resuming mid-epoch, evaluating on two processes and accumulating gradients.

    python -m benchmarks.comparison docs/results/comparison.md

Each trainer is set up as documented, and trains a tiny model on the CPU. Trainers that are not installed are omitted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PACKAGES = {
    "ours": "torch",
    "Lightning": "lightning",
    "transformers": "transformers",
    "Ignite": "pytorch-ignite",
    "pytorch-accelerated": "pytorch-accelerated",
}
QUESTIONS = {
    "resume": "20 shuffled updates with dropout, resumed from the state after update 5: largest difference of a weight",
    "processes": "7 samples evaluated on 2 processes in batches of 2: difference of the mean squared error",
    "window": "batches of 2, 2, 1 in windows of 2: largest difference of a weight from the batches of 4 and 1",
    "unequal": "batches of 2, 2, 2, 1 in windows of 2: largest difference of a weight from the batches of 4 and 3",
}
Answer = float | dict[str, float]
square = nn.functional.mse_loss


def samples(count: int) -> TensorDataset:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def new_model(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 3), *layers, nn.Linear(3, 1))


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_hand(count: int) -> torch.Tensor:
    """Train on batches of 4 samples, without accumulation."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(samples(count), 4):
        square(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


class Returning(nn.Module):
    """A model that returns its loss, like those of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.model(inputs)
        return {"loss": square(outputs, labels), "logits": outputs}


# ------------------------------------------------------------------------------------ accumulation


def accumulate_ours(count: int, package: str = "pytorch_accel_lite") -> nn.Module:
    trainer_class = __import__(package, fromlist=["Trainer"]).Trainer
    model = new_model()
    trainer = trainer_class(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[])
    kwargs = {"shuffle": False, "num_workers": 0}
    trainer.train(
        samples(count), 1, per_device_batch_size=2, gradient_accumulation_steps=2, train_dataloader_kwargs=kwargs
    )
    return model


def accumulate_ancestor(count: int) -> nn.Module:
    return accumulate_ours(count, "pytorch_accelerated")


def lightning_module(model: nn.Module, optimizer: Callable[..., Any]) -> Any:
    import lightning as L
    from torchmetrics import MeanSquaredError

    class Module(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.error = model, MeanSquaredError()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return square(self.model(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.error(self.model(batch[0]), batch[1])
            self.log("error", self.error)

        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters(), lr=0.1)

    return Module()


QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def accumulate_lightning(count: int) -> nn.Module:
    import lightning as L

    module = lightning_module(new_model(), torch.optim.SGD)
    trainer = L.Trainer(max_epochs=1, accumulate_grad_batches=2, enable_checkpointing=False, **QUIET)
    trainer.fit(module, DataLoader(samples(count), 2))
    return module.model  # type: ignore[no-any-return]


def transformers_trainer(model: nn.Module, count: int, optimizer: Any = None, **arguments: Any) -> Any:
    import transformers

    class InOrder(transformers.Trainer):  # type: ignore[misc, name-defined]
        def _get_train_sampler(self, *args: Any) -> Any:
            return None if optimizer else super()._get_train_sampler(*args)

    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0) if optimizer else None
    return InOrder(
        Returning(model),
        transformers.TrainingArguments(
            tempfile.mkdtemp(), max_grad_norm=0, report_to="none", disable_tqdm=True, use_cpu=True, **arguments
        ),
        train_dataset=[{"inputs": x, "labels": y} for x, y in samples(count)],
        eval_dataset=[{"inputs": x, "labels": y} for x, y in samples(count)],
        optimizers=(optimizer, constant),
        compute_metrics=lambda found: {"error": float(((found.predictions - found.label_ids) ** 2).mean())},
    )


def accumulate_transformers(count: int) -> nn.Module:
    model = new_model()
    transformers_trainer(
        model, count, torch.optim.SGD(model.parameters(), lr=0.1), num_train_epochs=1,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, save_strategy="no",
    ).train()  # fmt: skip
    return model


def accumulate_ignite(count: int) -> nn.Module:
    from ignite.engine import create_supervised_trainer

    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    create_supervised_trainer(model, optimizer, square, gradient_accumulation_steps=2).run(
        DataLoader(samples(count), 2), max_epochs=1
    )
    return model


# ------------------------------------------------------------------------------------ resuming


def resume_ours() -> tuple[nn.Module, nn.Module]:
    from pytorch_accel_lite import Trainer
    from pytorch_accel_lite.callbacks import SaveTrainingStateCallback

    folder = Path(tempfile.mkdtemp())

    def run(state: Path | None = None) -> nn.Module:
        model = new_model(nn.Dropout(0.5))
        saving = SaveTrainingStateCallback(folder, save_every_n_steps=5)
        trainer = Trainer(model, nn.MSELoss(), torch.optim.AdamW(model.parameters(), lr=0.1), [saving], seed=0)
        trainer.train(samples(40), 2, per_device_batch_size=4, resume_from=state)
        return model

    return run(), run(folder / "update-000000005")


def resume_ancestor() -> tuple[nn.Module, nn.Module]:
    from pytorch_accelerated import Trainer
    from pytorch_accelerated.callbacks import SaveTrainingStateCallback

    folder = tempfile.mkdtemp()

    def run(**kwargs: Any) -> nn.Module:
        model = new_model(nn.Dropout(0.5))
        saving = SaveTrainingStateCallback(folder, save_every_n_steps=5)
        trainer = Trainer(model, nn.MSELoss(), torch.optim.AdamW(model.parameters(), lr=0.1), callbacks=[saving])
        kwargs["train_dataloader_kwargs"] = {"num_workers": 0}
        trainer.train(samples(40), 2, per_device_batch_size=4, **kwargs)
        return model

    return run(), run(resume_from=f"{folder}/step_5")


def resume_lightning() -> tuple[nn.Module, nn.Module]:
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    folder = tempfile.mkdtemp()

    def run(state: Path | None = None) -> nn.Module:
        L.seed_everything(0, verbose=False)
        module = lightning_module(new_model(nn.Dropout(0.5)), torch.optim.AdamW)
        saving = ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1)
        trainer = L.Trainer(max_epochs=2, callbacks=[saving], **QUIET)
        trainer.fit(module, DataLoader(samples(40), 4, shuffle=True), ckpt_path=state)
        return module.model  # type: ignore[no-any-return]

    return run(), run(next(Path(folder).glob("*step=5.ckpt")))


def resume_transformers() -> tuple[nn.Module, nn.Module]:
    first, second = (
        transformers_trainer(
            new_model(nn.Dropout(0.5)), 40, num_train_epochs=2, per_device_train_batch_size=4, save_steps=5, seed=0
        )
        for _ in range(2)
    )
    first.train()
    second.train(resume_from_checkpoint=f"{first.args.output_dir}/checkpoint-5")
    return first.model, second.model


def resume_ignite() -> tuple[nn.Module, nn.Module]:
    from ignite.engine import DeterministicEngine, Events

    saved: dict[str, Any] = {}

    def run(resume: bool) -> nn.Module:
        model = new_model(nn.Dropout(0.5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(engine: Any, batch: Any) -> None:
            optimizer.zero_grad()
            square(model(batch[0]), batch[1]).backward()
            optimizer.step()

        engine = DeterministicEngine(step)
        parts = {"model": model, "optimizer": optimizer, "engine": engine}
        for name, part in parts.items() if resume else ():
            part.load_state_dict(saved[name])  # type: ignore[attr-defined]

        @engine.on(Events.ITERATION_COMPLETED(once=5))  # type: ignore[untyped-decorator]
        def save() -> None:
            saved.update({name: deepcopy(part.state_dict()) for name, part in parts.items()})  # type: ignore[attr-defined]

        torch.manual_seed(0)
        engine.run(DataLoader(samples(40), 4, shuffle=True), max_epochs=None if resume else 2)
        return model

    return run(False), run(True)


# ------------------------------------------------------------------------------------ two processes


def evaluate_ours() -> Answer:
    from pytorch_accel_lite import Trainer

    trainer = Trainer(new_model(), nn.MSELoss(), None, callbacks=[])
    return float(trainer.evaluate(samples(7), per_device_batch_size=2)["evaluation_loss"])


def evaluate_ancestor() -> Answer:
    from pytorch_accelerated import Trainer

    trainer = Trainer(new_model(), nn.MSELoss(), None, callbacks=[])
    trainer.evaluate(samples(7), per_device_batch_size=2, dataloader_kwargs={"num_workers": 0})
    return float(trainer.run_history.get_latest_metric("evaluation_loss"))


def evaluate_lightning() -> Answer:
    import lightning as L

    trainer = L.Trainer(devices=2, strategy="ddp", enable_checkpointing=False, **QUIET)
    module = lightning_module(new_model(), torch.optim.SGD)
    return float(trainer.validate(module, DataLoader(samples(7), 2), verbose=False)[0]["error"])


def evaluate_transformers() -> Answer:
    found = transformers_trainer(new_model(), 7, per_device_eval_batch_size=2).evaluate()
    return {"metric": found["eval_error"], "loss": found["eval_loss"]}


def evaluate_ignite() -> Answer:
    import ignite.distributed as idist
    from ignite.engine import create_supervised_evaluator
    from ignite.metrics import MeanSquaredError

    found = []

    def run(rank: int) -> None:
        model = idist.auto_model(new_model())
        evaluator = create_supervised_evaluator(model, {"error": MeanSquaredError()})
        found.append(evaluator.run(idist.auto_dataloader(samples(7), batch_size=4)).metrics["error"])

    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(run)
    return float(found[0])


# ------------------------------------------------------------------------------------ the table

SHORT = {"pytorch-accelerated": "ancestor"}


def answer(question: str, name: str) -> dict[str, float]:
    """Ask one trainer one question, in a process of its own."""
    suffix = SHORT.get(name, name.lower())
    if question == "resume":
        first, second = globals()[f"resume_{suffix}"]()
        return {"": (weights(first) - weights(second)).abs().max().item()}
    if question == "processes":
        found = globals()[f"evaluate_{suffix}"]()
        exact = square(new_model()(samples(7).tensors[0]), samples(7).tensors[1]).item()
        named = found if isinstance(found, dict) else {"": found}
        return {key: abs(value - exact) for key, value in named.items()}
    count = {"window": 5, "unequal": 7}[question]
    return {"": (weights(globals()[f"accumulate_{suffix}"](count)) - by_hand(count)).abs().max().item()}


def ask(question: str, name: str) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    launcher = launcher if question == "processes" and name != "Lightning" else []
    env = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, *launcher, "-m", "benchmarks.comparison", question, name, file.name]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} failed at {question}:\n{done.stderr[-3000:]}")
        found = json.loads(Path(file.name).read_text())
    words = {key: f"{value:.2g}" if value > 1e-6 else "equal" for key, value in found.items()}
    return ", ".join(f"{key} {word}".strip() for key, word in words.items())


def installed(package: str) -> str | None:
    try:
        return version(package)
    except ModuleNotFoundError:
        return None


def main(path: Path) -> None:
    names = [name for name, package in PACKAGES.items() if installed(package)]
    rows = [
        f"| {text} | " + " | ".join(ask(question, name) for name in names) + " |"
        for question, text in QUESTIONS.items()
    ]
    versions = ", ".join(f"{PACKAGES[name]} {installed(PACKAGES[name])}" for name in names)
    head = ["### What trainers compute", "", "| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    path.write_text("\n".join([*head, *rows, "", f'"Equal" is up to 1e-6. {versions}.', ""]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    elif (found := answer(sys.argv[1], sys.argv[2])) and os.environ.get("RANK", "0") == "0":
        Path(sys.argv[3]).write_text(json.dumps(found))
