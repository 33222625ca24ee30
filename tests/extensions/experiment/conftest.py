"""The folder that tests of experiments work in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extensions.experiment.small_experiment import FILE


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    """The file of a small experiment, in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.yaml"
    path.write_text(FILE)
    return path
