"""An experiment: a trainer, datasets and arguments, as described in a file."""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import set_seed

from pytorch_accel_lite.callbacks import TrainerCallback, get_default_callbacks
from pytorch_accel_lite.checkpoint import folder_path, local_path, write_text
from pytorch_accel_lite.extension_tools.processes import is_library_frame
from pytorch_accel_lite.extensions.experiment.importing import full_name, import_path
from pytorch_accel_lite.extensions.experiment.overrides import apply_overrides
from pytorch_accel_lite.extensions.experiment.results import write_json
from pytorch_accel_lite.extensions.experiment.run_folders import folders_of, new_folder
from pytorch_accel_lite.extensions.experiment.signatures import TOOLS, Parser
from pytorch_accel_lite.extensions.experiment.yaml_files import (
    DIRECTIONS,
    RESOLVED,
    SETTING_RATES,
    Document,
    ExperimentError,
    dump_yaml,
    flat,
    load_yaml,
    read,
    was_raised_by_us,
)
from pytorch_accel_lite.extensions.metrics_file import MetricsFileCallback
from pytorch_accel_lite.trainer import Trainer
from pytorch_accel_lite.utils import result_of_first

#: Prefixes of arguments that name a file to read, such as ``initial_checkpoint``.
_INPUT_PREFIXES = ("initial_", "input_", "load_", "pretrained_", "resume_")


