"""What overrides an experiment file: environment variables, and the arguments of a command line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pytorch_accel_lite.experiment.importing import PATH, full_name, import_path
from pytorch_accel_lite.experiment.yaml_files import PARTS, Document, short

#: Environment variables that override a file begin with this, as in ``PYTORCH_ACCEL_LITE_TRAIN__NUM_EPOCHS``.
ENVIRONMENT = "PYTORCH_ACCEL_LITE_"
_COMMAND_LINE = "command line"


def override_parts(document: Document, environment: Mapping[str, str], arguments: Sequence[str]) -> list[str]:
    """Override the classes of parts, on which all other options depend, and return the other arguments in full."""
    for key in PARTS:
        if (path := environment.get(variable_of(key))) is not None:
            _override_part(document, key, path, f"environment variable {variable_of(key)}")
    left: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        option, equals, value = argument.partition("=")
        key = option.removeprefix("--").removesuffix(".class_path")
        if not option.startswith("--"):
            left.append(argument)
        elif key in PARTS:
            _override_part(document, key, value if equals else next(rest, ""), _COMMAND_LINE)
        elif key == "callbacks+":
            path = value if equals else next(rest, "")
            if PATH.fullmatch(path):
                path = full_name(import_path(document, key, path))
            left.append(f"--callbacks+={path}")
        else:
            full = spelt_out(option[2:])
            if full.startswith("accelerator."):  # whose class need not be named
                document.content.setdefault("accelerator", {})
            document.places[full] = _COMMAND_LINE
            left.append(f"--{full}{equals}{value}")
    return left


def _override_part(document: Document, key: str, path: str, source: str) -> None:
    value: Any = None if path in ("null", "none") else path
    document.update(nested(key, value), dict.fromkeys((key, f"{key}.class_path"), source))


def from_environment(document: Document, environment: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """Return what environment variables give, as arguments of a command line."""
    given = {key: variable_of(key) for key in sorted(known) if not key.endswith(".class_path")}
    given = {key: variable for key, variable in given.items() if variable in environment}
    document.places |= {key: f"environment variable {variable}" for key, variable in given.items()}
    return [f"--{key}={environment[variable]}" for key, variable in given.items()]


def without_given(environment: Mapping[str, str], key: str, value: Any) -> Mapping[str, str]:
    """Return the variables without those for a value that is given otherwise, or for the values in a dict."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            environment = without_given(environment, f"{key}.{name}", part)
    return {variable: text for variable, text in environment.items() if variable != variable_of(key)}


def unknown_variables(environment: Mapping[str, str], known: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield variables that look as if they overrode something but do not, with the full keys that they stand for."""
    taken = {variable_of(key) for key in (*known, *PARTS)}
    for variable in environment:
        if variable.startswith(ENVIRONMENT) and variable not in taken:
            yield variable, spelt_out(variable.removeprefix(ENVIRONMENT).lower().replace("__", "."))


def variable_of(key: str) -> str:
    """Return the name of the environment variable that overrides a key."""
    return ENVIRONMENT + short(key).upper().replace(".", "__")


def spelt_out(option: str) -> str:
    """Return the full key of an option: ``optimizer.init_args.lr`` for ``optimizer.lr``."""
    if option == "resume":
        return "train.resume_from"
    for key in PARTS:
        if option.startswith(f"{key}.") and not option.startswith((f"{key}.init_args", f"{key}.class_path")):
            return f"{key}.init_args.{option[len(key) + 1 :]}"
    return option


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return a value in nested dicts: ``{"train": {"num_epochs": 3}}`` for ``"train.num_epochs"`` and 3."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value  # type: ignore[no-any-return]


def dig(content: Any, key: str) -> Any:
    """Return the value of a key in nested dicts, or ``None``."""
    for name in key.split("."):
        content = content.get(name) if isinstance(content, dict) else None
    return content
