"""Search for settings: trials of an experiment, of which those that do badly end early.

    python examples/search.py
    python examples/search.py my_space.yaml --trials 50 --output runs/my_search

When the program is killed, the same command continues, also the trial that was running.
The study is a database; each trial has a folder with all that its run left behind.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import optuna
from optuna.visualization.matplotlib import plot_slice
from torch import nn

from pytorch_accel_lite import NonFiniteLossError
from pytorch_accel_lite.experiment import (
    Experiment,
    OptunaPruningCallback,
    load_yaml,
    retry_killed_trials,
    suggest_overrides,
)

HERE = Path(__file__).parent


def create_model(width: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=HERE / "search.yaml")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--output", type=Path, default=Path("runs/search"))
    args = parser.parse_args()

    search = load_yaml(args.file.read_text())
    metric = search["metric"]

    def run_trial(trial: optuna.Trial) -> float:
        overrides: dict[str, Any] = search["overrides"] | {
            "train.resume_from": "latest",
            **suggest_overrides(trial, search["space"], args.output),
        }
        experiment = Experiment.from_file(
            args.file.parent / search["experiment"], overrides
        )
        pruning = OptunaPruningCallback(trial, metric)
        experiment.trainer.callback_handler.add_callback(pruning)
        history = experiment.train().run_history
        pruning.check_pruned()
        return float(history[metric][-1])

    args.output.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name="search",
        storage=f"sqlite:///{args.output / 'study.db'}",
        load_if_exists=True,
        direction=search["direction"],
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=2),
    )
    # With the same seed as before, a continued search would propose the same values.
    study.sampler = optuna.samplers.TPESampler(
        seed=len(study.trials), n_startup_trials=5
    )
    retry_killed_trials(study)
    ended = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    left = args.trials - len(study.get_trials(states=ended))
    # A trial whose loss diverges has failed, but not the search.
    study.optimize(run_trial, n_trials=max(left, 0), catch=NonFiniteLossError)
    plot_slice(study, target_name=metric)
    plt.gcf().set_size_inches(14, 4)
    plt.savefig(args.output / "search.png", bbox_inches="tight")

    states = [trial.state for trial in study.get_trials(states=ended)]
    print(f"\n{len(states)} trials, of which {states.count(ended[1])} were pruned")
    print(f"Best {metric}: {study.best_value:.4f} in trial {study.best_trial.number}")
    for name, value in study.best_params.items():
        print(
            f"  {name}: {value:.4g}"
            if isinstance(value, float)
            else f"  {name}: {value}"
        )
    print(f"Plot: {args.output / 'search.png'}")


if __name__ == "__main__":
    main()
