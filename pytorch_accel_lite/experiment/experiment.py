"""An experiment: what a file says, as a trainer, datasets and arguments."""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import Any

import yaml
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import set_seed

from pytorch_accel_lite.base.devices import launched_on_cpus
from pytorch_accel_lite.base.inspection import is_ours as is_of_package
from pytorch_accel_lite.callbacks import MetricsFileCallback, TrainerCallback, get_default_callbacks
from pytorch_accel_lite.callbacks.hang_watch import is_library
from pytorch_accel_lite.checkpoint.files import parse_location, replacing
from pytorch_accel_lite.experiment.expressions import replace_expressions
from pytorch_accel_lite.experiment.importing import full_name, import_path
from pytorch_accel_lite.experiment.overriding import nested, spelt_out, without_given
from pytorch_accel_lite.experiment.parsing import Parser
from pytorch_accel_lite.experiment.recording import ExperimentRecord
from pytorch_accel_lite.experiment.yaml_files import Document, ExperimentError, is_ours, read
from pytorch_accel_lite.trainer import Trainer

#: How arguments begin that name a file to read, such as ``initial_checkpoint``.
_READ = ("initial_", "input_", "load_", "pretrained_", "resume_")
#: The schedulers that replace the optimizer's learning rate, and the argument with theirs.
_OWN_RATES = {"OneCycleLR": "max_lr", "CyclicLR": "base_lr"}


