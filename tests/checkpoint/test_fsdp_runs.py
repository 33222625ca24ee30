"""Runs with weights that FSDP shards: saving unsharded, resuming, samples that fill up a step, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor

from pytorch_accel_lite import Trainer, callbacks
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.launching import CAN_SHARD, only_with_soak
from tests.scripts.resumable import CopyStates, saved_states
from tests.sharded import gathered, large_model, sharding_accelerator
from tests.small_models import adamw_trainer, equal_weights, float64_data, listener

pytestmark = [CAN_SHARD, pytest.mark.processes]


def train_saving_each_update(folder: Path, accelerator: Accelerator | None, resume_from: Any = None) -> Trainer:
    model = large_model()
    saving = SaveTrainingStateCallback(folder / "states", 1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    callbacks = [saving, CopyStates(folder)]
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks, accelerator=accelerator, seed=3)
    trainer.train(float64_data(22), 2, float64_data(9), 3, resume_from=resume_from)
    return trainer


def train_on_twelve_samples(accelerator: Accelerator, callbacks: list[Any], **kwargs: Any) -> Trainer:
    model = large_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks, accelerator=accelerator, seed=3)
    trainer.train(float64_data(12), 1, per_device_batch_size=3, **kwargs)
    return trainer


def whole_run_equal_to_each_resumed_one(folder: Path) -> Any:
    """The final weights, gathered, and the losses, with which each run that is resumed from a state ends, too."""
    accelerator = sharding_accelerator()
    trainer = train_saving_each_update(folder / "whole", accelerator)
    assert trainer.accelerator.distributed_type == DistributedType.FSDP
    assert any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    expected = gathered(trainer.model.state_dict())
    losses = trainer.run_history.to_dict()
    trainer.save_model(folder / "model.safetensors")
    trainer.save_checkpoint(folder / "model.pt")
    for copy in sorted((folder / "whole" / "copies").glob("*/update-*")):
        again = train_saving_each_update(folder / f"again-{copy.parent.name}", accelerator, copy)
        assert equal_weights(gathered(again.model.state_dict()), expected), copy
        assert again.run_history.to_dict() == losses
    return expected, losses


@only_with_soak
def test_sharded_weights_are_saved_unsharded_and_resumed(tmp_path, job):
    expected, history = job(2).run(whole_run_equal_to_each_resumed_one, tmp_path)[0]
    assert equal_weights(safetensors.torch.load_file(tmp_path / "model.safetensors"), expected)
    model = large_model()
    trainer = adamw_trainer(model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))
    trainer.load_checkpoint(tmp_path / "model.pt")  # the optimizer's state too
    assert equal_weights(model.state_dict(), expected)
    train_saving_each_update(tmp_path / "unsharded", None, tmp_path / "whole/copies/004-step/update-000000004")
    resumed = train_saving_each_update(tmp_path / "finished", None, saved_states(tmp_path / "whole")[-1])
    assert equal_weights(resumed.model.state_dict(), expected)
    assert resumed.run_history.to_dict() == history


def inference_on_seven_samples() -> Any:
    """Weights, and loss and predictions with them: one process has no sample in the last step."""
    accelerator, data = sharding_accelerator(), float64_data(7)
    trainer = train_on_twelve_samples(accelerator, [])
    weights = gathered(trainer.model.state_dict())
    loss = trainer.evaluate(data, per_device_batch_size=3)["evaluation_loss"]
    return weights, loss, trainer.predict(data, per_device_batch_size=3)


def test_a_filler_sample_of_sharded_ranks_counts_zero(two_ranks):
    data, model = float64_data(7), large_model().eval()
    for loaded, loss, predictions in two_ranks.run(inference_on_seven_samples):
        model.load_state_dict(loaded)
        outputs = model(data.tensors[0]).detach()
        torch.testing.assert_close(predictions, outputs)
        expected = (outputs - data.tensors[1]).square()[:, 0].tolist()
        assert loss == pytest.approx(sum(expected) / 7)


def errors_of_unsupported_features() -> dict[str, str]:
    """The errors for features that sharded weights do not support."""
    accelerator, said = sharding_accelerator(), {}
    for name, callback in {
        "rewrap": listener(on_train_epoch_start=Trainer.rewrap_model),
        "skip": callbacks.SkipFailedBatchesCallback(),
    }.items():
        try:
            train_on_twelve_samples(accelerator, [callback])
        except (ValueError, RuntimeError) as error:
            said[name] = str(error)
    return said


@pytest.mark.extension("failed_batches")
def test_features_unsupported_by_sharded_weights_are_refused(two_ranks):
    for said in two_ranks(errors_of_unsupported_features):
        assert "cannot change in the middle of this run: the model is sharded (FSDP)" in said["rewrap"]
        assert "SkipFailedBatchesCallback does not work with sharded weights" in said["skip"]


def error_of_a_state_of_fsdp1(folder: Path) -> str | None:
    model = large_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, nn.MSELoss(), optimizer, [], accelerator=sharding_accelerator(version=1))
    try:
        trainer.save_training_state(folder / "state")
    except ValueError as error:
        return str(error)
    return None


def test_a_state_of_fsdp1_is_refused(tmp_path, two_ranks):
    for message in two_ranks.run(error_of_a_state_of_fsdp1, tmp_path):
        assert message.startswith("Training states are not supported with FSDP: ")
        assert "Use FSDP with fsdp_version=2" in message
