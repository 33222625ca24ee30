"""Completion in shells: the generated script, tested in a real shell."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from pytorch_accel_lite.__main__ import PARSERS
from pytorch_accel_lite.extensions.experiment.command_line import main
from tests.launching import ROOT, run_code

pytest.importorskip("jsonargparse", reason="needs the extra cli")
pytest.importorskip("shtab", reason="needs the extra cli")

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
#: Asks for the completions of lines, whose last words are those that are completed. Each line is in a shell of its own.
ASK = """
source "$1"
while read -r line; do (
    eval "COMP_WORDS=($line)"
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _shtab_pytorch_accel_lite
    echo "${COMPREPLY[@]}"
) done
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> Path:
    """A folder with the scripts for bash: that of all experiments, and that of one of them, beside its file."""
    folder = tmp_path_factory.mktemp("scripts")
    for path in (ROOT / "examples" / "digits.yaml", ROOT / "examples" / "digits.py"):
        shutil.copy(path, folder)
    for name, arguments in (("all", ["bash"]), ("digits", ["bash", str(folder / "digits.yaml")])):
        with pytest.MonkeyPatch.context() as patch, open(folder / name, "w") as script:
            patch.setattr("sys.stdout", script)
            assert main(["completion", *arguments], {name: create() for name, create in PARSERS.items()}) == 0
    return folder


def completions(script: Path, *lines: str) -> list[list[str]]:
    words = [["pytorch-accel-lite", *shlex.split(line)] + [""] * line.endswith(" ") for line in lines]
    command = ["bash", "--norc", "-c", ASK, "bash", str(script)]
    asked = "".join(f"{shlex.join(each)}\n" for each in words)
    done = subprocess.run(command, input=asked, capture_output=True, text=True, cwd=script.parent)
    assert (done.returncode, done.stderr) == (0, "")
    return [offered.split() for offered in done.stdout.splitlines()]


OFFERED = [
    ("tr", ["train"]),
    ("compare", ["compare", "compare-seeds"]),
    ("train digits.y", ["digits.yaml"]),
    ("train digits.yaml --train.num", ["--train.num_epochs"]),
    ("train digits.yaml --trainer.mixed_precision ", ["no", "fp16", "bf16", "fp8"]),
    ("train digits.yaml --train.sanity_check ", ["true", "false"]),
    ("train digits.yaml --optimizer AdamW", ["AdamW"]),
    ("train digits.yaml --loss_func Cross", ["CrossEntropyLoss"]),
    ("train digits.yaml --scheduler co", ["constant", "cosine"]),
    ("train digits.yaml --callb", ["--callbacks+"]),
    ("train digits.yaml --callbacks+ EarlyStoppingCallback --callbacks+ EarlyS", ["EarlyStoppingCallback"]),
    ("train digits.yaml --resume lat", ["latest"]),
    ("train digits.yaml --overwrite --train.warm", ["--train.warmup_steps"]),
    ("train digits.yaml --help tr", ["train", "trainer"]),
    ("evaluate digits.yaml --weights be", ["best"]),
    ("evaluate digits.yaml --on ", ["train", "eval", "test"]),
    ("find_lr digits.yaml --find_lr.num", ["--find_lr.num_steps"]),
    ("compare-seeds digits.yaml --me", ["--metric"]),
    ("completion z", ["zsh"]),
]
OF_TAKEOVER = [("launch --proc", ["--processes"]), ("launch --processes 2 digits.p", ["digits.py"])]


@pytest.fixture(scope="module")
def offered_completions(scripts) -> dict[str, list[str]]:
    """What is offered for each line, by one shell, as reading the script takes long."""
    lines = [case[0] for case in OFFERED] + [case[0] for case in OF_TAKEOVER]
    return dict(zip(lines, completions(scripts / "all", *lines), strict=True))


@pytest.mark.sampled
@pytest.mark.extension("metrics")
@pytest.mark.parametrize(("line", "expected"), OFFERED)
def test_completion_in_shells_offers_known_values(offered_completions, line, expected):
    assert offered_completions[line] == expected


@pytest.mark.extension("takeover", "metrics")
@pytest.mark.parametrize(("line", "expected"), OF_TAKEOVER)
def test_completion_in_shells_offers_options_of_launch(offered_completions, line, expected):
    assert offered_completions[line] == expected


@pytest.mark.extension("metrics")
@pytest.mark.thorough
def test_the_options_of_a_file_are_completed_if_it_is_named(scripts):
    line = "train digits.yaml --optimizer.l"
    assert completions(scripts / "all", line) == [[]]
    assert completions(scripts / "digits", line, "train digits.yaml --help opt") == [["--optimizer.lr"], ["optimizer"]]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_the_zsh_completion_script_parses(tmp_path, capsys):
    assert main(["completion", "zsh"]) == 0
    (script := tmp_path / "_pytorch-accel-lite").write_text(capsys.readouterr().out)
    subprocess.run(["zsh", "-n", str(script)], check=True)


@pytest.mark.programs
def test_completion_without_shtab_says_how_to_install():
    code = """
from tests.launching import forget
forget("shtab", installed=False)
from pytorch_accel_lite.extensions.experiment.command_line import main
print(main(["completion", "bash"]))
"""
    assert "Completion in shells needs shtab. Install it with: pip install" in run_code(code)
