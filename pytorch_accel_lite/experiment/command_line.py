"""The command line: ``python -m pytorch_accel_lite train experiment.yaml --train.num_epochs 5``."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.base.environment import is_terminal
from pytorch_accel_lite.base.text import format_metric
from pytorch_accel_lite.callbacks import SaveBestModelCallback
from pytorch_accel_lite.callbacks.metrics_file import plain
from pytorch_accel_lite.checkpoint.__main__ import inspect
from pytorch_accel_lite.checkpoint.files import parse_location, replacing
from pytorch_accel_lite.distributed.launch import record_error
from pytorch_accel_lite.experiment.experiment import Experiment, create_parser
from pytorch_accel_lite.experiment.launching import LaunchError, launch_command
from pytorch_accel_lite.experiment.parsing import TOOLS
from pytorch_accel_lite.experiment.run_comparison import compare_runs
from pytorch_accel_lite.experiment.run_folders import natural_order
from pytorch_accel_lite.experiment.starting import starting_file
from pytorch_accel_lite.experiment.tested_weights import find_weights, load_weights, predictions_of
from pytorch_accel_lite.experiment.testing import run_tests
from pytorch_accel_lite.experiment.yaml_files import ExperimentError, is_ours

if TYPE_CHECKING:
    from pytorch_accel_lite.experiment.experiment import Experiment

_DESCRIPTION = "Train, evaluate and predict as a file describes it."
_EPILOG = """\
Every value of the file can be overridden by an option, such as --optimizer.lr 3e-4
or --callbacks+ EarlyStoppingCallback; "train FILE --help" lists them with their values.
To begin, "train --print_config > experiment.yaml" writes a file to fill in."""
_OF_TRAINER = {
    "find_lr": "find a learning rate by a range test",
    "find_batch_size": "find the largest batch that fits into memory",
    "diagnose": "find out what limits the speed of training",
    "estimate_memory": "estimate the memory that training takes, on any number of devices",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    :param arguments: by default those of this process
    :return: the exit code: 0, or 2 for what is wrong in the file or in the arguments, without a traceback
    """
    if os.getcwd() not in sys.path and "" not in sys.path:  # the console script does not add it
        sys.path.insert(0, os.getcwd())
    given = sys.argv[1:] if arguments is None else arguments
    options, rest = _parser().parse_known_args(given)
    try:
        _check_order(options, given, rest)
        if _starts_processes(options):
            return _launch(options, rest)
        return int(options.run(options, rest) or 0)
    except Exception as error:
        if not _is_for_users(error):
            raise
        if "TORCHELASTIC_RUN_ID" in os.environ:  # the launcher shows it
            record_error(error)
        else:
            print(_wrapped(f"error: {error}"), file=sys.stderr)
        return 2


def _check_order(options: argparse.Namespace, given: Sequence[str], rest: list[str]) -> None:
    """Refuse a file after options of the experiment, whose values would be taken for the file."""
    file = getattr(options, "file", None)
    if file is not None and any(token in rest and token.startswith("-") for token in given[: given.index(file)]):
        raise ExperimentError(
            f"Write the file first, then its options: {options.command} experiment.yaml {rest[0]} ..."
        )


def _starts_processes(options: argparse.Namespace) -> bool:
    requested = [getattr(options, name, None) for name in ("processes", "devices")]
    is_asked = any(value is not None for value in requested) or bool(getattr(options, "restarts", 0))
    return is_asked and not options.help and not getattr(options, "print_config", False)


def _launch(options: argparse.Namespace, rest: list[str]) -> int:
    """Run the command on several processes, after its file has been checked once."""
    _read(options, rest)
    own = [options.command, options.file]
    for name in ("weights", "on"):
        if getattr(options, name, None) is not None:
            own += [f"--{name}", getattr(options, name)]
    try:
        launch_command(["-m", "pytorch_accel_lite", *own, *rest], options.processes, options.devices, options.restarts)
    except LaunchError as error:
        print(_wrapped(f"error: {error.reason}") if error.exit_code == 2 and error.reason else error, file=sys.stderr)
        return error.exit_code if error.exit_code > 0 else 128 - error.exit_code
    return 0


