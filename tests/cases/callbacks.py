"""The shipped callbacks on several processes."""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from pytorch_accel_lite import Trainer, TrainerCallback, get_default_callbacks
from pytorch_accel_lite.callbacks import (
    EarlyStoppingCallback,
    ProgressTableCallback,
    RunLogCallback,
    SaveBestModelCallback,
    WSDCheckpointCallback,
)
from pytorch_accel_lite.schedulers import WSDLrScheduler
from tests.cases.common import IN_ORDER, global_batch, rank, shared_folder
from tests.launching import forget
from tests.shipped import RUN, SHIPPED, build
from tests.tasks import quiet_trainer, regression_data, small_model, weights


def shipped_callbacks() -> Any:
    """Each shipped callback in a run of its own: the weights, and what ranks but the first print."""
    warnings.filterwarnings("ignore", ".*cannot synchronise batch norm on 'cpu'")  # with several processes
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


def command_to_repeat() -> list[str]:
    """The command that a record of the run shows."""
    with shared_folder() as folder:
        quiet_trainer(small_model(), callbacks=[RunLogCallback(folder)]).train(regression_data(8), 1)
        command: list[str] = json.loads((folder / "run.json").read_text())["command"]
    return command


def default_callbacks() -> Any:
    """Everything on: what is printed is looked at by the test, through the output of the launch."""
    with shared_folder() as folder:
        model = small_model()
        best = SaveBestModelCallback(folder / "best.pt")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        others = [ProgressTableCallback(show_always=True), best, EarlyStoppingCallback(2, 0.0)]
        trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=[*get_default_callbacks(), *others])
        trainer.train(regression_data(20), 3, regression_data(9), per_device_batch_size=2)
        return {"weights": weights(model), "best": best.best_metric, "history": trainer.run_history.to_dict()}


def wsd() -> Any:
    """A run with a decay, one resumed from before it, and the same without a break: 8, 4 + 8 and 12 updates."""
    with shared_folder() as folder:

        def run(name: str, epochs: int, ratio: float, initial: Path | None = None) -> Any:
            model = small_model()
            trainer = quiet_trainer(
                model, callbacks=[WSDCheckpointCallback(folder / f"wsd {name}", initial_checkpoint=initial)]
            )
            create = WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=0, decay_phase_ratio=ratio)
            batch = {"per_device_batch_size": global_batch(6), "train_dataloader_kwargs": IN_ORDER}
            trainer.train(regression_data(24), epochs, create_scheduler_fn=create, **batch)
            return weights(model)

        run("first", 2, 0.5)
        continued = run("second", 2, 0.5, folder / "wsd first" / "checkpoint_4_wsd_pre_decay.pt")
        names = sorted(path.name for path in (folder / "wsd first").iterdir())
        return {"files": names, "continued": continued, "in one go": run("whole", 3, 1 / 3)}


class RecordsMae(TrainerCallback):
    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.run_history.update_metric("mae", 1.0)


def warnings_of_watched_metrics() -> list[str]:
    """What this rank says of a metric of unknown direction, and of another that may not be recorded."""
    with shared_folder() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        best = SaveBestModelCallback(folder / "best.pt", watch_metric="mae")
        trainer = quiet_trainer(small_model(), callbacks=[RecordsMae, best])
        trainer.train(regression_data(8), 1, regression_data(4))
        stopping = EarlyStoppingCallback(watch_metric="eval_loss_epochs")
        with suppress(ValueError):
            quiet_trainer(small_model(), callbacks=[RecordsMae, stopping]).train(
                regression_data(8), 1, regression_data(4)
            )
        return [str(warning.message) for warning in caught]


def warnings_of_unknown_events() -> list[str]:
    """What this rank says of a misspelt event."""
    misspelt = type("Misspelt", (TrainerCallback,), {"on_train_step" + "_ends": lambda self, trainer, **kwargs: None})
    with patch.dict(sys.modules), warnings.catch_warnings(record=True) as caught:
        forget("tests", "conftest")  # which fire events, too
        warnings.simplefilter("always")
        quiet_trainer(small_model(), callbacks=[misspelt]).train(regression_data(8), 1)
    return [str(warning.message) for warning in caught]
