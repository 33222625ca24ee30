"""The shipped callbacks on several processes."""

from __future__ import annotations

import io
import os
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accel_lite import Trainer, get_default_callbacks
from pytorch_accel_lite.callbacks import EarlyStoppingCallback, ProgressTableCallback, SaveBestModelCallback
from tests.cases.common import rank, shared_folder
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