class Experiment:
    """A trainer, datasets and the arguments of ``train``, as described in a file. See ``from_file()``.

    Everything is checked when the file is read, but created only when it is first needed, so evaluating does not read
    the training data. With ``trainer.seed``, all generators are seeded with it before each part is created.

    Args:
        parser: the parser of the file
        tool: the command, one of ``TOOLS``, whose arguments the file has, too; ``None`` for an experiment that trains
        folder: the folder of the results; ``None`` for the one that the file names

    Attributes:
        config: the resolved contents of the file, including all defaults
        text: ``config`` as YAML, from which the same experiment can be read again
    """

    def __init__(self, parser: Parser, tool: str | None = None, folder: Path | None = None) -> None:
        self._parser = parser
        self._parsed = parser.parse()
        self.config = parser.to_config(self._parsed)
        self._resume_from = self.config["train"].get("resume_from")
        self._is_new = tool is None and not self.config.pop("overwrite") and self._resume_from is None
        if self._resume_from == "latest":  # "latest" is not a setting of the run itself
            self.config["train"]["resume_from"] = None
        self.text = dump_yaml(self.config)
        self._folder = folder
        self._claim: weakref.finalize[..., Any] | None = None
        self._datasets: dict[str, Any] = {}

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str] | None,
        overrides: Mapping[str, Any] | Sequence[str] = (),
        *,
        tool: str | None = None,
    ) -> Experiment:
        """Read an experiment from a YAML file. Modules beside the file can be imported from then on.

        Args:
            path: the file; or the folder of a run, whose resolved file is read and whose folder is used again; or
                ``None`` if everything is in ``overrides``
            overrides: values by key, such as ``{"optimizer.lr": 3e-4}``, or the arguments of a command line, such as
                ``["--optimizer.lr", "3e-4"]``
            tool: the command, if it is not ``train``, such as ``"find_lr"`` or ``"evaluate"``: the experiment then also
                has the arguments of that command, and uses the folder of the newest run

        Raises:
            ExperimentError: if anything is missing, unknown, or of the wrong type; names the file and line, or key
            ImportError: if jsonargparse is not installed (extra ``cli``)
        """
        parser = create_parser(path, overrides, tool)
        is_run = path is not None and parser.locate("output_dir").startswith(os.fspath(Path(path, RESOLVED)))
        return cls(parser, tool, Path(path) if path is not None and is_run else None)

    @cached_property
    def output_dir(self) -> Path:
        """Where the run writes its files. With several processes, access it on each.

        This is the ``output_dir`` of the file, or if another run has that folder already, a new folder beside it, such
        as ``runs/sine-run2``. A run that resumes or overwrites uses the folder of the newest run, or the folder of the
        state that it resumes from.
        """
        return Path(result_of_first(lambda: os.fspath(self._folder or self._find_folder())))

    def _find_folder(self) -> Path:
        base = folder_path("output_dir", self.config["output_dir"])
        runs, is_new = [*folders_of(base).values()], self._is_new
        if self._resume_from not in (None, "latest") and "://" not in str(self._resume_from):
            state = local_path("resume_from", self._resume_from).resolve()
            runs = [folder for folder in runs if state.is_relative_to(folder.resolve())]
            is_new = not runs
        if not is_new:
            return runs[-1] if runs else base
        folder = new_folder(base, self.text)
        # Training detaches this. The path is absolute because the program may have changed its working directory by
        # then.
        self._claim = weakref.finalize(self, _release_folder, folder.absolute())
        return folder

    # ------------------------------------------------------------------------------------------- parts

    @cached_property
    def trainer(self) -> Trainer:
        """The trainer, with the model, the loss function, the optimizer and the callbacks."""
        kind = self._parser.parts["trainer"]
        parameters = inspect.signature(kind).parameters
        arguments: dict[str, Any] = {}
        for name in ("model", "loss_func", "optimizer"):
            if name in self._parser.parts:
                # A function as loss_func is the loss itself; a class is instantiated.
                is_class = name == "loss_func" and inspect.isclass(self._parser.parts[name])
                arguments[name] = self._create_part(name) if name == "model" or is_class else self._factory(name)
            elif name in parameters and parameters[name].default is inspect.Parameter.empty:
                arguments[name] = None
        if "model" in arguments and arguments["model"] is None:
            raise ExperimentError("model: there is none. Name its class, or a function that returns it.")
        if "accelerator" in self._parser.parts:
            arguments["accelerator"] = self._build_accelerator()
        elif self._arguments_of("trainer.init_args").get("mixed_precision") is None:  # the trainer checks a given one
            _check_precision()
        trainer: Trainer = self._create_part("trainer", arguments | {"callbacks": self._callbacks()})
        return trainer

    @cached_property
    def train_dataset(self) -> Any:
        """The dataset of ``data.train``.

        Raises:
            ExperimentError: if there is none
        """
        return self.dataset("train")

    @cached_property
    def eval_dataset(self) -> Any:
        """The dataset of ``data.eval``, or ``None``."""
        return self.dataset("eval") if "data.eval" in self._parser.parts else None

    def dataset(self, name: str) -> Any:
        """Return the dataset of ``data.train``, ``data.eval`` or ``data.test``.

        Raises:
            ExperimentError: if the experiment has none
        """
        key = f"data.{name}"
        if key not in self._parser.parts:
            raise ExperimentError(f"{key}: there is none. Name a class, or a function, that returns a dataset.")
        if key not in self._datasets:
            self._datasets[key] = self._create_part(key)
        return self._datasets[key]

    @cached_property
    def train_arguments(self) -> dict[str, Any]:
        """The arguments of ``trainer.train`` besides the training data."""
        arguments = self._arguments_of("train") | {"eval_dataset": self.eval_dataset}
        if "scheduler" in self._parser.parts:
            arguments["create_scheduler_fn"] = self._factory("scheduler")
        return arguments

    @property
    def eval_arguments(self) -> dict[str, Any]:
        """The arguments of ``trainer.evaluate`` and ``trainer.predict`` besides the data."""
        arguments = self._arguments_of("train")
        shared = {name: arguments[name] for name in ("per_device_batch_size", "collate_fn")}
        return shared | {"dataloader_kwargs": arguments["eval_dataloader_kwargs"]}

    def tool_arguments(self, tool: str) -> dict[str, Any]:
        """Return the arguments of a tool such as ``trainer.find_lr`` besides the data, including those of ``train``."""
        if tool == "test":
            return self.eval_arguments | self._arguments_of(tool)
        parameters = inspect.signature(getattr(self.trainer, tool)).parameters
        shared = {name: value for name, value in self._arguments_of("train").items() if name in parameters}
        return shared | self._arguments_of(tool)

    def train(self) -> Trainer:
        """Train as described, and return the trainer.

        Raises:
            ExperimentError: if the folder of a run was read, but the run is neither to resume nor to be overwritten
        """
        if self._folder is not None and self._is_new:
            raise ExperimentError(
                f"{self._folder} is the folder of a run. Add --resume latest to continue it, or --overwrite to replace "
                f"it; or train {self._folder / RESOLVED}, in a new folder."
            )
        self.trainer.train(self.train_dataset, **self.train_arguments)
        return self.trainer

    def describe_unused_rate(self) -> str:
        """Return a message if the command line sets a learning rate that the scheduler replaces; or an empty text.

        The trainer itself warns of a rate that is not the optimizer's default. It cannot know that a default rate was
        set on purpose.
        """
        optimizer, scheduler = (self._parser.parts.get(key) for key in ("optimizer", "scheduler"))
        name = getattr(scheduler, "__name__", "")
        if name not in SETTING_RATES or not self._parser.overrides("optimizer.lr"):
            return ""
        rate = self._arguments_of("optimizer.init_args").get("lr")
        default = inspect.signature(optimizer).parameters.get("lr") if callable(optimizer) else None
        if (
            default is None
            or rate != default.default
            or rate == self._arguments_of("scheduler.init_args").get("max_lr")
        ):
            return ""
        return (
            f"--optimizer.lr {rate:g} has no effect: {name} sets rates of its own. Pass the rate that "
            "you want as --scheduler.max_lr, or train without it: --scheduler null."
        )

    # ---------------------------------------------------------------------------------- creating the parts

    @cached_property
    def _instances(self) -> Any:
        """The contents with nested classes instantiated, without callbacks."""
        contents = self._parsed.clone()
        del contents["callbacks"]  # callbacks are created later, as they need the folder of the run
        self._seed()
        return self._parser.instantiate(contents, _instantiate)

    def _arguments_of(self, key: str) -> dict[str, Any]:
        """Return the arguments under a key."""
        namespace = self._instances.get(key)
        return {} if namespace is None else dict(vars(namespace))

    def _seed(self) -> None:
        seed = (self.config["trainer"].get("init_args") or {}).get("seed")
        if seed is not None:
            set_seed(seed)

    def _create_part(self, key: str, further: Mapping[str, Any] | None = None) -> Any:
        arguments = self._arguments_of(f"{key}.init_args") | dict(further or {})
        self._seed()
        with _naming_part(self._parser.locate(key)):
            return self._parser.parts[key](**arguments)

    def _factory(self, key: str) -> Any:
        """Return the class or function that the trainer will call, with the arguments that differ from the defaults.

        Its errors name the part.
        """
        function = self._parser.parts[key]
        defaults = {name: value.default for name, value in inspect.signature(function).parameters.items()}
        arguments = self._arguments_of(f"{key}.init_args")
        changed = {name: value for name, value in arguments.items() if name not in defaults or value != defaults[name]}
        if key == "scheduler":
            changed = self._parser.with_placeholders(arguments, changed)
        if key == "loss_func":  # an error of the loss function is an error of a step
            return partial(function, **changed) if changed else function

        @wraps(function, updated=())
        def create(*args: Any, **kwargs: Any) -> Any:
            with _naming_part(self._parser.locate(key)):
                return function(*args, **kwargs)

        return partial(create, **changed) if changed else create

    def _build_accelerator(self) -> Any:
        create = self._factory("accelerator")
        arguments = create.keywords if isinstance(create, partial) else {}
        if "mixed_precision" not in arguments:
            _check_precision()
        is_launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
        on_cpus = is_launched and not torch.accelerator.is_available()  # Accelerate must be told to use CPUs
        return create(cpu=True) if on_cpus and "cpu" not in arguments else create()

    def _callbacks(self) -> list[Any]:
        """Return the default callbacks followed by those of the file, which replace defaults of the same kind."""
        contents = self._parsed.clone()
        for item in contents["callbacks"]:
            _move_outputs(import_path(Document(), "callbacks", item["class_path"]), item, self.output_dir)
        self._seed()
        only = type(contents)(callbacks=contents["callbacks"])
        listed: list[TrainerCallback] = list(self._parser.instantiate(only, _instantiate)["callbacks"])
        defaults = [kind for kind in get_default_callbacks() if not any(isinstance(item, kind) for item in listed)]
        if not any(isinstance(callback, MetricsFileCallback) for callback in listed):
            listed.append(MetricsFileCallback(self.output_dir / "metrics.jsonl"))
        return [*defaults, *listed, ExperimentRecord(self, self._claim)]


