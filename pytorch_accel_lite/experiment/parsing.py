"""Checking an experiment's contents against the signatures of what they name, by a parser made for them."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from pytorch_accel_lite.base.environment import import_extra
from pytorch_accel_lite.base.events import TrainerCallback
from pytorch_accel_lite.base.other_libraries import suggest
from pytorch_accel_lite.experiment.error_texts import UNWRITABLE, explain, tidy_comments, tidy_help, without_unwritable
from pytorch_accel_lite.experiment.expressions import Expression
from pytorch_accel_lite.experiment.importing import full_name, import_path
from pytorch_accel_lite.experiment.kinds import check_kinds
from pytorch_accel_lite.experiment.overriding import (
    dig,
    from_environment,
    override_parts,
    unknown_variables,
    variable_of,
)
from pytorch_accel_lite.experiment.signatures import add_part, takes_anything, untyped_and_required
from pytorch_accel_lite.experiment.testing import run_tests
from pytorch_accel_lite.experiment.yaml_files import PARTS, Document, ExperimentError, dump_yaml, short
from pytorch_accel_lite.trainer import Trainer

#: Commands with arguments of their own beside some of those of ``train``: methods of the trainer, and ``run_tests``.
TOOLS = ("find_lr", "find_batch_size", "diagnose", "estimate_memory", "test")
_DEFAULT_CLASSES = {"trainer": "Trainer", "accelerator": "Accelerator"}
_GIVEN_TO_TESTS = {"trainer", "datasets", "save_dir", "dataloader_kwargs"}
_GIVEN_TO_TRAIN = {"train_dataset", "eval_dataset", "create_scheduler_fn"}


class Parser:
    """The parser of one experiment, with an option for each argument of each part.

    :param document: the contents of the file
    :param environment: variables that override them
    :param arguments: of the command line, which override both
    :param tool: the method of the trainer, one of ``TOOLS``, whose own arguments the experiment has too
    :raises ExperimentError: if a class does not exist, or a key is not known
    """

    def __init__(
        self, document: Document, environment: Mapping[str, str], arguments: Sequence[str], tool: str | None = None
    ) -> None:
        self._library = import_extra("jsonargparse", "cli", "An experiment file")
        self._document = document
        self._tool = tool
        content = document.content
        for other in {*TOOLS} - {tool}:
            content.pop(other, None)
        given = override_parts(document, environment, arguments)
        if content.get("trainer") is None:
            content["trainer"] = {}
        self.parts = dict(self._import_parts())
        check_kinds(document, self.parts | self._import_callbacks())
        self._parser = self._create()
        self._known = set(self._parser.get_defaults().keys())
        self._accept_further(given)
        self._check_keys(content)
        for variable, key in unknown_variables(environment, self._known):
            if key in self._known:  # by a short name, such as resume, which only options have
                raise ExperimentError(f"environment variable {variable} is not known. Use {variable_of(key)}.")
            if key.partition(".")[0] not in {*TOOLS} - {tool}:
                raise ExperimentError(f"environment variable {variable}: {short(key)} {self._unknown(key)}")
        self._arguments = [*from_environment(document, environment, self._known), *given]

    def place(self, key: str) -> str:
        """Return the start of an error message about a key: where it stands, and the key."""
        return self._document.place(key)

    # ------------------------------------------------------------------------------- classes and functions

    def _import_parts(self) -> Iterator[tuple[str, Any]]:
        for key in PARTS:
            part = dig(self._document.content, key)
            if part is None:
                continue
            if not isinstance(part, dict):
                raise ExperimentError(f"{self.place(key)}={part!r} must be a class path, or class_path and init_args.")
            if key in _DEFAULT_CLASSES:
                part.setdefault("class_path", _DEFAULT_CLASSES[key])
            if "class_path" not in part:
                raise ExperimentError(f"{self.place(key)} has arguments, but no class_path.")
            for name in sorted(part.keys() - {"class_path", "init_args"}):
                raise ExperimentError(
                    f"{self.place(f'{key}.{name}')} is neither class_path nor init_args, under which the arguments of "
                    "the class belong."
                )
            path = part["class_path"]
            thing = import_path(self._document, key, path)
            part["class_path"] = path if "." in path else full_name(thing)
            part["init_args"] = part.get("init_args") or {}
            yield key, thing

    def _import_callbacks(self) -> dict[str, Any]:
        given = self._document.content.get("callbacks") or []
        if not isinstance(given, list):
            raise ExperimentError(f"{self.place('callbacks')}={given!r} must be a list.")
        items = [{"class_path": item} if isinstance(item, str) else item for item in given]
        result: dict[str, Any] = {}
        for number, item in enumerate(items):
            key = f"callbacks.{number}"
            if not isinstance(item, dict) or "class_path" not in item:
                raise ExperimentError(f"{self.place(key)}={item!r} must be a class path, or class_path and init_args.")
            result[key] = import_path(self._document, key, item["class_path"])
            item["class_path"] = full_name(result[key])
        self._document.content["callbacks"] = items
        return result

    # ------------------------------------------------------------------------------------- the parser

    def _create(self) -> Any:
        self._library.typing.register_type(Expression, fail_already_registered=False)
        parser = self._library.ArgumentParser(
            prog="train FILE", exit_on_error=False, allow_abbrev=False, usage="%(prog)s [--KEY VALUE ...]"
        )
        parser.add_argument("--_file", action="config", help=argparse.SUPPRESS)
        for key, thing in self.parts.items():
            add_part(parser, key, thing)
        kind = list[TrainerCallback]
        parser.add_argument("--callbacks", type=kind, default=[], help="callbacks, beside the default ones")
        trainer = self._trainer_class()
        parser.add_method_arguments(trainer, "train", "train", skip={*_GIVEN_TO_TRAIN})
        if self._tool is not None:
            of_train = set(inspect.signature(trainer.train).parameters)
            function = run_tests if self._tool == "test" else getattr(trainer, self._tool)
            skip = of_train | {"self", *_GIVEN_TO_TESTS}
            parser.add_function_arguments(function, self._tool, skip=skip & set(inspect.signature(function).parameters))
        parser.add_argument("--output_dir", type=str, default="runs/experiment", help="where the run writes its files")
        return parser

    def _trainer_class(self) -> Any:
        """Return the class whose ``train`` is called: that of the trainer, or ``Trainer`` if a function makes it."""
        made = self.parts["trainer"]
        return made if inspect.isclass(made) and issubclass(made, Trainer) else Trainer

    def _accept_further(self, arguments: Sequence[str]) -> None:
        """Add the arguments that a part takes as ``**kwargs`` of which the signature tells nothing."""
        options = [argument[2:].partition("=")[0] for argument in arguments]
        for key, thing in self.parts.items():
            prefix = f"{key}.init_args."
            taken = {k.removeprefix(prefix) for k in self._known if k.startswith(prefix)}
            if not takes_anything(thing, taken):
                continue
            in_file = [prefix + name for name in dig(self._document.content, f"{key}.init_args")]
            for name in dict.fromkeys([*in_file, *(option for option in options if option.startswith(prefix))]):
                first = name.removeprefix(prefix).partition(".")[0].removesuffix("+")
                if first not in taken:  # else it is, or changes, an argument in the signature
                    self._parser.add_argument(f"--{name}", type=Any, help="passed on as it is")
                    self._known.add(name)

    def _check_keys(self, content: dict[str, Any], under: str = "") -> None:
        """Refuse keys that nothing takes, and drop those that were meant for a class that has been replaced."""
        for name, value in list(content.items()):
            key = f"{under}.{name}" if under else str(name)
            if key in self._known or key.endswith(".class_path"):
                continue
            if key in self._document.inherited:
                del content[name]
            elif not self._has_keys(key):
                raise ExperimentError(f"{self.place(key)} {self._unknown(key)}")
            elif isinstance(value, dict) and value:
                self._check_keys(value, key)
            elif isinstance(value, str) and f"{key}.class_path" in self._known:
                content[name] = {"class_path": value}  # an argument whose default is a class, which it returns
            elif value:
                raise ExperimentError(f"{self.place(key)}={value!r} must have keys and values.")
            if not content.get(name):
                content.pop(name, None)

    def _has_keys(self, key: str) -> bool:
        is_part = key in PARTS or key.removesuffix(".init_args") in PARTS or key == "data"
        return is_part or any(known.startswith(f"{key}.") for known in self._known)

    def _unknown(self, key: str) -> str:
        """Return why a key is not known, and which may have been meant."""
        if inner := sorted(name for name in self._known if name.startswith(f"{key}.")):
            return f"takes no value itself, unlike what is under it, such as {short(inner[0])}."
        part = next((part for part in self.parts if key.startswith(f"{part}.init_args.")), "")
        section = key.partition(".")[0]
        is_section = section in ("train", self._tool) and section != key
        prefix = f"{part}.init_args." if part else f"{section}." if is_section else ""
        owner = full_name(self.parts[part]) if part else section if is_section else "an experiment"
        known = {name.removeprefix(prefix) for name in self._known if name.startswith(prefix)}
        hint = suggest(key.removeprefix(prefix), known) if prefix else ""
        if not prefix:
            known = {*PARTS, *(name.partition(".")[0] for name in self._known), "base"} - {"_file"}
            elsewhere = [short(name) for name in sorted(self._known) if name.endswith(f".{key}")]
            hint = f" Did you mean {elsewhere[0]!r}?" if elsewhere else suggest(key, known)
        return f"is not an argument of {owner}.{hint or ' There are: ' + ', '.join(sorted(known)) + '.'}"

    # ----------------------------------------------------------------------------------------- results

    def parse(self) -> Any:
        """Return the checked contents as a namespace of jsonargparse's.

        :raises ExperimentError: if a value is missing, unknown, or of the wrong type
        """
        try:
            result = self._parser.parse_args(["--_file", self._text(), *self._arguments])
        except self._library.ArgumentError as error:
            raise ExperimentError(explain(str(error), self._document, self._unknown)) from None
        del result["_file"]
        self._check_required(result)
        return result

    def _check_required(self, found: Any) -> None:
        """Refuse to leave out arguments without a type and a default; others the parser has refused."""
        options = {argument.partition("=")[0] for argument in self._arguments}
        for key, thing in self.parts.items():
            in_file = dig(self._document.content, f"{key}.init_args") or {}
            names = [f"{key}.init_args.{name}" for name in untyped_and_required(thing) if name not in in_file]
            names = [name for name in names if name in self._known and f"--{name}" not in options]
            if missing := [short(name) for name in names if found[name] is None]:
                raise ExperimentError(f"{self.place(key)} needs {' and '.join(missing)}, without a default.")

    def _text(self) -> str:
        try:
            return dump_yaml(self._document.content)
        except yaml.representer.RepresenterError as error:
            raise ExperimentError(f"overrides: {error.args[1]!r} cannot be written into a file.") from error

    def instantiate(self, found: Any, create: Callable[..., Any]) -> Any:
        """Return the contents with objects in place of nested classes and their arguments.

        :param create: called with each class and its arguments
        :raises ExperimentError: if ``create`` raises one
        """
        failures: list[ExperimentError] = []

        def create_and_note(kind: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return create(kind, *args, **kwargs)
            except ExperimentError as error:
                failures.append(error)
                raise

        try:
            return self._parser.instantiate(found, instantiators=[(create_and_note, object, True)])
        except Exception:
            if failures:
                raise failures[-1] from None  # the parser hides it where None is allowed, too
            raise

    def dump(self, found: Any) -> str:
        """Return checked contents in YAML, as a file of its own.

        Defaults that cannot be written, such as ``nn.Tanh()``, are left out, and so are the same when it is read.
        """
        lists = {key: value for key, value in found.items() if isinstance(value, list) and value}
        functions = {key: [*map(full_name, value)] for key, value in lists.items() if all(map(callable, value))}

        def write(content: dict[str, Any]) -> str:
            for key, names in functions.items():  # the parser writes one by its path, but not several
                owner, _, name = key.rpartition(".")
                dig(content, owner)[name] = names
            return dump_yaml(without_unwritable(content))

        self._library.set_dumper("experiment", write)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", rf"\s*{UNWRITABLE}")
            return str(self._parser.dump(found, "experiment", skip_unset=False))

    def commented(self) -> str:
        """Return the contents in YAML with comments; what is required and missing is ``null``."""
        arguments = ["--_file", self._text(), *self._arguments, "--print_config=comments"]
        with (
            contextlib.redirect_stdout(io.StringIO()) as printed,
            contextlib.suppress(SystemExit),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", rf"\s*{UNWRITABLE}")
            self._parser.parse_args(arguments)
        return "\n".join(tidy_comments(printed.getvalue())) + "\n"

    def help(self) -> str:
        """Return the description of all options, with the values of this experiment."""
        given = {key: value for key in self._known if (value := dig(self._document.content, key)) is not None}
        self._parser.set_defaults(given)
        return tidy_help(self._parser.format_help())
