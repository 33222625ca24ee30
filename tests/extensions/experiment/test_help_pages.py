"""The help of the command line, and suggestions for what is misspelt."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("jsonargparse", reason="needs the extra cli")

from tests.extensions.experiment.small_experiment import run

MARKUP = re.compile(r"init_args|Namespace|0x|:\w+:`|``|`_")


@pytest.mark.sampled
@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_help_shows_the_values_of_the_experiment(file, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    code, printed, _ = run("train", file, "--help", capsys=capsys)
    assert (code, MARKUP.findall(printed)) == (0, [])
    assert re.search(r"^  --optimizer\.lr 0\.01 +learning rate$", printed, re.MULTILINE)
    assert re.search(r"^  --train\.num_epochs \d+ +number of passes", printed, re.MULTILINE)
    assert "gradient_clip_norm" in printed
    assert len(printed.splitlines()) <= 70
    lines = printed.splitlines() + run("train", "--help", capsys=capsys)[1].splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert run("train", "--help", file, capsys=capsys)[:2] == (0, printed)


def test_help_describes_a_group_of_options_or_one_in_plain_text(file, capsys):
    code, printed, _ = run("train", file, "--help", "optimizer", "--optimizer.lr", "0.5", capsys=capsys)
    assert (code, MARKUP.findall(printed)) == (0, [])
    assert "--optimizer.lr 0.5\n    learning rate" in printed
    assert "    type: float | Tensor\n" in printed
    assert "--train" not in printed
    code, printed, _ = run("train", file, "--help", "train.evaluate_every", capsys=capsys)
    assert (code, MARKUP.findall(printed)) == (0, [])
    assert printed.startswith("--train.evaluate_every null\n    instead, evaluate at an Interval")
    assert "type: str | Interval | null" in printed
    assert "EarlyStoppingCallback" in run("train", file, "-h", "callbacks", capsys=capsys)[1]
    assert "--find_lr.num_steps" in run("find_lr", file, "-h", "find_lr", capsys=capsys)[1]
    assert "To read about --weights and --on: evaluate --help" in run("evaluate", file, "--help", capsys=capsys)[1]
    code, _, errors = run("train", file, "--help", "optimzer", capsys=capsys)
    assert (code, errors) == (
        2,
        "error: 'optimzer' is not a group of options, nor one of them. Did you mean 'optimizer'?\n",
    )
    code, _, errors = run("train", file, "--help", "xyz", capsys=capsys)
    assert (code, "There are the groups model, " in errors) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["trian", "FILE"], "'trian' is not a command. Did you mean 'train'?"),
        (["FILE"], "is not a command. Did you mean: train "),
        (["xyz"], "'xyz' is not a command. There are: train, evaluate, "),
        (["train", "FILE", "--name", "x"], "name is not an argument of an experiment. Did you mean 'output_dir'"),
        pytest.param(
            ["train", "FILE", "--epochs", "3"],
            "epochs is not an argument of an experiment. Did you mean 'train.num_epochs'",
            marks=pytest.mark.extension("other_libraries"),
        ),
        pytest.param(
            ["train", "FILE", "--batch_size", "3"],
            "Did you mean 'train.per_device_batch_size'?",
            marks=pytest.mark.extension("other_libraries"),
        ),
        (["evaluate", "FILE", "--wieghts", "best"], "evaluate does not take --wieghts. Did you mean 'weights'?"),
        (["evaluate", "FILE", "--dataset", "test"], "evaluate does not take --dataset. Did you mean 'on'?"),
        (["evaluate", "FILE", "last"], "evaluate takes last as an option: --weights last."),
        (["predict", "FILE", "train"], "predict takes train as an option: --on train."),
        (["train", "FILE", "--scheduler", "cosin"], "scheduler='cosin' is not in torch.optim.lr_scheduler or "),
        (["train", "FILE", "--scheduler", "cosin"], "Did you mean 'cosine'?"),
    ],
)
def test_a_misspelled_or_foreign_option_gets_a_suggestion(file, capsys, arguments, meant):
    code, _, errors = run(*(str(file) if word == "FILE" else word for word in arguments), capsys=capsys)
    assert code == 2
    assert meant in errors