class Experiment:
    """A trainer, datasets and the arguments of ``train``, as described in a file. See :meth:`from_file`.

    Everything is checked when the file is read, but made only when it is first needed, so evaluating does not read the
    training data. With ``trainer.seed``, all generators are seeded with it before each part is made.

    :ivar config: the resolved contents of the file: what was given, and the defaults of everything else
    :ivar text: the same as YAML, from which the same experiment can be read again
    :ivar output_dir: where the run writes its files
    """

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._parsed = parser.parse()
        self.text: str = parser.dump(self._parsed)
        self.config: dict[str, Any] = yaml.safe_load(self.text)
        self.output_dir = Path(self.config["output_dir"])

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str] | None,
        overrides: Mapping[str, Any] | Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
        tool: str | None = None,
    ) -> Experiment:
        """Read an experiment from a YAML file. Modules beside the file can be imported from then on.

        :param path: the file; ``None`` if everything is in ``overrides``
        :param overrides: values by key, such as ``{"optimizer.lr": 3e-4}``, or the arguments of a command line, such
            as ``["--optimizer.lr", "3e-4"]``
        :param environment: variables that override the file, but not ``overrides``, such as
            ``PYTORCH_ACCEL_LITE_OPTIMIZER__LR``; by default those of this process
        :param tool: ``"find_lr"``, ``"find_batch_size"``, ``"diagnose"``, ``"estimate_memory"`` or ``"test"`` if its
            arguments are needed too
        :raises ExperimentError: if anything is missing, unknown, or of the wrong type; names the file and line, or key
        :raises ImportError: if jsonargparse is not installed (extra ``cli``)
        """
        return cls(create_parser(path, overrides, environment, tool))

    # ------------------------------------------------------------------------------------------- parts

    @cached_property
    def trainer(self) -> Trainer:
        """The trainer, with the model, the loss function, the optimizer and the callbacks."""
        parameters = inspect.signature(self._parser.parts["trainer"]).parameters
        made: dict[str, Any] = {}
        for name, make in (("model", self._make), ("loss_func", self._make_loss), ("optimizer", self._factory)):
            if self._is_given(name):
                made[name] = make(name)
            elif name in parameters and parameters[name].default is inspect.Parameter.empty:
                made[name] = None
        if "model" in made and made["model"] is None:
            raise ExperimentError("model: there is none. Name its class, or a function that returns it.")
        if self._is_given("accelerator"):
            made["accelerator"] = self._make_accelerator()
        elif is_of_package(getattr(self._parser.parts["trainer"], "_create_accelerator", None)):
            _check_precision()
        trainer: Trainer = self._make("trainer", made | {"callbacks": self._callbacks()})
        return trainer

    @cached_property
    def train_dataset(self) -> Any:
        """The dataset of ``data.train``.

        :raises ExperimentError: if there is none
        """
        return self._make_dataset("train")

    @cached_property
    def eval_dataset(self) -> Any:
        """The dataset of ``data.eval``, or ``None``."""
        return self._make_dataset("eval") if self._is_given("data.eval") else None

    @cached_property
    def test_dataset(self) -> Any:
        """The dataset of ``data.test``, or ``None``."""
        return self._make_dataset("test") if self._is_given("data.test") else None

    def dataset(self, name: str) -> Any:
        """Return the dataset of ``data.train``, ``data.eval`` or ``data.test``.

        :raises ExperimentError: if the experiment has none
        """
        found = getattr(self, f"{name}_dataset")
        return self._make_dataset(name) if found is None else found  # the former says what is missing

    def _make_dataset(self, name: str) -> Any:
        if not self._is_given(f"data.{name}"):
            raise ExperimentError(f"data.{name}: there is none. Name a class, or a function, that returns a dataset.")
        return self._make(f"data.{name}")

    @cached_property
    def train_arguments(self) -> dict[str, Any]:
        """The arguments of ``trainer.train`` besides the training data."""
        arguments = _arguments_in(self._instances["train"]) | {"eval_dataset": self.eval_dataset}
        if self._is_given("scheduler"):
            arguments["create_scheduler_fn"] = self._factory("scheduler")
        return arguments

    @property
    def eval_arguments(self) -> dict[str, Any]:
        """The arguments of ``trainer.evaluate`` and ``trainer.predict`` besides the data."""
        given = self._instances["train"]
        shared = {name: given[name] for name in ("per_device_batch_size", "collate_fn")}
        return shared | {"dataloader_kwargs": given["eval_dataloader_kwargs"]}

    def tool_arguments(self, tool: str) -> dict[str, Any]:
        """Return the arguments of ``trainer.find_lr`` and the like besides the data: some of ``train``, and its own."""
        if tool == "test":
            return self.eval_arguments | _arguments_in(self._instances[tool])
        given = _arguments_in(self._instances["train"])
        taken = inspect.signature(getattr(self.trainer, tool)).parameters
        return {name: given[name] for name in taken if name in given} | _arguments_in(self._instances[tool])

    def train(self) -> Trainer:
        """Train as described, and return the trainer."""
        trainer = self.trainer
        trainer.train(self.train_dataset, **self.train_arguments)
        return trainer

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the resolved contents to a file, atomically."""
        with replacing(Path(path)) as temporary:
            temporary.write_text(self.text)

    # ------------------------------------------------------------------------------------ making the parts

    def _is_given(self, key: str) -> bool:
        return key in self._parser.parts

    @cached_property
    def _instances(self) -> Any:
        """The contents with objects in place of nested classes and their arguments, and of callbacks."""
        contents = self._parsed.clone()
        for item in contents["callbacks"]:
            _place_files(import_path(Document(), "callbacks", item["class_path"]), item, self.output_dir)
        self._seed()
        return self._parser.instantiate(contents, _instantiate)

    def _seed(self) -> None:
        seed = (self.config["trainer"].get("init_args") or {}).get("seed")
        if seed is not None:
            set_seed(seed)

    def _make(self, key: str, further: Mapping[str, Any] | None = None) -> Any:
        arguments = _arguments_in(self._instances.get(f"{key}.init_args")) | dict(further or {})
        self._seed()
        with _naming(self._parser.place(key)):
            return self._parser.parts[key](**arguments)

    def _partial(self, key: str) -> Any:
        """Return what the trainer will call: a class or a function, with the arguments that are not its defaults."""
        made = self._parser.parts[key]
        known = inspect.signature(made).parameters
        given = _arguments_in(self._instances.get(f"{key}.init_args"))
        given = {name: value for name, value in given.items() if name not in known or value != known[name].default}
        if key == "scheduler":
            self._check_rate(given)
            place = self._parser.place
            given = {name: replace_expressions(given[name], place(f"{key}.init_args.{name}")) for name in given}
        return partial(made, **given) if given else made

    def _factory(self, key: str) -> Any:
        """Return what the trainer will call to make a part, such that an error names the part."""
        create = self._partial(key)
        made = create.func if isinstance(create, partial) else create

        @wraps(made, updated=())
        def make(*args: Any, **kwargs: Any) -> Any:
            with _naming(self._parser.place(key)):
                return made(*args, **kwargs)

        return partial(make, *create.args, **create.keywords) if isinstance(create, partial) else make

    def _make_accelerator(self) -> Any:
        create = self._partial("accelerator")
        given = create.keywords if isinstance(create, partial) else {}
        if "mixed_precision" not in given:
            _check_precision()
        with _naming(self._parser.place("accelerator")):
            return create() if "cpu" in given or not launched_on_cpus() else create(cpu=True)

    def _make_loss(self, key: str) -> Any:
        """Return an instance of a class; or a function itself, which is called with outputs and targets."""
        return self._make(key) if inspect.isclass(self._parser.parts[key]) else self._partial(key)

    def _check_rate(self, schedule: Mapping[str, Any]) -> None:
        """Warn of a learning rate of the optimizer that the scheduler replaces by its own."""
        name = self._parser.parts["scheduler"].__name__
        rate = _arguments_in(self._instances.get("optimizer.init_args")).get("lr")
        used = schedule.get(_OWN_RATES.get(name, ""), rate)
        if rate not in (None, used):
            warnings.warn(
                f"optimizer.lr={rate} has no effect, as {name} sets the learning rates: from scheduler."
                f"{_OWN_RATES[name]}={used}. Change that instead, or both.",
                stacklevel=2,
            )

    def _callbacks(self) -> list[Any]:
        """Return the callbacks of the file after the default ones, except defaults of which the file has its own."""
        own: list[TrainerCallback] = list(self._instances["callbacks"])
        default = [kind for kind in get_default_callbacks() if not any(isinstance(callback, kind) for callback in own)]
        if not any(isinstance(callback, MetricsFileCallback) for callback in own):
            own.append(MetricsFileCallback(self.output_dir / "metrics.jsonl"))
        return [*default, *own, ExperimentRecord(self)]


def create_parser(
    path: str | os.PathLike[str] | None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    tool: str | None = None,
) -> Parser:
    """Read a file and what overrides it, and return a parser for what it names."""
    document = Document() if path is None else read(Path(path))
    environment = os.environ if environment is None else environment
    if path is not None:
        folder = str(Path(path).resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)  # as Python does for a script
        document.content.setdefault("output_dir", f"runs/{Path(path).stem}")
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            full = spelt_out(key)
            document.update(nested(full, value), {full: "overrides"})
            environment = without_given(environment, full, value)
        overrides = ()
    return Parser(document, environment, overrides, tool)


def _arguments_in(namespace: Any) -> dict[str, Any]:
    """Return the arguments in a namespace of the parser's."""
    return {} if namespace is None else dict(vars(namespace))


