"""Measuring the energy that a job takes."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from pathlib import Path

from pytorch_accel_lite.extending import TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_range, check_text
from pytorch_accel_lite.extension_tools.data_and_batches import BatchData, BatchOutput
from pytorch_accel_lite.extension_tools.plain_types import StateDict
from pytorch_accel_lite.extensions.energy.meters import Meter, find_meters

_JOULES = 3.6e6  # in a kilowatt-hour
_SECONDS = 60.0  # between readings: processor counters wrap around after many minutes


class EnergyCallback(TrainerCallback):
    """Measure the energy of the processors and GPUs of a job, and what it costs.

    After each epoch, ``energy_kwh`` is the energy that the job has taken so far, including its restarts, each up to its
    last complete epoch. It is also in ``trainer.goodput.used``, and in the last line that a run prints. The energy of
    processors comes from Linux's powercap, which often only root may read, and includes that of other programs. The
    energy of GPUs comes from NVML, with the package nvidia-ml-py. If neither can be read, a line says so, and nothing
    is recorded.

    Args:
        price: price of a kilowatt-hour
        currency: its currency
        overhead: factor for the energy of the machine room, such as cooling (its PUE)
        powercap: folder with the counters of the processors
    """

    affects_training = False

    def __init__(
        self,
        price: float | None = None,
        currency: str = "EUR",
        *,
        overhead: float = 1.0,
        powercap: str | os.PathLike[str] = "/sys/class/powercap",
    ) -> None:
        self.price = None if price is None else check_range("price", price)
        self.currency = check_text("currency", currency)
        self.overhead = check_range("overhead", overhead, above=0)
        self.powercap = Path(powercap)
        self._meters: dict[str, list[Meter]] = {}
        self._read_at = math.inf  # until training begins: an evaluation alone reads nothing
        self._clear()

    def _clear(self) -> None:
        self._joules: Counter[str] = Counter()  # the energy of the job
        self._own: Counter[str] = Counter()  # the energy of this process that is not in _joules yet

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        """Find the counters."""
        self._clear()
        first_on_machine = trainer.accelerator.is_local_main_process
        self._meters = find_meters(trainer.device, self.powercap if first_on_machine else None)
        self._read_at = time.monotonic()
        if not any(trainer.all_gather_object(bool(self._meters))):
            trainer.print(
                f"EnergyCallback measures nothing: {self.powercap} has no counters that this user may read, and there "
                "is no GPU whose counter NVML (package nvidia-ml-py) reads."
            )

    def on_train_step_end(
        self, trainer: TrainerLike, batch: BatchData, batch_output: BatchOutput, **kwargs: object
    ) -> None:
        """Read the counters once a minute, also in long evaluations and predictions."""
        if time.monotonic() - self._read_at >= _SECONDS:
            self._read()

    on_eval_step_end = on_predict_step_end = on_train_step_end

    def _read(self) -> None:
        self._read_at = time.monotonic()
        for kind, meters in self._meters.items():
            self._own[kind] += self.overhead * sum(meter() for meter in meters)  # type: ignore[assignment]

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        """Add up the energy that the processes have measured."""
        self._read()
        for own in trainer.all_gather_object(dict(self._own)):
            self._joules.update(own)
        self._own.clear()
        if self._joules:
            used = trainer.run.goodput.used
            used["energy_kwh"] = sum(self._joules.values()) / _JOULES
            if self.price is not None:
                used[f"cost_{self.currency}"] = used["energy_kwh"] * self.price
            trainer.run_history.update_metric("energy_kwh", used["energy_kwh"])

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        """Print the energy, and what it costs."""
        if self._joules:
            parts = ", ".join(f"{kind} {joules / _JOULES:.3g} kWh" for kind, joules in self._joules.items())
            energy = sum(self._joules.values()) / _JOULES
            cost = "" if self.price is None else f", {energy * self.price:.2f} {self.currency}"
            trainer.print(f"Energy: {energy:.3g} kWh ({parts}){cost}.")

    def state_dict(self) -> StateDict:
        """Return the energy of the job."""
        return {"joules": dict(self._joules)}

    def load_state_dict(self, state: StateDict) -> None:
        """Load the state returned by ``state_dict()``."""
        self._joules = Counter(state["joules"])