def _wrapped(text: str) -> str:
    """Wrap a message to the width of the terminal that shows it."""
    if not is_terminal(sys.stderr):
        return text
    columns = shutil.get_terminal_size().columns
    lines = text.splitlines()
    return "\n".join(textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False) for line in lines)


def _is_for_users(error: Exception) -> bool:
    """Whether the message of an error says all: it is ours, and not from within a step."""
    if isinstance(error, ExperimentError) or "Install it with: pip" in str(error):
        return True
    return is_ours(error) and not hasattr(error, "__notes__")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m pytorch_accel_lite",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Callable[..., Any], text: str, file: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, add_help=not file, allow_abbrev=False)
        command.set_defaults(run=run, command=name, describe=command.format_help)
        if file:
            command.add_argument("file", nargs="?", metavar="FILE", help="the experiment, in YAML")
            command.add_argument("--processes", type=int, metavar="N", help="processes to start on this machine")
            command.add_argument("--devices", metavar="idle|0,2", help="on these GPUs, one for each process")
            command.add_argument(
                "--restarts", type=int, default=0, metavar="N", help="after failures; add --resume latest"
            )
            command.add_argument("-h", "--help", action="store_true", help="with FILE, also lists what it can contain")
        return command

    train = add("train", _train, "train as the file says")
    train.add_argument("--print_config", action="store_true", help="write a complete file with comments, and end")
    for name, text in (("evaluate", "evaluate weights on a dataset"), ("predict", "write the outputs for a dataset")):
        command = add(name, _evaluate if name == "evaluate" else _predict, text)
        command.add_argument(
            "--weights", metavar="best|last|PATH", help="by default best, or last without a SaveBestModelCallback"
        )
        command.add_argument("--on", choices=["train", "eval", "test"], help="the dataset, one of those under data")
    add("test", _test, "test every checkpoint by every inference setting by every dataset")
    for name, text in _OF_TRAINER.items():
        add(name, _tool, text)
    compare = add("compare", _compare, "compare runs: what differs, best metrics, curves on a page", file=False)
    compare.add_argument("runs", nargs="+", help="folders of runs, or folders that contain some")
    compare.add_argument("--page", type=Path, metavar="PATH", help="by default comparison.html beside the runs")
    compare.add_argument("--sort", metavar="NAME", help="a metric, for the best run first, or a setting")
    for name, which in (("maximize", "greater"), ("minimize", "smaller")):
        text = f"a metric of which {which} values are better, if the runs do not tell"
        compare.add_argument(f"--{name}", action="append", default=[], metavar="METRIC", help=text)
    state = add("inspect", _inspect, "show what a training state contains", file=False)
    state.add_argument("state", type=parse_location, help="the directory or the URL of the state")
    return parser


def _read(options: argparse.Namespace, rest: list[str]) -> Experiment | None:
    """Read the experiment; ``None`` if only its help or its contents were asked for, and have been printed."""
    if options.help:
        _print_help(options)
        return None
    if getattr(options, "print_config", False):
        print(starting_file(options.file, rest), end="")
        return None
    if options.file is None:
        raise ExperimentError(
            f"{options.command} needs the file of an experiment: {options.command} experiment.yaml. To begin, write "
            "one with: train --print_config > experiment.yaml"
        )
    return Experiment.from_file(options.file, rest, tool=options.command if options.command in TOOLS else None)


def _print_help(options: argparse.Namespace) -> None:
    """Print the options of a command, and those of the experiment if there is one, with its values."""
    print(options.describe())
    if options.file is not None:
        print(create_parser(options.file).help())


def _train(options: argparse.Namespace, rest: list[str]) -> None:
    experiment = _read(options, rest)
    if experiment is not None:
        trainer = experiment.train()
        trainer.print(f"Everything is in {experiment.output_dir}")


def _evaluate(options: argparse.Namespace, rest: list[str]) -> None:
    experiment = _read(options, rest)
    if experiment is None:
        return
    trainer, weights, dataset, arguments = _load(experiment, options, "eval")
    metrics = trainer.evaluate(dataset, **arguments) | {"weights": os.fspath(weights)}
    path = experiment.output_dir / f"evaluation_{_source(experiment, options, 'eval')}.json"
    trainer.ranks.run_together(lambda: _write_json(path, metrics), only_first=True)
    trainer.print(f"The metrics are in {path}")


