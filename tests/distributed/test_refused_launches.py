"""Launches that Accelerate does not see, and parallelism that is not supported."""

from __future__ import annotations

import pytest
from accelerate import Accelerator
from accelerate.utils import DistributedType

from tests.launching import run_elastic_script
from tests.small_models import make_trainer, train

IGNORES_FSDP = r"FSDP plugin.*would ignore it.*leave the plugin out"


@pytest.mark.parametrize(("name", "value", "message"), [
    pytest.param("WORLD_SIZE", "2", r"WORLD_SIZE=2.*sees 1.*PartialState.*cpu=True", id="world size"),
    *(pytest.param("ACCELERATE_USE_FSDP", value, IGNORES_FSDP, id=f"FSDP={value}") for value in ("true", "1", "True")),
])  # fmt: skip
def test_variables_that_accelerate_has_ignored_are_refused(monkeypatch, name, value, message):
    accelerator = Accelerator()
    monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=message):
        make_trainer(accelerator=accelerator)


@pytest.mark.parametrize(("sizes", "fsdp", "message"), [
    ({"cp_size": 2}, False, r"has cp_size=2: several processes would share the samples.*not supported"),
    ({"tp_size": 2}, True, r"tp_size=2 beside FSDP, which Accelerate cannot combine.*distributed_config"),
], ids=["context", "tensor beside FSDP"])  # fmt: skip
def test_unsupported_parallelism_is_an_error(sizes, fsdp, message, no_accelerator):
    parallelism_config = pytest.importorskip(
        "accelerate.parallelism_config", reason="ParallelismConfig needs accelerate 1.10"
    )
    accelerator = Accelerator(cpu=True)
    accelerator.state.parallelism_config = parallelism_config.ParallelismConfig(**sizes)
    if fsdp:
        accelerator.state.distributed_type = DistributedType.FSDP
    with pytest.raises(ValueError, match=message):
        make_trainer(accelerator=accelerator)


def test_variables_of_one_process_without_fsdp_are_accepted(monkeypatch):
    accelerator = Accelerator()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    monkeypatch.setenv("WORLD_SIZE", "1")
    trainer = make_trainer(accelerator=accelerator)
    train(trainer)
    assert trainer.progress.update == 3


@pytest.mark.processes
def test_a_launch_that_accelerate_does_not_see_is_refused():
    done = run_elastic_script(2, "tests/scripts/refused.py")
    assert done.returncode == 0, done.stdout
    if done.stdout.count("made on 2 processes") == 2:
        pytest.skip("old versions of accelerate see the processes all the same")
    assert done.stdout.count("RuntimeError: The launcher started WORLD_SIZE=2 processes, but Accelerate sees 1") == 2
    assert "created before the trainer, by an Accelerator or a PartialState" in done.stdout
