"""The command line: ``python -m pytorch_accel_lite train experiment.yaml --train.num_epochs 5``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pytorch_accel_lite import __version__
from pytorch_accel_lite.callbacks import SaveBestModelCallback
from pytorch_accel_lite.checkpoint import DamagedStateError
from pytorch_accel_lite.extension_tools.data_and_batches import is_named
from pytorch_accel_lite.extensions.experiment.chosen_weights import find_weights, load_weights, predictions_of
from pytorch_accel_lite.extensions.experiment.experiment import Experiment, create_parser
from pytorch_accel_lite.extensions.experiment.results import write_json, write_predictions
from pytorch_accel_lite.extensions.experiment.run_comparison import compare_runs
from pytorch_accel_lite.extensions.experiment.run_folders import NoRunsError, natural_order
from pytorch_accel_lite.extensions.experiment.seed_comparison import compare_seeds
from pytorch_accel_lite.extensions.experiment.shell_completion import PROGRAM, SHELLS, completion_script
from pytorch_accel_lite.extensions.experiment.testing import run_tests
from pytorch_accel_lite.extensions.experiment.yaml_files import ExperimentError, was_raised_by_us
from pytorch_accel_lite.extensions.printed_states import print_contents
from pytorch_accel_lite.trainer import Trainer
from pytorch_accel_lite.utils import as_json, format_metric, record_error, suggest

_EPILOG = """\
Every value of the file can be overridden by an option, such as --train.num_epochs 5
or --callbacks+ EarlyStoppingCallback; "train FILE --help" lists them,
and "train FILE --help optimizer" explains the options of a group.
To begin, "train --print_config > experiment.yaml" writes a file to fill in."""
_TRAINER_COMMANDS = {
    "find_lr": "find a learning rate by a range test",
    "find_batch_size": "find the largest batch that fits into memory",
    "diagnose": "find out what limits the speed of training",
    "estimate_memory": "estimate the memory that training takes, on any number of devices",
}
_DATASETS = ["train", "eval", "test"]
#: What options of a command are called elsewhere.
_OPTIONS_ELSEWHERE = {
    **dict.fromkeys(("dataset", "split"), "on"),
    **dict.fromkeys(("checkpoint", "checkpoint_path", "ckpt", "ckpt_path"), "weights"),
}
_STARTING_FILE = """\
# python -m pytorch_accel_lite train THIS_FILE. Add --help to see what the keys mean.
# Name a class or function by its path, or if torch or this package has it,
# by its name alone. Remove keys that you leave at their defaults.
model: {class_path: my_module.MyModel, init_args: {width: 64}}
loss_func: CrossEntropyLoss
optimizer: {class_path: AdamW, init_args: {lr: 1e-3}}
scheduler: cosine
data:
  train: {class_path: my_module.load_data, init_args: {split: train}}
