"""Options of the command ``launch`` that cannot be right, which it explains before it starts anything."""

from __future__ import annotations

import pytest

from pytorch_accel_lite.extensions.takeover.launch_command import main as launch


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--processes", "two", "script.py"], "argument --processes: two is not a positive number"),
        (["script.py", "--processes", "2"], "--processes comes before the program: launch --processes 4 script.py"),
    ],
)
def test_wrong_options_of_launch_are_explained(arguments, error, capsys):
    with pytest.raises(SystemExit, match="2"):
        launch(arguments)
    assert error in capsys.readouterr().err