def _predict(options: argparse.Namespace, rest: list[str]) -> None:
    experiment = _read(options, rest)
    if experiment is None:
        return
    trainer, weights, dataset, arguments = _load(experiment, options, "test")
    directory = experiment.output_dir / "predictions" / _source(experiment, options, "test")
    trainer.callback_handler.add_callback(predictions_of(trainer, weights, directory, **_described(experiment)))
    if not sum(1 for _ in trainer.predict_iter(dataset, **arguments)):
        trainer.print(f"All samples have been predicted before. Delete {directory} to predict them again.")
    trainer.print(f"The predictions are in {directory}: read_predictions({os.fspath(directory)!r}) returns them")


def _described(experiment: Experiment) -> dict[str, Any]:
    """Return what results depend on besides the weights."""
    parts = ("model", "loss_func", "data", "trainer", "accelerator", "callbacks")
    reading = {name: experiment.config["train"].get(name) for name in ("collate_fn", "eval_dataloader_kwargs")}
    return {name: experiment.config.get(name) for name in parts} | reading


def _source(experiment: Experiment, options: argparse.Namespace, first: str) -> str:
    """Return the name of the dataset to evaluate: the one asked for, or else the first that there is."""
    data = experiment.config.get("data") or {}
    return getattr(options, "on", None) or next((name for name in (first, "test", "eval") if data.get(name)), first)


def _load(experiment: Experiment, options: argparse.Namespace, first: str) -> tuple[Any, Path, Any, dict[str, Any]]:
    """Return the trainer with the weights asked for, their path, the dataset, and the arguments to read it with."""
    trainer = experiment.trainer
    dataset = experiment.dataset(_source(experiment, options, first))
    weights = find_weights(trainer, options.weights or _best_or_last(trainer))
    load_weights(trainer, weights)
    trainer.print(f"Loaded the weights in {weights}")
    return trainer, weights, dataset, experiment.eval_arguments


def _best_or_last(trainer: Any) -> str:
    return "best" if any(isinstance(callback, SaveBestModelCallback) for callback in trainer.callbacks) else "last"


def _write_json(path: Path, metrics: dict[str, Any]) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({name: plain(value) for name, value in metrics.items()}, indent=2) + "\n")


def _tool(options: argparse.Namespace, rest: list[str]) -> None:
    experiment = _read(options, rest)
    if experiment is None:
        return
    found = getattr(experiment.trainer, options.command)(
        experiment.train_dataset, **experiment.tool_arguments(options.command)
    )
    if options.command == "find_lr":
        path = experiment.output_dir / "find_lr.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            experiment.trainer.ranks.run_together(lambda: found.plot(path), only_first=True)
        except ImportError:  # without matplotlib
            return
        experiment.trainer.print(f"The curve is in {path}")


def _test(options: argparse.Namespace, rest: list[str]) -> None:
    experiment = _read(options, rest)
    if experiment is None:
        return
    folder = experiment.output_dir / "tests"
    name = _source(experiment, options, "test")
    dataset = experiment.dataset(name)
    datasets = dataset if isinstance(dataset, dict) else {name: dataset}
    arguments = experiment.tool_arguments("test")
    arguments["depends_on"] = _described(experiment), arguments["depends_on"]
    rows = run_tests(experiment.trainer, datasets, save_dir=folder, **arguments)
    for row in rows:
        experiment.trainer.print(", ".join(f"{key} {format_metric(value)}" for key, value in row.items()))
    experiment.trainer.print(f"Everything is in {folder}; results.md and results.csv have a row for each combination")


def _inspect(options: argparse.Namespace, rest: list[str]) -> None:
    if rest:
        raise ExperimentError(f"inspect takes only the directory of a training state, not {' '.join(rest)}.")
    inspect(options.state)


def _compare(options: argparse.Namespace, rest: list[str]) -> None:
    if rest:
        raise ExperimentError(f"compare does not have the option {rest[0]}. See compare --help.")
    directions = dict.fromkeys(options.maximize, True) | dict.fromkeys(options.minimize, False)
    found = compare_runs(sorted(options.runs, key=natural_order), directions=directions, sort_by=options.sort)
    beside = Path(os.path.commonpath([run.folder.resolve().parent for run in found.runs]))
    path = found.save(options.page or beside / "comparison.html")
    print(found)
    print(f"\nThe page with the curves is {os.path.relpath(path)}")