"""


def main(
    arguments: Sequence[str] | None = None, others: Mapping[str, argparse.ArgumentParser] = MappingProxyType({})
) -> int:
    """Run the command line.

    Args:
        arguments: the command line; by default that of this process
        others: the parsers of further commands by name, which the help and the completion list

    Returns:
        the exit code: 0 for success; 1 if a check has failed; 2 for an error in the file or the arguments; 130 after
        Ctrl-C. Codes 2 and 130 come without a traceback.
    """
    if os.getcwd() not in sys.path and "" not in sys.path:  # the console script does not add it
        sys.path.insert(0, os.getcwd())
    (parser, commands), options = _parser(others), argparse.Namespace(command=None)
    try:
        _check_command(sys.argv[1:] if arguments is None else arguments, commands)
        options, rest = parser.parse_known_args(arguments)
        if hasattr(options, "file"):
            return _run(options, rest)
        if options.command == "compare-seeds":
            options.overrides = rest
        elif rest:
            raise ExperimentError(f"{options.command} does not take {rest[0]}. See {options.command} --help.")
        options.run(options)
    except Exception as error:
        if not _is_user_error(error):
            raise
        if "TORCHELASTIC_RUN_ID" in os.environ:  # the launcher prints the traceback
            record_error(error)
        else:
            _print_error(f"error: {error}", *_notes_of(error))
        return 2
    except KeyboardInterrupt as interrupt:
        if notes := _notes_of(interrupt):
            advice = "call the command again" if options.command == "compare-seeds" else "add --resume latest"
            _print_error(*notes, f"On the command line, {advice}.")
        return 130
    return 0


def _check_command(arguments: Sequence[str], commands: Collection[str]) -> None:
    """Check the first argument, which is the command.

    Raises:
        ExperimentError: if there is no such command; suggests a similar one
    """
    command = next(iter(arguments), "-")
    if command in commands or command.startswith("-"):
        return
    hint = f" Did you mean: train {command}?" if Path(command).exists() else suggest(command, commands, 0.5)
    raise ExperimentError(f"{command!r} is not a command.{hint or ' There are: ' + ', '.join(commands) + '.'}")


def _check_options(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """Check that no option left for the experiment is a misspelled option of the command, or the value of one."""
    own = {"print_config", "weights", "on"} & vars(options).keys()
    if rest and "weights" in own and not rest[0].startswith("--"):
        option = "on" if rest[0] in _DATASETS else "weights"
        raise ExperimentError(f"{options.command} takes {rest[0]} as an option: --{option} {rest[0]}.")
    for word in rest:
        name = word.removeprefix("--").partition("=")[0]
        if word.startswith("--") and (hint := suggest(_OPTIONS_ELSEWHERE.get(name, name), own, 0.7)):
            raise ExperimentError(f"{options.command} does not take --{name}.{hint}")


def _notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _print_error(*lines: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(lines), file=sys.stderr)


def _is_user_error(error: Exception) -> bool:
    """Whether an error needs no traceback, because a check of this package raised it outside of a step."""
    if isinstance(error, ExperimentError) or "Install it with: pip" in str(error):
        return True
    return was_raised_by_us(error) and not any(note.startswith("In ") for note in _notes_of(error))


def _parser(others: Mapping[str, argparse.ArgumentParser]) -> tuple[argparse.ArgumentParser, Collection[str]]:
    """Return the parser of the command line, and the names of its commands."""
    parser = argparse.ArgumentParser(
        "python -m pytorch_accel_lite",
        description="Train, evaluate and predict as described in a file.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pytorch_accel_lite {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Callable[..., Any], text: str, file: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, add_help=not file, allow_abbrev=False)
        command.set_defaults(run=run, command=name, describe=command.format_help)
        if file:
            command.set_defaults(takes_experiment=True)
            command.add_argument(
                "file", nargs="?", metavar="FILE", help="an experiment in YAML, or the folder of a run"
            )
            text = "with FILE, its values and all options; with a group of options, what they mean"
            command.add_argument("-h", "--help", nargs="?", const="", metavar="GROUP", help=text)
        return command

    train = add("train", _train, "train the experiment in FILE")
    train.add_argument("--print_config", action="store_true", help="write a complete file, and end")
    weights_help = "by default best, or last without a SaveBestModelCallback"
    for command in (
        add("evaluate", _evaluate, "evaluate weights on a dataset"),
        add("predict", _predict, "write the outputs for a dataset"),
    ):
        command.add_argument("--weights", metavar="best|last|PATH", help=weights_help)
        command.add_argument("--on", choices=_DATASETS, help="the dataset, by its key under data")
    add("test", _test, "test every checkpoint by every inference setting by every dataset")
    add("check", _check, "try the program on a few batches and report mistakes; exit with 1 if there are any")
    for name, text in _TRAINER_COMMANDS.items():
        add(name, _tool, text)
    text = "compare the settings and best metrics of runs, and plot their curves on a page"
    _add_arguments_of_comparison(add("compare", _compare, text, file=False))
    text = "tell whether the difference between two experiments is real"
    _add_arguments_of_seeds(add("compare-seeds", _compare_seeds, text, file=False))
    state = add("inspect", _inspect, "show a training state, or list what is in a folder", file=False)
    state.add_argument("path", help="the directory or the URL of a state; or a folder of states, of a run, or of runs")
    text = "print a script that lets a shell complete commands and options"
    _add_arguments_of_completion(add("completion", partial(_completion, parser, commands.choices), text, file=False))
    for name, other in others.items():
        summary, *_ = (other.description or "").splitlines()
        text = summary[:1].lower() + summary[1:].removesuffix(".")
        commands.add_parser(name, help=text, parents=[other], add_help=False)
    return parser, commands.choices


def _add_arguments_of_comparison(command: argparse.ArgumentParser) -> None:
    command.add_argument("runs", nargs="+", help="folders of runs, or folders that contain runs")
    command.add_argument("--page", type=Path, metavar="PATH", help="by default comparison.html beside the runs")
    command.add_argument("--sort", metavar="METRIC", help="a metric, for the best run first")
    for name, which in (("maximize", "greater"), ("minimize", "smaller")):
        text = f"a metric of which {which} values are better, if the runs have no record of that"
        command.add_argument(f"--{name}", action="append", default=[], metavar="METRIC", help=text)


def _add_arguments_of_seeds(command: argparse.ArgumentParser) -> None:
    command.epilog = "All other options override values of both files, as in --train.num_epochs 3."
    command.add_argument("a", help="an experiment in YAML")
    command.add_argument("b", help="the experiment to compare it with")
    command.add_argument("--seeds", type=int, default=5, metavar="N", help="train both under seeds 0 to N - 1; 5")
    command.add_argument("--metric", default="eval_loss_epoch", help="name in the run history; eval_loss_epoch")
    command.add_argument("--confidence", type=float, default=0.95, help="confidence level of the intervals; 0.95")
    command.add_argument(
        "--processes", type=int, metavar="N", help="how many runs to train at the same time, each in a new process"
    )
    command.add_argument("--save_dir", metavar="PATH", help="folder of all runs; by default runs/A-and-B")


def _add_arguments_of_completion(command: argparse.ArgumentParser) -> None:
    command.epilog = f"""\