def _check_precision() -> None:
    """Refuse to take over the mixed precision of an earlier experiment, as that of a process cannot change."""
    given = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if is_initialized() and (found := AcceleratorState().mixed_precision) != given:
        raise ExperimentError(
            f"accelerator.mixed_precision: this process already computes in {found}, because of an earlier "
            f"accelerator, and cannot change to {given}. Give all experiments of a program the same, or start this one "
            "in a program of its own."
        )


def _place_files(kind: Any, item: Any, folder: Path) -> None:
    """Let a callback write into a folder: its relative paths, given or by default, are meant relative to it.

    Those of files that it reads, by their names, stay as they are.
    """
    arguments = item.get("init_args") or {}
    for parameter in inspect.signature(kind).parameters.values():
        value = arguments.get(parameter.name)
        is_path = re.search(r"\bPath(Like)?\b", str(parameter.annotation))
        path = parse_location(value) if isinstance(value, (str, os.PathLike)) else None
        if is_path and isinstance(path, Path) and not parameter.name.startswith(_READ):  # no URL
            arguments[parameter.name] = os.fspath(folder / path)


def _instantiate(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Create an instance of a nested class, or a callback."""
    with _naming(full_name(kind)):
        return kind(*args, **kwargs)


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Add to an error the part of the experiment that was being made.

    Where only libraries took part, its arguments are at fault, and its message says all; not in the user's own code.
    """
    try:
        yield
    except ExperimentError:
        raise  # has been named
    except Exception as error:
        if is_ours(error):
            raise ExperimentError(f"{place}: {error}") from error
        if all(is_library(frame) for frame in traceback.extract_tb(error.__traceback__)):
            raise ExperimentError(f"{place}: {type(error).__name__}: {error}") from error
        note = f"This happened while {place} was made."
        vars(error).setdefault("__notes__", []).append(note)  # add_note, which needs Python 3.11
        raise
