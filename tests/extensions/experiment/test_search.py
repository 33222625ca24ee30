"""Search with Optuna: values from a space, on one process and several."""

from __future__ import annotations

import optuna
import pytest

from pytorch_accel_lite.experiment import Experiment, suggest_overrides
from tests.ranks import rank

SPACE = {
    "optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True},
    "model.width": {"low": 2, "high": 8, "step": 2},
    "optimizer": {"choices": ["SGD", "AdamW"]},
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def test_a_search_space_gives_values_of_the_right_type():
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    found = [suggest_overrides(study.ask(), SPACE) for _ in range(20)]
    assert all(1e-4 <= values["optimizer.lr"] <= 1e-1 for values in found)
    assert {values["model.width"] for values in found} == {2, 4, 6, 8}
    assert {values["optimizer"] for values in found} == {"SGD", "AdamW"}
    stepped = [suggest_overrides(study.ask(), {"p": {"low": 0, "high": 1, "step": 0.25}})["p"] for _ in range(30)]
    assert set(stepped) == {0.0, 0.25, 0.5, 0.75, 1.0}
    for wrong in ({"low": 1, "high": 5, "step": "2"}, {"low": "1e-4", "high": 1}, {"lo": 1}):
        with pytest.raises(ValueError, match=r"space\['x'\]=\{'lo.* must have choices, or numbers for low and high"):
            suggest_overrides(study.ask(), {"x": wrong})


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("first", ["bf16", "no"])
def test_a_trial_does_not_take_over_the_precision_of_another(first, tmp_path, no_accelerator):
    pytest.importorskip("jsonargparse")
    (tmp_path / "small.yaml").write_text(
        "model: tests.extensions.experiment.parts.Net\nloss_func: MSELoss\noptimizer: AdamW\n"
        "data: {train: tests.extensions.experiment.parts.load_data}\n"
    )
    with_bf16 = {"accelerator.mixed_precision": "bf16"}
    trials = [with_bf16, {}] if first == "bf16" else [{}, with_bf16]
    trainer = Experiment.from_file(tmp_path / "small.yaml", trials[0]).trainer
    assert trainer.accelerator.mixed_precision == first
    with pytest.raises(ValueError, match=r"already computes in bf16|already been initialized"):
        _ = Experiment.from_file(tmp_path / "small.yaml", trials[1]).trainer
    assert Experiment.from_file(tmp_path / "small.yaml", trials[0]).trainer.accelerator.mixed_precision == first


def suggested() -> dict[str, float]:
    """The overrides that a rank gets."""
    trial = optuna.create_study().ask() if rank() == 0 else None
    return suggest_overrides(trial, {"optimizer.lr": {"low": 0.1, "high": 1.0}}, "runs")


def test_all_ranks_get_the_values_of_the_first(two_ranks):
    first, second = two_ranks(suggested)
    assert first == second
    assert first["output_dir"] == "runs/0"