bash: {PROGRAM} completion bash > ~/.{PROGRAM}, and in ~/.bashrc:
      source ~/.{PROGRAM}
zsh:  {PROGRAM} completion zsh > DIR/_{PROGRAM}, where DIR is in your fpath"""
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_argument("shell", choices=SHELLS)
    text = "an experiment whose own options are completed, too"
    command.add_argument("experiment", nargs="?", metavar="FILE", help=text)


def _run(options: argparse.Namespace, rest: list[str]) -> int:
    """Run a command that has an experiment."""
    prints = getattr(options, "print_config", False)
    _check_options(options, rest)
    if options.help is not None:
        if options.file is None and options.help:  # train --help FILE
            options.file, options.help = options.help, ""
        if options.file is None:
            print(options.describe())
        else:
            print(create_parser(options.file, rest, options.command).help(options.file, options.help))
            if "weights" in options and not options.help:
                print(f"To read about --weights and --on: {options.command} --help")
        return 0
    if options.file is None and not prints:
        raise ExperimentError(
            f"{options.command} needs the file of an experiment: {options.command} experiment.yaml. To begin, write "
            "one with: train --print_config > experiment.yaml"
        )
    experiment = Experiment.from_file(options.file, rest, tool=None if options.command == "train" else options.command)
    if not prints:
        return int(options.run(experiment, options) or 0)
    print(("" if options.file else _STARTING_FILE) + experiment.text, end="")
    return 0


def _train(experiment: Experiment, options: argparse.Namespace) -> None:
    experiment.train().print(f"Everything is in {experiment.output_dir}")


def _evaluate(experiment: Experiment, options: argparse.Namespace) -> None:
    trainer, weights, name = _load(experiment, options, "eval")
    metrics = trainer.evaluate(experiment.dataset(name), **experiment.eval_arguments)
    metrics["weights"] = ", ".join(map(os.fspath, weights))
    path = experiment.output_dir / f"evaluation_{name}.json"
    trainer.ranks.run_together(lambda: write_json(path, as_json(metrics), indent=2), only_first=True)
    trainer.print(f"The metrics are in {path}")


def _predict(experiment: Experiment, options: argparse.Namespace) -> None:
    trainer, weights, name = _load(experiment, options, "test")
    dataset = experiment.dataset(name)
    if is_named(dataset):
        raise ExperimentError(
            f"data.{name} has several datasets: {', '.join(map(repr, dataset))}. predict takes one: name what returns "
            "it in data.test, and pass --on test."
        )
    directory = experiment.output_dir / "predictions" / name
    writer = predictions_of(trainer, weights, directory, _described(experiment))
    if not write_predictions(trainer, dataset, writer, **experiment.eval_arguments):
        trainer.print(f"All samples have been predicted before. Delete {directory} to predict them again.")
    trainer.print(f"The predictions are in {directory}: read_predictions({os.fspath(directory)!r}) returns them")


def _described(experiment: Experiment) -> dict[str, Any]:
    """Return the settings, besides the weights, on which results depend."""
    parts = ("model", "loss_func", "data", "trainer", "accelerator", "callbacks")
    reading = {name: experiment.config["train"].get(name) for name in ("collate_fn", "eval_dataloader_kwargs")}
    return {name: experiment.config.get(name) for name in parts} | reading


def _source(experiment: Experiment, options: argparse.Namespace, first: str) -> str:
    """Return the name of the dataset to evaluate: the requested one, or the first that exists."""
    data = experiment.config.get("data") or {}
    return getattr(options, "on", None) or next((name for name in (first, "test", "eval") if data.get(name)), first)


def _load(experiment: Experiment, options: argparse.Namespace, first: str) -> tuple[Trainer, list[Path], str]:
    """Return the trainer with the requested weights, the paths of the weights, and the name of the dataset to read."""
    trainer = experiment.trainer
    name = _source(experiment, options, first)
    experiment.dataset(name)
    saves_best = any(isinstance(callback, SaveBestModelCallback) for callback in trainer.callbacks)
    paths = find_weights(trainer, options.weights or ("best" if saves_best else "last"))
    load_weights(trainer, paths, experiment.output_dir / f"{options.weights}.pt")
    trainer.print(f"Loaded the weights in {', '.join(map(os.fspath, paths))}")
    return trainer, paths, name


def _tool(experiment: Experiment, options: argparse.Namespace) -> None:
    trainer = experiment.trainer
    arguments = experiment.tool_arguments(options.command)
    result = getattr(trainer, options.command)(experiment.train_dataset, **arguments)
    if options.command != "find_batch_size":  # find_batch_size() prints its own result
        trainer.print(result)
    if options.command == "find_lr":
        path = experiment.output_dir / "find_lr.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(ImportError):  # without matplotlib
            trainer.ranks.run_together(lambda: result.plot(path), only_first=True)
            trainer.print(f"The curve is in {path}")


def _check(experiment: Experiment, options: argparse.Namespace) -> int:
    arguments = experiment.tool_arguments("check") | experiment.train_arguments
    report = getattr(experiment.trainer, options.command)(experiment.train_dataset, **arguments)
    experiment.trainer.print(report)
    return int(not report.ok)


def _test(experiment: Experiment, options: argparse.Namespace) -> None:
    folder = experiment.output_dir / "tests"
    name = _source(experiment, options, "test")
    dataset = experiment.dataset(name)
    datasets = dataset if is_named(dataset) else {name: dataset}
    arguments = experiment.tool_arguments("test")
    arguments["depends_on"] = _described(experiment), arguments["depends_on"]
    for row in run_tests(experiment.trainer, datasets, save_dir=folder, **arguments):
        experiment.trainer.print(", ".join(f"{key} {format_metric(value)}" for key, value in row.items()))
    experiment.trainer.print(f"All results are in {folder}")


def _inspect(options: argparse.Namespace) -> None:
    try:
        print(compare_runs(options.path), end="\n\n")
    except (NoRunsError, FileNotFoundError):
        print_contents(options.path)
    else:
        with suppress(DamagedStateError):  # the folder has no states
            print_contents(options.path)


def _compare(options: argparse.Namespace) -> None:
    directions = {**dict.fromkeys(options.maximize, True), **dict.fromkeys(options.minimize, False)}
    comparison = compare_runs(sorted(options.runs, key=natural_order), directions=directions, sort_by=options.sort)
    folder = Path(os.path.commonpath([run.folder.resolve().parent for run in comparison.runs]))
    path = comparison.save(options.page or folder / "comparison.html")
    print(comparison)
    print(f"\nThe page with the curves is {os.path.relpath(path)}")


def _completion(
    parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser], options: argparse.Namespace
) -> None:
    print(completion_script(parser, commands, options.shell, options.experiment))


def _compare_seeds(options: argparse.Namespace) -> None:
    comparison = compare_seeds(
        options.a,
        options.b,
        seeds=options.seeds,
        metric=options.metric,
        overrides=options.overrides,
        confidence=options.confidence,
        processes=options.processes,
        save_dir=options.save_dir or Path("runs", f"{Path(options.a).stem}-and-{Path(options.b).stem}"),
    )
    if os.environ.get("RANK", "0") == "0":
        print(comparison)
