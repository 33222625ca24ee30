"""The oldest tested versions equal the lower bounds in pyproject.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from tests.launching import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_INSTALLED_THERE = {
    "pytorch-accelerated",
    "mypy",
    "basedpyright",
    "ruff",
    "onnxscript",
    "onnxruntime",
    "trackio",
    "torchao",
}  # see tests/oldest.txt


def requirements(lines: list[str]) -> Iterator[Requirement]:
    """Each requirement, and for the project's own extras what they need."""
    for line in lines:
        requirement = Requirement(line)
        if requirement.name != PROJECT["name"]:
            yield requirement
        for extra in requirement.extras if requirement.name == PROJECT["name"] else ():
            yield from requirements(PROJECT["optional-dependencies"][extra])


def versions(found: Iterator[Requirement], operator: str) -> dict[str, Version]:
    """The version in each requirement that stands after ``operator``."""
    result = {}
    for requirement in found:
        (specifier,) = [specifier for specifier in requirement.specifier if specifier.operator == operator]
        result[requirement.name] = Version(specifier.version)
    return result


def test_the_oldest_versions_are_the_lower_bounds():
    bounds = versions(requirements([*PROJECT["dependencies"], f"{PROJECT['name']}[test]"]), ">=")
    assert set(bounds) > NOT_INSTALLED_THERE
    lines = (ROOT / "tests" / "oldest.txt").read_text().splitlines()
    pins = versions(requirements([line for line in lines if "==" in line]), "==")
    assert pins == {name: bound for name, bound in bounds.items() if name not in NOT_INSTALLED_THERE}


def test_the_page_names_the_extras_with_untested_lower_bounds():
    extras = PROJECT["optional-dependencies"]
    [tested] = [it.extras for it in map(Requirement, extras["test"]) if it.name == PROJECT["name"]]
    assert {*extras} - tested - {"test", "all"} == {"ray", "bench"}
    assert "except those of the extras `ray` and `bench`" in (ROOT / "docs" / "versions.md").read_text()


def test_make_uses_the_oldest_supported_python():
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert f"OLDEST_PYTHON ?= python{oldest}\n" in (ROOT / "Makefile").read_text()
    assert f"Programming Language :: Python :: {oldest}" in PROJECT["classifiers"]
