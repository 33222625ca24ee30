"""What overrides what: the command line, files that build on others, and classes in place of others."""

from __future__ import annotations

import pytest
from torch import nn

pytest.importorskip("jsonargparse", reason="needs the extra cli")

from pytorch_accel_lite.experiment import Experiment, ExperimentError
from tests.extensions.experiment.small_experiment import FILE, read


def test_overrides_may_be_a_dict(file):
    changes = {"optimizer.lr": 3e-4, "train.num_epochs": 1, "trainer.seed": None, "model": "torch.nn.Identity"}
    found = Experiment.from_file(file, changes).config
    assert found["optimizer"]["init_args"]["lr"] == 3e-4
    assert (found["train"]["num_epochs"], found["trainer"]["init_args"]["seed"]) == (1, None)
    assert found["model"]["class_path"] == "torch.nn.Identity"


def test_another_class_drops_the_arguments_it_does_not_take(file):
    file.write_text(FILE.replace("lr: 1e-2", "lr: 1e-2\n    betas: [0.8, 0.9]"))
    arguments = read(file, "--optimizer", "torch.optim.SGD").config["optimizer"]["init_args"]
    assert arguments["lr"] == 0.01
    assert "betas" not in arguments
    with pytest.raises(ExperimentError, match=r"betas is not an argument of torch.optim.SGD"):
        read(file, "--optimizer", "torch.optim.SGD", "--optimizer.betas", "[0.1,0.2]")


def test_files_build_on_others(file, tmp_path):
    (tmp_path / "adam.yaml").write_text("optimizer: {class_path: Adam, init_args: {lr: 0.5}}\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "more.yaml").write_text(
        "base: [../small.yaml, ../adam.yaml]\ntrain: {num_epochs: 9}\ncallbacks+: [EarlyStoppingCallback]\n"
    )
    experiment = read(tmp_path / "folder" / "more.yaml")
    found = experiment.config
    assert (found["train"]["num_epochs"], found["train"]["per_device_batch_size"]) == (9, 8)
    assert (found["optimizer"]["class_path"], found["optimizer"]["init_args"]["lr"]) == ("torch.optim.Adam", 0.5)
    assert [item["class_path"].rpartition(".")[2] for item in found["callbacks"]] == ["EarlyStoppingCallback"]
    assert found["output_dir"] == "runs/more"


def test_the_arguments_of_a_nested_class_go_with_it(file, tmp_path):
    leaky = "activation: {class_path: torch.nn.LeakyReLU, init_args: {negative_slope: 0.3}}"
    (tmp_path / "other.yaml").write_text(FILE.replace("width: 5", leaky))
    text = "base: other.yaml\nmodel: {init_args: {activation: {class_path: torch.nn.%s}}}"
    for name, kind in (("Tanh", nn.Tanh), ("LeakyReLU", nn.LeakyReLU)):
        file.write_text(text % name)
        activation = read(file).trainer.get_model().layers[1]
        assert isinstance(activation, kind)
    assert activation.negative_slope == 0.3


def test_keys_that_are_numbers_are_merged_and_a_base_may_be_null(file, tmp_path):
    (tmp_path / "other.yaml").write_text("base: null\nmodel: {init_args: {options: {1: 3, 2: 4}}}")
    created = FILE.replace("Net\n", "create_numbered\n").replace("width: 5", "options: {2: 5}")
    file.write_text("base: other.yaml" + created)
    assert read(file).trainer.get_model().layers[0].out_features == 8
