"""Checkpoints before and after each decay, and runs that continue from them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accel_lite import StopTrainingError, TrainerCallback
from pytorch_accel_lite.callbacks import RunPausedError, WSDCheckpointCallback
from pytorch_accel_lite.schedulers import WSDLrScheduler
from tests.launching import some_of
from tests.ranks import IN_ORDER, global_batch, shared_folder
from tests.schedules import run, saved_run
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    largest_difference,
    raises_at,
    weights,
)


def wsd() -> Any:
    """A run with a decay, one resumed from before it, and the same without a break: 8, 4 + 8 and 12 updates."""
    with shared_folder() as folder:

        def run(name: str, epochs: int, ratio: float, initial: Path | None = None) -> Any:
            model = float64_model()
            trainer = adamw_trainer(
                model, callbacks=[WSDCheckpointCallback(folder / f"wsd {name}", initial_checkpoint=initial)]
            )
            create = WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=0, decay_phase_ratio=ratio)
            batch = {"per_device_batch_size": global_batch(6), "train_dataloader_kwargs": IN_ORDER}
            trainer.train(float64_data(24), epochs, create_scheduler_fn=create, **batch)
            return weights(model)

        run("first", 2, 0.5)
        continued = run("second", 2, 0.5, folder / "wsd first" / "checkpoint_4_wsd_pre_decay.pt")
        names = sorted(path.name for path in (folder / "wsd first").iterdir())
        return {"files": names, "continued": continued, "in one go": run("whole", 3, 1 / 3)}


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*")}


THREE_DECAYS = WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=0, num_checkpoints=3, decay_phase_ratio=0.67)


@pytest.mark.sampled
@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("continuation", [False, True])
def test_every_state_even_within_a_decay_resumes_the_same_bits(tmp_path, continuation):
    create = THREE_DECAYS
    initial = None
    if continuation:
        run(THREE_DECAYS, WSDCheckpointCallback(tmp_path / "first"))
        initial = tmp_path / "first" / "checkpoint_12_wsd_post_decay.pt"
        create = partial(THREE_DECAYS, is_continuation_from_checkpoint=True)

    def checkpoints(name):
        return WSDCheckpointCallback(tmp_path / name, initial_checkpoint=initial)

    whole = saved_run(tmp_path, create, checkpoints("whole"))
    phases = {whole.scheduler.get_phase_info(n)["phase"] for n in range(1, 12)}
    assert phases == {"stable", "decay"}
    for n in some_of(range(1, 13)):
        state = tmp_path / "states" / f"update-{n:09d}"
        resumed = saved_run(tmp_path / f"from{n}", create, checkpoints(f"again{n}"), resume_from=state)
        assert resumed.noting.rates == whole.noting.rates[n:]
        assert equal_weights(weights(resumed.model), weights(whole.model))
        assert resumed.scheduler.state_dict() == whole.scheduler.state_dict()
        due = {name for name in files(tmp_path / "whole") if int(name.split("_")[1]) >= n}
        assert files(tmp_path / f"again{n}") == due  # also what it was killed before saving, after this very update


def test_checkpoints_hold_the_model_before_and_after_each_decay(tmp_path):
    trainer = run(THREE_DECAYS, WSDCheckpointCallback(tmp_path, save_optimizer=False, save_scheduler=False))
    pre, post = [1, 4, 8], [3, 6, 12]
    assert [period["pre_decay_step"] for period in trainer.scheduler.get_decay_info()] == pre
    names = {f"checkpoint_{n}_wsd_pre_decay.pt": n for n in pre} | {
        f"checkpoint_{n}_wsd_post_decay.pt": n for n in post
    }
    assert files(tmp_path) == set(names)
    for name, n in names.items():
        checkpoint = torch.load(tmp_path / name, weights_only=True)
        assert equal_weights(checkpoint["model_state_dict"], trainer.noting.weights[n])
        assert checkpoint["step"] == n
        kept = {"optimizer_state_dict", "scheduler_state_dict"} & checkpoint.keys()
        assert len(kept) == (2 if "pre" in name else 0)


QUARTER = WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=1, decay_phase_ratio=0.25)


CONTINUED = partial(QUARTER, is_continuation_from_checkpoint=True)


def test_continuing_before_a_decay_extends_the_stable_phase(tmp_path):
    run(QUARTER, WSDCheckpointCallback(tmp_path / "first"))
    initial = tmp_path / "first" / "checkpoint_9_wsd_pre_decay.pt"
    trainer = run(CONTINUED, WSDCheckpointCallback(tmp_path / "second", initial_checkpoint=initial))
    one_go = run(WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=1, decay_phase_ratio=1 / 7), epochs=7)
    assert one_go.scheduler.get_decay_info()[0]["pre_decay_step"] == 9 + 9
    assert trainer.noting.rates == one_go.noting.rates[9:]
    assert equal_weights(weights(trainer.model), weights(one_go.model))
    assert "checkpoint_9_wsd_pre_decay.pt" in files(tmp_path / "second")


def test_continuing_after_a_decay_starts_at_the_stable_rate(tmp_path):
    first = run(QUARTER, WSDCheckpointCallback(tmp_path / "first"))
    assert first.optimizer.param_groups[0]["lr"] < 1e-6
    initial = tmp_path / "first" / "checkpoint_12_wsd_post_decay.pt"
    trainer = run(CONTINUED, WSDCheckpointCallback(tmp_path / "second", initial_checkpoint=initial), epochs=2)
    # What one run with two decays does. Adam's moments go on too, and its count of steps.
    within = partial(WSDLrScheduler, checkpoint_steps=[12, 18], num_warmup_steps=3, decay_phase_ratio=0.25)
    one_go = run(within, epochs=6)
    assert trainer.noting.rates == one_go.noting.rates[12:]
    assert trainer.noting.rates[:5] == [0.1] * 5
    assert equal_weights(weights(trainer.model), weights(one_go.model))


def test_without_states_only_the_weights_are_taken_over(tmp_path):
    first = run(QUARTER, WSDCheckpointCallback(tmp_path / "first", save_optimizer=False, save_scheduler=False))
    initial = tmp_path / "first" / "checkpoint_12_wsd_post_decay.pt"
    seen = []

    class Looks(TrainerCallback):
        def on_train_epoch_start(self, trainer, **kwargs):
            seen.append((weights(trainer.model), dict(trainer.optimizer.state_dict()["state"])))

    callback = WSDCheckpointCallback(tmp_path / "second", initial_checkpoint=initial)
    trainer = run(CONTINUED, callback, Looks())
    assert equal_weights(seen[0][0], weights(first.model))
    assert not seen[0][1]
    assert trainer.noting.rates[0] == 0.1


def test_a_continuation_of_a_continuation_begins_at_0_too(tmp_path):
    run(QUARTER, WSDCheckpointCallback(tmp_path / "0"))
    for number in (1, 2):
        initial = tmp_path / f"{number - 1}" / "checkpoint_9_wsd_pre_decay.pt"
        trainer = run(CONTINUED, WSDCheckpointCallback(tmp_path / f"{number}", initial_checkpoint=initial))
        assert trainer.noting.rates[:9] == [0.1] * 9
        assert trainer.scheduler.num_updates == 12


def test_a_run_that_ends_within_a_decay_saves_its_last_model(tmp_path):
    create = partial(WSDLrScheduler, total_steps=20, decay_phase_ratio=0.5)
    trainer = run(create, WSDCheckpointCallback(tmp_path))
    assert files(tmp_path) == {"checkpoint_10_wsd_pre_decay.pt", "checkpoint_12_wsd_post_decay.pt"}
    saved = torch.load(tmp_path / "checkpoint_12_wsd_post_decay.pt", weights_only=True)["model_state_dict"]
    assert equal_weights(saved, weights(trainer.model))


@pytest.mark.parametrize(
    ("error", "saved"), [(StopTrainingError, {"checkpoint_11_wsd_post_decay.pt"}), (RunPausedError, set())]
)
def test_a_run_stopped_within_a_decay_saves_its_last_model(tmp_path, error, saved):
    trainer = run(QUARTER, WSDCheckpointCallback(tmp_path), raises_at(11, error("enough")))
    assert trainer.progress.update == 11
    assert files(tmp_path) == {"checkpoint_9_wsd_pre_decay.pt"} | saved
    for name in saved:
        last = torch.load(tmp_path / name, weights_only=True)["model_state_dict"]
        assert equal_weights(last, weights(trainer.model))


def test_invalid_starts_of_wsd_checkpoints_are_explained(tmp_path):
    with pytest.raises(ValueError, match="needs a WSDLrScheduler, not None: pass create_scheduler_fn=WSDLrScheduler"):
        run(None, WSDCheckpointCallback(tmp_path))
    run(QUARTER, WSDCheckpointCallback(tmp_path))
    for name, error, message in (
        ("checkpoint_9_wsd_pre_decay.pt", ValueError, "would be overwritten by this run. Choose a save_dir other"),
        ("", FileNotFoundError, "has no weights as safetensors"),
        ("missing.pt", FileNotFoundError, "There is no checkpoint at"),
    ):
        with pytest.raises(error, match=message):
            run(CONTINUED, WSDCheckpointCallback(tmp_path, initial_checkpoint=tmp_path / name))


@pytest.mark.thorough
def test_wsd_checkpoints_are_continued_on_several_processes(ranks):
    for found in ranks(wsd):
        assert found["files"] == ["checkpoint_4_wsd_pre_decay.pt", "checkpoint_8_wsd_post_decay.pt"]
        # Not to the bit: the first step of a job sums gradients in another order than the later ones.
        assert largest_difference(found["continued"], found["in one go"]) < 1e-12
        assert equal_weights(found["continued"], ranks(wsd)[0]["continued"])


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_the_end_of_a_run_of_a_few_updates_is_saved(tmp_path, updates):
    create = WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=0)
    run(create, WSDCheckpointCallback(tmp_path), epochs=None, max_num_train_steps=updates)
    assert f"checkpoint_{updates}_wsd_post_decay.pt" in files(tmp_path)


def test_the_end_of_a_run_without_a_decay_is_saved(tmp_path):
    run(WSDLrScheduler.create_scheduler_fn(decay_phase_ratio=0), WSDCheckpointCallback(tmp_path))
    assert "checkpoint_12_wsd_pre_decay.pt" in files(tmp_path)
