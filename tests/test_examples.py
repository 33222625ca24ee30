"""The examples run as their users run them."""

from __future__ import annotations

import re
import sys

import torch

from tests.launching import launch


def test_the_first_example_learns_real_digits_and_leaves_its_model_and_curves(tmp_path):
    done = launch([sys.executable, "examples/digits.py", "--output", str(tmp_path)])
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r"Test accuracy: ([\d.]+)% of 360 digits", done.stdout)
    assert float(accuracy[1]) >= 98
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    best = torch.load(tmp_path / "best_model.pt", weights_only=True)
    assert best["accuracy"] >= 0.98
    assert "model_state_dict" in best


def test_unfreezing_goes_on_where_the_head_alone_ends():
    done = launch([sys.executable, "examples/finetuning.py"])
    assert done.returncode == 0, done.stderr
    accuracy = dict(re.findall(r"^([\w ]+): ([\d.]+)% of \d+ digits", done.stdout, re.MULTILINE))
    assert float(accuracy["Pretraining"]) >= 97
    assert float(accuracy["Gradual unfreezing"]) > float(accuracy["Head alone"]) >= 60


def test_metrics_are_the_same_in_the_callback_and_in_the_loop():
    done = launch([sys.executable, "examples/metrics.py"])
    assert done.returncode == 0, done.stderr
    callback, loop = re.search(r"in the callback: ([\d.]+), in the loop: ([\d.]+)", done.stdout).groups()
    assert callback == loop
    assert float(callback) >= 0.95
    assert float(re.search(r"of the averaged weights: ([\d.]+)", done.stdout)[1]) >= 0.95
