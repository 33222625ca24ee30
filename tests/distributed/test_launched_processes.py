"""Launches that Accelerate does not see, and parallelism that is not supported."""

from __future__ import annotations

import pytest
from accelerate import Accelerator
from accelerate.utils import DistributedType

from tests.small_models import make_trainer, train

IGNORES_FSDP = r"FSDP plugin.*would ignore it.*leave the plugin out"


@pytest.mark.parametrize(("name", "value", "message"), [
    ("WORLD_SIZE", "2", r"WORLD_SIZE=2.*sees 1.*PartialState.*cpu=True"),
    *(("ACCELERATE_USE_FSDP", value, IGNORES_FSDP) for value in ("true", "1", "True")),
])  # fmt: skip
def test_a_launcher_that_accelerate_did_not_notice_is_refused(monkeypatch, name, value, message):
    accelerator = Accelerator()
    monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=message):
        make_trainer(accelerator=accelerator)


@pytest.mark.parametrize(("sizes", "fsdp", "message"), [
    ({"cp_size": 2}, False, r"has cp_size=2: several processes would share the samples.*not supported"),
    ({"tp_size": 2}, True, r"tp_size=2 beside FSDP, which Accelerate cannot combine.*distributed_config"),
])  # fmt: skip
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


def test_a_missing_fsdp_plugin_is_no_error(monkeypatch):
    accelerator = Accelerator()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    monkeypatch.setenv("WORLD_SIZE", "1")
    trainer = make_trainer(accelerator=accelerator)
    train(trainer)
    assert trainer.progress.update == 3
