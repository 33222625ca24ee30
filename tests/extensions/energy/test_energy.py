"""The energy of a job: counters of the processors, over restarts and processes, and the cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import EnergyCallback, SaveTrainingStateCallback
from pytorch_accel_lite.extensions.energy import energy_callback
from tests.ranks import rank, shared_folder
from tests.small_models import adamw_trainer, listener, make_data, make_model

KWH = 3_600_000_000_000  # microjoules


def counters(folder: Path, driver: str = "intel-rapl", **values: int) -> Path:
    """A folder as Linux has it, with a counter of each name."""
    for number, (name, value) in enumerate(values.items()):
        counter = folder / f"{driver}:{number}"
        counter.mkdir(parents=True)
        (counter / "name").write_text(f"{name}\n")
        (counter / "energy_uj").write_text(f"{value}\n")
        (counter / "max_energy_range_uj").write_text(f"{10 * KWH - 1}\n")
    return folder


def trained(folder: Path, epochs: int, callbacks: Any = (), resume_from: Any = None, **options: Any) -> Trainer:
    """A run each of whose epochs takes a kilowatt-hour by each counter."""

    def work(trainer: Trainer, **_: Any) -> None:
        if trainer.accelerator.is_local_main_process:
            for path in folder.glob("*/energy_uj"):
                path.write_text(str((int(path.read_text()) + KWH) % (10 * KWH)))

    callbacks = [listener(on_train_epoch_end=work), EnergyCallback(powercap=folder, **options), *callbacks]
    trainer = adamw_trainer(make_model(), seed=1, callbacks=callbacks)
    trainer.train(make_data(), epochs, resume_from=resume_from)
    return trainer


def test_energy_of_processors_and_memory_is_priced(tmp_path, capsys):
    # One of them begins again at 0; psys includes the others.
    folder = counters(tmp_path, **{"package-0": 9 * KWH, "dram": 0, "psys": 0})
    trainer = trained(folder, 2, price=0.3, overhead=1.5)
    assert trainer.goodput.to_dict()["used"] == pytest.approx({"energy_kwh": 6.0, "cost_EUR": 1.8})
    assert trainer.run_history.get_metric_values("energy_kwh") == pytest.approx([3.0, 6.0])
    assert "Energy: 6 kWh (processors 6 kWh), 1.80 EUR." in capsys.readouterr().out


def test_counters_that_two_drivers_show_are_read_once(tmp_path):
    counters(tmp_path, **{"package-0": 0, "core": 0})
    counters(tmp_path, "intel-rapl-mmio", **{"package-0": 0, "dram": 0})
    assert trained(tmp_path, 1).goodput.used == {"energy_kwh": 2.0}
    (tmp_path / "intel-rapl:0" / "max_energy_range_uj").unlink()  # a counter that cannot be read
    assert trained(tmp_path, 1).goodput.used == {"energy_kwh": 2.0}


def test_the_memory_of_each_processor_is_counted(tmp_path):
    for socket in range(2):
        counters(tmp_path, f"intel-rapl:{socket}", dram=0)
    assert trained(tmp_path, 1).goodput.used == {"energy_kwh": 2.0}


def test_restarts_are_counted(tmp_path):
    folder = counters(tmp_path / "powercap", **{"package-0": 0})
    saving = SaveTrainingStateCallback(tmp_path / "states", 1)
    trained(folder, 2, [saving])
    assert trained(folder, 3, [saving], resume_from="latest").goodput.used == {"energy_kwh": 3.0}


def test_a_counter_that_wraps_in_an_evaluation_is_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(energy_callback, "_SECONDS", 0.0)
    path = counters(tmp_path, **{"package-0": 0}) / "intel-rapl:0" / "energy_uj"
    work = listener(on_eval_step_start=lambda _: path.write_text(str((int(path.read_text()) + 6 * KWH) % (10 * KWH))))
    trainer = adamw_trainer(make_model(), callbacks=[work, EnergyCallback(powercap=tmp_path)])
    trainer.train(make_data(), 1, make_data(), per_device_batch_size=2)
    assert trainer.goodput.used == {"energy_kwh": 18.0}


def test_inference_without_training_reads_no_counters(tmp_path):
    trainer = adamw_trainer(make_model(), callbacks=[EnergyCallback(powercap=counters(tmp_path, dram=0))])
    trainer.predict(make_data())
    assert len(trainer.evaluate(make_data())) == 1
    assert trainer.goodput.used == {}


def test_a_state_with_a_number_of_epochs_is_loaded():
    energy = EnergyCallback()
    energy.load_state_dict({"joules": {"GPUs": 3.0}, "epochs": 2})
    assert energy.state_dict() == {"joules": {"GPUs": 3.0}}


def test_energy_is_not_recorded_without_counters(tmp_path, capsys):
    trainer = trained(tmp_path, 1, price=0.3)
    assert "EnergyCallback measures nothing" in capsys.readouterr().out
    assert "used" not in trainer.goodput.to_dict()
    assert "energy_kwh" not in trainer.run_history.get_metric_names()


def on_ranks() -> dict[str, float]:
    with shared_folder() as folder:
        if rank() == 0:
            counters(folder, **{"package-0": 0})
        dist.barrier()
        return trained(folder, 2).goodput.used


@pytest.mark.processes
def test_the_energy_of_a_machine_is_counted_once(two_ranks):
    for used in two_ranks.run(on_ranks):
        assert used == {"energy_kwh": 2.0}
