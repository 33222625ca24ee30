"""Checking the contents of an experiment against the signatures of the classes and functions that they name."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, get_args

from pytorch_accel_lite.callbacks import TrainerCallback
from pytorch_accel_lite.extensions.experiment.help_pages import (
    Option,
    all_keys,
    describe_options,
    group_options,
    overview,
    read_options,
)
from pytorch_accel_lite.extensions.experiment.importing import check_kinds, full_name, import_path
from pytorch_accel_lite.extensions.experiment.overrides import OVERRIDING
from pytorch_accel_lite.extensions.experiment.schedule_expressions import find_expressions, parse, with_value_at
from pytorch_accel_lite.extensions.experiment.testing import run_tests
from pytorch_accel_lite.extensions.experiment.yaml_files import (
    PARTS,
    Document,
    ExperimentError,
    dump_yaml,
    load_yaml,
    short_key,
)
from pytorch_accel_lite.schedulers import ScheduleName
from pytorch_accel_lite.trainer import Trainer
from pytorch_accel_lite.utils import import_extra, suggest

#: Commands with arguments of their own besides some arguments of ``train``: trainer methods, and ``run_tests``.
TOOLS = ("check", "find_lr", "find_batch_size", "diagnose", "estimate_memory", "test")
_DEFAULT_CLASSES = {"trainer": "Trainer", "accelerator": "Accelerator"}
# Arguments of the trainer and its methods that other keys of the file, or the command, provide.
_TRAINER_ARGUMENTS = {"model", "loss_func", "optimizer", "callbacks", "run_history", "accelerator"}
_TRAIN_ARGUMENTS = {"train_dataset", "eval_dataset", "create_scheduler_fn"}
_TEST_ARGUMENTS = {"trainer", "datasets", "save_dir", "dataloader_kwargs"}
_CALLED_LATER = {"optimizer": 1, "scheduler": 1, "loss_func": 2}  # how many arguments the trainer passes first
# The beginning of the text that the parser writes for an object that cannot be serialized.
_UNWRITABLE = "Unable to serialize instance"
_NAMES_OF_RUNS = ("name", "run_name", "experiment_name", "exp_name")  # other libraries' keys for output_dir
_UNWRAPPED = 1_000_000  # columns
_UNWANTED_HELP = {
    r"  --print_config .*?(?=\n  -)\n": "",
    r"  --[\w.]+ CONFIG\s+Path to a configuration file\.\n": "",
    r"  --[\w.]+\.help .*?exit\.\n": "",
    r",\s+known\s+subclasses:[^)]*\)": ")",
    r"\.init_args(?=[. ])": "",
}


class Parser:
    """The parser of one experiment, with an option for each argument of each part.

    Args:
        document: the contents of the file with their overrides
        tool: the command, one of ``TOOLS``, whose arguments the experiment has, too

    Attributes:
        parts: the classes and functions of the experiment, by the key of the file that names them

    Raises:
        ExperimentError: if a class does not exist, or a key is unknown
    """

    def __init__(self, document: Document, tool: str | None = None) -> None:
        self._library = _jsonargparse()
        self._document = document
        self._tool = tool
        content = document.content
        for other in {*TOOLS} - {tool}:
            content.pop(other, None)
        content["trainer"] = content.get("trainer") or {}
        self._resolve_schedule_name()
        self.parts = dict(self._import_parts())
        check_kinds(document, self.parts | self._import_callbacks())
        self._expressions = self._extract_expressions()
        self._parser = self._find_parser()
        self._keys = set(self._parser.get_defaults().keys())
        self._add_extra_arguments()
        self._check_keys(content)

    def locate(self, key: str) -> str:
        """Return the start of an error message about a key: its location and the key."""
        return self._document.locate(key)

    def overrides(self, key: str) -> bool:
        """Whether a value of the file has been overridden, on the command line or by ``overrides``."""
        return self._document.locations.get(key) in OVERRIDING

    def _arguments(self, key: str) -> dict[str, Any]:
        """Return the arguments of a part in the file."""
        part: Any = self._document.content
        for name in key.split("."):
            part = (part or {}).get(name)
        return (part or {}).get("init_args") or {}

    # ------------------------------------------------------------------------------- classes and functions

    def _resolve_schedule_name(self) -> None:
        """Replace ``scheduler: cosine`` by the corresponding argument of ``train``."""
        content = self._document.content
        scheduler, train = (content.get(key) or {} for key in ("scheduler", "train"))
        if scheduler and train.get("create_scheduler_fn") is not None:
            raise ExperimentError(
                f"{self.locate('train.create_scheduler_fn')}: there is a scheduler, too. Leave one out."
            )
        name = scheduler.get("class_path")
        if name in get_args(ScheduleName):
            keys = {f"scheduler.init_args.{argument}" for argument in self._arguments("scheduler")}
            for key in keys - self._document.inherited:
                raise ExperimentError(f"{self.locate(key)}: {name} takes only a warm-up, which is train.warmup_steps.")
            del content["scheduler"]
            content["train"] = train | {"create_scheduler_fn": name}

    def _import_parts(self) -> Iterator[tuple[str, Any]]:
        for key in PARTS:
            owner, _, name = key.rpartition(".")
            section = self._document.content.get(owner) if owner else self._document.content
            if isinstance(section, dict) and (part := section.get(name)) is not None:
                default = {"class_path": _DEFAULT_CLASSES[key]} if key in _DEFAULT_CLASSES else {}
                section[name], thing = self._import(key, default | part if isinstance(part, dict) else part)
                yield key, thing

    def _import(self, key: str, item: Any) -> tuple[dict[str, Any], Any]:
        """Return an item with the full path of its class or function, and that class or function."""
        if not isinstance(item, dict):
            raise ExperimentError(f"{self.locate(key)}={item!r} must be a class path, or class_path and init_args.")
        if "class_path" not in item:
            raise ExperimentError(f"{self.locate(key)} has arguments, but no class_path.")
        for name in sorted(item.keys() - {"class_path", "init_args"}):
            raise ExperimentError(
                f"{self.locate(f'{key}.{name}')} is neither class_path nor init_args, under which the arguments of the "
                "class belong."
            )
        thing = import_path(self._document, key, item["class_path"])
        return {"class_path": full_name(thing), "init_args": item.get("init_args") or {}}, thing

    def _import_callbacks(self) -> dict[str, Any]:
        items = self._document.content.get("callbacks") or []
        if not isinstance(items, list):
            raise ExperimentError(f"{self.locate('callbacks')}={items!r} must be a list.")
        kinds: dict[str, Any] = {}
        for number, item in enumerate(items):
            key = f"callbacks.{number}"
            items[number], kinds[key] = self._import(key, {"class_path": item} if isinstance(item, str) else item)
        self._document.content["callbacks"] = items
        return kinds

    def _extract_expressions(self) -> dict[tuple[Any, ...], tuple[str, Any]]:
        """Replace each expression in the arguments of the scheduler by a number.

        Returns:
            the text and the placeholder of each expression, by its path
        """
        arguments = self._arguments("scheduler")
        expressions: dict[tuple[Any, ...], tuple[str, Any]] = {}
        for path, text in list(find_expressions(arguments)):
            name, *inner = path
            try:
                expressions[path] = text, parse(text)
            except ValueError as error:
                raise ExperimentError(f"{self.locate(f'scheduler.{name}')}: {error}") from error
            arguments[name] = with_value_at(arguments[name], inner, 1)
        return expressions

    # ------------------------------------------------------------------------------------- the parser

    def _find_parser(self) -> Any:
        """Return a parser of jsonargparse's, perhaps that of an earlier experiment: creating one takes long."""
        try:
            return _shared_parser(tuple(self.parts.items()), self._tool)
        except TypeError:  # a part without a hash
            return _create_parser(tuple(self.parts.items()), self._tool)

    def _add_extra_arguments(self) -> None:
        """Add the arguments in the file that a part accepts as undocumented ``**kwargs``."""
        extra: list[str] = []
        for key, thing in self.parts.items():
            prefix = f"{key}.init_args."
            existing = {name.removeprefix(prefix) for name in self._keys if name.startswith(prefix)}
            parameters = _parameters(thing)
            is_open = parameters is None or any(value.kind is value.VAR_KEYWORD for value in parameters.values())
            if is_open and existing <= (parameters or {}).keys():
                extra += [f"{prefix}{name}" for name in self._arguments(key).keys() - existing]
        if extra:
            self._parser = _create_parser(tuple(self.parts.items()), self._tool)  # others share the one found
        for name in extra:
            self._parser.add_argument(f"--{name}", type=Any, help="passed on as it is")
            self._keys.add(name)

    def _check_keys(self, content: dict[str, Any], under: str = "") -> None:
        """Raise an error for unknown keys, and drop the keys of a class that has been replaced."""
        for name, value in list(content.items()):
            key = f"{under}.{name}" if under else str(name)
            if key in self._keys or key.endswith(".class_path"):
                continue
            if key in self._document.inherited:
                del content[name]
            elif not self._has_keys(key):
                raise ExperimentError(f"{self.locate(key)} {self._unknown(key)}")
            elif isinstance(value, dict) and value:
                self._check_keys(value, key)
            elif isinstance(value, str) and f"{key}.class_path" in self._keys:
                content[name] = {"class_path": value}  # an argument whose default is a class
            elif value:
                raise ExperimentError(f"{self.locate(key)}={value!r} must have keys and values.")
            if not content.get(name):
                content.pop(name, None)

    def _has_keys(self, key: str) -> bool:
        is_part = key in PARTS or key.removesuffix(".init_args") in PARTS or key == "data"
        return is_part or any(name.startswith(f"{key}.") for name in self._keys)

    def _unknown(self, key: str) -> str:
        """Return why a key is unknown, with the key that may have been meant."""
        part = next((part for part in self.parts if key.startswith(f"{part}.init_args.")), None)
        section = key.partition(".")[0]
        owner, prefix = "an experiment", ""
        if part is not None:
            owner, prefix = full_name(self.parts[part]), f"{part}.init_args."
        elif section in ("train", self._tool) and section != key:
            owner, prefix = section, f"{section}."
        names = {name.removeprefix(prefix) for name in self._keys if name.startswith(prefix)}
        elsewhere: list[str] = []
        if not prefix:
            meant = [short_key(name) for name in sorted(names) if suggest(key, [name.rpartition(".")[2]], 1)]
            elsewhere = ["output_dir"] if key in _NAMES_OF_RUNS else []
            elsewhere += sorted(meant, key=lambda name: not name.startswith("train."))
            names = {*PARTS, "base", *(name.partition(".")[0] for name in names)}
        hint = f" Did you mean {' or '.join(map(repr, elsewhere))}?" if elsewhere else ""
        hint = hint or suggest(key.removeprefix(prefix), names, 0.5)
        return f"is not an argument of {owner}.{hint or ' There are: ' + ', '.join(sorted(names)) + '.'}"

    # ----------------------------------------------------------------------------------------- results

    def parse(self) -> Any:
        """Return the checked contents as a namespace of jsonargparse's, with numbers in place of expressions.

        Raises:
            ExperimentError: if a value is missing, or of the wrong type
        """
        for key, thing in self.parts.items():  # where the parser would put None
            arguments, empty = self._arguments(key), inspect.Parameter.empty
            parameters = (_parameters(thing) or {}).items()
            required = [name for name, value in parameters if value.annotation is value.default is empty]
            names = [name for name in required if name not in arguments]
            if missing := [f"{key}.{name}" for name in names if f"{key}.init_args.{name}" in self._keys]:
                raise ExperimentError(f"{self.locate(key)} needs {' and '.join(missing)}, without a default.")
        try:
            return self._parser.parse_object(load_yaml(dump_yaml(self._document.content)))
        except self._library.ArgumentError as error:
            raise ExperimentError(self._explain(str(error))) from None

    def _explain(self, message: str) -> str:
        """Return an error message of jsonargparse in terms of the file."""
        if missing := re.search(r"arguments are required: (.*)", message):
            keys = missing[1].split(", ")
            owner = keys[0].partition(".init_args.")[0]
            return f"{self.locate(owner)} needs {' and '.join(map(short_key, keys))}, without a default."
        keys = re.findall(r'Parser key "([^"]+)"', message)
        if option := re.search(r"Option '([^']+)' is not accepted", message):
            location, path = self._innermost([*keys, option[1]]), re.findall(r"given class_path '([^']+)'", message)[-1]
            names = inspect.signature(import_path(self._document, keys[0], path)).parameters
            hint = suggest(option[1], names, 0.5) or f" There are: {', '.join(names)}."
            return f"{location} is not an argument of {path}.{hint}"
        value = re.search(r"(?:Got|Given) value: (.*?)(?=\n +(?:- |Given value)|\Z)", message, re.DOTALL)
        message = message[: value.end()] if value else message  # the text after it is about the list around it
        kinds = [kind.rpartition(".")[2] for kind in re.findall(r"Expected an? <class '([^']+)'>", message)]
        if choices := re.search(r"Expected a typing\.Literal\[(.*)\]", message):
            kinds = [*choices[1].split(", "), *kinds]
        must_be = f" must be {' or '.join(dict.fromkeys(kinds))}" if kinds else " is wrong"
        must_be = must_be.replace("NoneType", "null").replace("Sequence", "a list, as in [a, b]")
        reasons = re.findall(r"^ *- (?!Expected an? |Does not validate)(.*?)\.?$", message, re.MULTILINE)
        if kinds == ["str"]:  # YAML has read the text as another type
            reasons.append("Put it in quotes")
        text = ". ".join([must_be, *reasons])
        if not value:
            return f"{self._innermost(keys)}: {' '.join(message.split())}"
        return f"{self._innermost(keys)}={value[1]!r}{text if text.endswith('?') else f'{text}.'}"

    def _innermost(self, keys: list[str]) -> str:
        """Return the location of the last key, which may be within a list item of the first key."""
        inside = (key for key in self._document.locations if key.startswith(keys[0]) and key.endswith(f".{keys[-1]}"))
        return self.locate(next(inside, ".".join(dict.fromkeys(keys))) if len(keys) > 1 else keys[0])

    def instantiate(self, contents: Any, create: Callable[..., Any]) -> Any:
        """Return the contents with nested classes instantiated.

        Args:
            create: called with each class and its arguments

        Raises:
            ExperimentError: if ``create`` raises one
        """
        failures: list[ExperimentError] = []

        def create_and_note(kind: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return create(kind, *args, **kwargs)
            except ExperimentError as error:
                failures.append(error)
                raise

        try:
            return self._parser.instantiate(contents, instantiators=[(create_and_note, object, True)])
        except Exception:
            if failures:
                raise failures[-1] from None  # the parser hides the error if None is also allowed
            raise

    def with_placeholders(self, schedule: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
        """Return some arguments of the scheduler with placeholders in place of expressions.

        Args:
            schedule: all arguments of the scheduler
        """
        for (name, *inner), (_, value) in self._expressions.items():
            arguments = {**arguments, name: with_value_at(arguments.get(name, schedule[name]), inner, value)}
        return arguments

    def to_config(self, contents: Any) -> dict[str, Any]:
        """Return checked contents as nested dicts of types that a file can hold, with all defaults.

        Defaults that cannot be written, such as ``nn.Tanh()``, are omitted. They apply again when the file is read.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", rf"\s*{_UNWRITABLE}")
            config = json.loads(self._parser.dump(contents, "json", skip_unset=False))
        for key, value in contents.items():
            # The parser can write a callable, but not a list of callables.
            if isinstance(value, list) and value and all(map(callable, value)):
                config = with_value_at(config, key.split("."), [*map(full_name, value)])
        config = _without_unwritable(config)
        for path, (text, _) in self._expressions.items():
            config = with_value_at(config, ("scheduler", "init_args", *path), text)
        return config  # type: ignore[no-any-return]

    def help(self, file: str, wanted: str = "") -> str:
        """Return the values of this experiment and the names of all options, or the description of the ``wanted`` ones.

        Args:
            file: the name of the experiment's file
            wanted: a group of options, such as ``"optimizer"``, or an option

        Raises:
            ExperimentError: if there is no such group or option
        """
        values = {short_key(key): value for key, value in self.parse().items()}
        for (name, *inner), (text, _) in self._expressions.items():
            values[f"scheduler.{name}"] = with_value_at(values[f"scheduler.{name}"], inner, text)
        options, titles = self._read_help(values)
        groups = group_options(options, titles, {key: full_name(thing) for key, thing in self.parts.items()})
        return describe_options(groups, wanted) if wanted else overview(groups, Path(file).name)

    def options(self) -> list[Option]:
        """Return all options, without their values."""
        return self._read_help({})[0]

    def _read_help(self, values: dict[str, Any]) -> tuple[list[Option], dict[str, str]]:
        text = self._parser.format_help()
        for pattern, replacement in _UNWANTED_HELP.items():
            text = re.sub(pattern, replacement, text, flags=re.DOTALL)
        return read_options(text, values, all_keys(self._document.content))


def _parameters(thing: Any) -> dict[str, inspect.Parameter] | None:
    """Return the parameters of a class or function; ``None`` if it is not written in Python and has no signature."""
    try:
        return dict(inspect.signature(thing).parameters)
    except ValueError:
        return None


def _without_unwritable(content: Any) -> Any:
    """Return nested contents without the values that could not be written."""
    if isinstance(content, dict):
        written = {key: value for key, value in content.items() if not str(value).startswith(_UNWRITABLE)}
        return {key: _without_unwritable(value) for key, value in written.items()}
    return [_without_unwritable(value) for value in content] if isinstance(content, list) else content


def _jsonargparse() -> Any:
    return import_extra("jsonargparse", "cli", "An experiment file")


def _create_parser(parts: tuple[tuple[str, Any], ...], tool: str | None) -> Any:
    """Return a parser with an option for each argument of each part.

    Args:
        parts: classes and functions, each with the key of the file that names it
        tool: see ``Parser``
    """
    library, by_key = _jsonargparse(), dict(parts)
    parser = library.ArgumentParser(
        exit_on_error=False, allow_abbrev=False, formatter_class=partial(library.DefaultHelpFormatter, width=_UNWRAPPED)
    )
    for key, thing in parts:
        parser.add_argument(f"--{key}.class_path", type=str, default=full_name(thing), help="a class or a function")
        skip: set[Any] = {_CALLED_LATER[key]} if key in _CALLED_LATER else set()
        parameters = _parameters(thing) or {}
        if key == "trainer":
            skip = _TRAINER_ARGUMENTS & parameters.keys()
        skip |= {name for name, value in parameters.items() if type(value.default) is object}  # sentinels
        if not inspect.isclass(thing):
            parser.add_function_arguments(thing, f"{key}.init_args", skip=skip, fail_untyped=False)
            continue
        skip = set() if key == "loss_func" else skip
        parser.add_class_arguments(thing, f"{key}.init_args", skip=skip, fail_untyped=False, instantiate=False)
    kind = list[TrainerCallback]
    parser.add_argument("--callbacks", type=kind, default=[], help="callbacks, in addition to the default ones")
    part = by_key["trainer"]
    trainer = part if inspect.isclass(part) and issubclass(part, Trainer) else Trainer
    parser.add_method_arguments(trainer, "train", "train", skip={*_TRAIN_ARGUMENTS})
    parser.add_argument("--train.create_scheduler_fn", type=ScheduleName | None, help="the name of a schedule")
    if tool is not None:
        function = run_tests if tool == "test" else getattr(trainer, tool)
        shared = {*inspect.signature(trainer.train).parameters, "self", "extra", *_TEST_ARGUMENTS}
        skip = shared & set(inspect.signature(function).parameters)
        parser.add_function_arguments(function, tool, skip=skip)
    parser.add_argument("--output_dir", type=str, default="runs/experiment", help="where the run writes its files")
    parser.add_argument("--overwrite", type=bool, default=False, help="replace the newest run")
    return parser


_shared_parser = lru_cache(maxsize=8)(_create_parser)