def create_parser(
    path: str | os.PathLike[str] | None, overrides: Mapping[str, Any] | Sequence[str] = (), tool: str | None = None
) -> Parser:
    """Read a file and its overrides, and return a parser for the classes and functions that it names."""
    file = None if path is None else Path(path, RESOLVED) if Path(path).is_dir() else Path(path)
    document = Document() if file is None else read(file)
    if file is not None:
        folder = str(file.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)  # as Python does for a script
        document.content.setdefault("output_dir", f"runs/{file.stem}")
    apply_overrides(document, overrides)
    return Parser(document, tool if tool in TOOLS else None)


def _release_folder(folder: Path) -> None:
    """Release a folder in which no run has begun, so that the next run can use it."""
    (folder / RESOLVED).unlink(missing_ok=True)
    with suppress(OSError):  # the folder is not empty
        folder.rmdir()


def _check_precision() -> None:
    """Refuse to take over the mixed precision of an earlier experiment: the precision of a process cannot change."""
    mode = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if is_initialized() and (existing := AcceleratorState().mixed_precision) != mode:
        raise ExperimentError(
            f"accelerator.mixed_precision: this process already computes in {existing}, because of an earlier "
            f"accelerator, and cannot change to {mode}. Give all experiments of a program the same, or start this one "
            "in a program of its own."
        )


def _move_outputs(kind: Any, item: Any, folder: Path) -> None:
    """Move the relative output paths of a callback, explicit or default, into a folder."""
    arguments = item.get("init_args") or {}
    for parameter in inspect.signature(kind).parameters.values():
        name, value = parameter.name, arguments.get(parameter.name)
        is_output = re.search(r"\bPath(Like)?\b", str(parameter.annotation)) and not name.startswith(_INPUT_PREFIXES)
        if is_output and isinstance(value, (str, os.PathLike)) and "://" not in str(value):
            arguments[name] = os.fspath(folder / local_path(name, value))


def _instantiate(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Create an instance of a nested class, or a callback."""
    with _naming_part(full_name(kind)):
        return kind(*args, **kwargs)


@contextmanager
def _naming_part(part: str) -> Iterator[None]:
    """Add to an error the part of the experiment that was being created.

    If the error comes from a library, the arguments are wrong and the message suffices. If it comes from the user's
    code, the error itself is raised again, with its traceback.
    """
    try:
        yield
    except ExperimentError:
        raise  # the error already names the part
    except Exception as error:
        if was_raised_by_us(error):
            raise ExperimentError(f"{part}: {error}") from error
        if all(is_library_frame(frame) for frame in traceback.extract_tb(error.__traceback__)):
            raise ExperimentError(f"{part}: {type(error).__name__}: {error}") from error
        error.add_note(f"This happened while {part} was made.")
        raise


class ExperimentRecord(TrainerCallback):
    """Writes the resolved file of an experiment into its ``output_dir``, and into each training state.

    A run that resumes prints what differs.

    Args:
        experiment: the experiment
        claim: releases the folder of a new run for the next one; detached when the run begins
    """

    affects_training = False

    def __init__(self, experiment: Experiment, claim: weakref.finalize[..., Any] | None = None) -> None:
        self._experiment = experiment
        self._claim = claim

    def __repr__(self) -> str:
        return f"ExperimentRecord({self._experiment.config['output_dir']!r})"

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Write the file, and for each metric whether greater values are better, if known."""
        experiment, folder = self._experiment, self._experiment.output_dir
        metrics = trainer.current_run.request.metrics
        directions = metrics.directions | {watched.name: watched.greater_is_better for watched in metrics.watched}
        known_directions = {name: direction for name, direction in directions.items() if direction is not None}
        trainer.ranks.run_together(lambda: write_text(folder / RESOLVED, experiment.text), only_first=True)
        trainer.ranks.run_together(lambda: write_json(folder / DIRECTIONS, known_directions, indent=2), only_first=True)
        if self._claim is not None:
            self._claim.detach()
        if folder.name != Path(experiment.config["output_dir"]).name and not trainer.progress.update:
            trainer.print(f"This run is in {folder}, as {experiment.config['output_dir']} has one already.")
        if unused := experiment.describe_unused_rate():
            trainer.print(unused)

    def state_dict(self) -> dict[str, Any]:
        """Return the resolved file, for a training state."""
        return {"experiment": self._experiment.text}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Print what differs between the experiment that was saved and this one."""
        before, now = dict(flat(load_yaml(state["experiment"]))), dict(flat(self._experiment.config))
        changed = [key for key in before | now if before.get(key) != now.get(key) and key != "train.resume_from"]
        lines = [f"{key}: {before.get(key)} -> {now.get(key)}" for key in changed]
        if lines:
            self._experiment.trainer.print("The experiment differs from the one that is resumed:", *lines, sep="\n  ")
