"""What SpeeChain has: seeds, several datasets, failing batches, settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pytorch_accel_lite.callbacks as shipped
from pytorch_accel_lite import Trainer, callbacks
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.repository.feature_comparison.noted_runs import HERE
from tests.repository.feature_comparison.rows import row
from tests.small_models import equal_weights, listener, make_data, make_model, make_trainer, train, weights


@row("a seed", "deterministic kernels", "seeds are set again for each epoch")
def test_a_seed_determines_the_bits_and_the_order():
    def run(**kwargs: Any) -> Any:
        noisy = nn.Sequential(make_model(), nn.Dropout())
        with torch.random.fork_rng():
            torch.rand(1)
            return train(make_trainer(model=noisy, **kwargs), 2, train_dataloader_kwargs={})

    first, second, other = run(seed=0), run(seed=0, deterministic=True), run(seed=1)
    assert equal_weights(weights(first.model), weights(second.model))
    assert not equal_weights(weights(first.model), weights(other.model))
    assert not torch.are_deterministic_algorithms_enabled()
    orders: list[Any] = []
    note = listener(on_train_step_start=lambda trainer: orders.append(trainer.batch_indices))
    train(make_trainer([note], seed=0), 2, batch_size=6, train_dataloader_kwargs={})
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


@row("cuDNN on or off, and its benchmark", "workers for training, validation and test", "the number of epochs")
def test_flags_of_cudnn_hold_during_a_run():
    seen: list[Any] = []

    def note(trainer: Any) -> None:
        workers = trainer._train_dl_kwargs["num_workers"], trainer._eval_dl_kwargs["num_workers"]
        seen.append((torch.backends.cudnn.benchmark, workers))

    options = {"train_dataloader_kwargs": {"num_workers": 1}, "eval_dataloader_kwargs": {"num_workers": 0}}
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        trainer = train(make_trainer([listener(on_training_run_start=note)]), 2, eval_dataset=True, **options)
    assert seen == [(True, (1, 0))]
    assert torch.backends.cudnn.benchmark is False
    assert trainer.progress.epochs_completed == 2


@row("all processes draw the same numbers")
def test_a_seed_set_at_the_start_of_a_run_decides_its_numbers():
    class Same(Trainer):
        def training_run_start(self):
            torch.manual_seed(1234)

    def run(seed: int) -> Any:
        model = nn.Sequential(make_model(), nn.Dropout())
        return weights(train(make_trainer(model=model, trainer_class=Same, seed=seed)).model)

    assert equal_weights(run(0), run(1))


@row("the kind of norm", "gradients of several batches in an update")
def test_an_overridden_method_clips_by_another_norm():
    largest: list[float] = []

    class Largest(Trainer):
        def clip_gradients(self):
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1e-3, norm_type=torch.inf)
            largest.append(max(p.grad.abs().max().item() for p in self.model.parameters()))

    train(make_trainer(trainer_class=Largest), gradient_accumulation_steps=3)
    assert largest == [pytest.approx(1e-3, rel=1e-2)]


@row("a batch from each of several datasets, until the shortest ends")
def test_a_step_reads_a_batch_of_each_dataset():
    read: list[tuple[int, int]] = []

    class Both(Trainer):
        def calculate_train_batch_loss(self, batch):
            read.append((len(batch["a"][0]), len(batch["b"][0])))
            return super().calculate_train_batch_loss(batch["a"])

    train(make_trainer(trainer_class=Both), train_dataset={"a": make_data(4), "b": make_data(6)})
    assert read == [(2, 2), (2, 2)]


class Unreadable(torch.utils.data.Dataset[Any]):
    """One of its samples cannot be read."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        if index == 4:
            raise OSError("unreadable")
        return make_data()[index]


@row("a batch that fails is skipped in training", "callbacks are told what has failed", "an empty batch")
@pytest.mark.extension("failed_batches")
def test_a_failing_batch_is_skipped_on_request():
    heard: list[Any] = []
    note = listener(on_train_batch_skipped=lambda trainer, failures, error, **kwargs: heard.append((failures, error)))
    skips = [callbacks.SkipFailedBatchesCallback(), note]
    trainer = train(make_trainer(skips), train_dataset=Unreadable(), train_dataloader_kwargs=HERE)
    assert trainer.progress.update == 2
    assert len(heard) == 1
    assert "unreadable" in str(heard[0][1])
    with pytest.raises(OSError, match=r"^unreadable"):
        train(make_trainer(), train_dataset=Unreadable(), train_dataloader_kwargs=HERE)

    def collate(samples: Any) -> Any:
        return None if heard.append(0) or len(heard) == 2 else torch.utils.data.default_collate(samples)

    with pytest.raises(TypeError, match="must be Tensor, not NoneType"):
        train(make_trainer(), collate_fn=collate, train_dataset=[*make_data()], train_dataloader_kwargs=HERE)


@row("processes that write snapshots", "snapshots of outputs, every so often")
@pytest.mark.extension("reports")
def test_states_and_outputs_are_kept_at_intervals(tmp_path, capsys):
    saver = SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1, asynchronous=True)
    shown = shipped.ShowOutputsCallback(lambda model: f"of a {type(model).__name__}", every="2 updates")
    train(make_trainer([shown, saver]), 2)
    assert len([*tmp_path.glob("update-*")]) == 2
    assert "of a Sequential" in capsys.readouterr().out


@pytest.mark.extension("model_summary")
@row("a summary of the model")
def test_the_summary_of_a_model_names_its_layers(trainer):
    pytest.importorskip("torchinfo")
    assert "Linear" in str(trainer.summary(make_data(), 2))


@row("settings that share arguments")
def test_yaml_settings_share_arguments():
    pytest.importorskip("jsonargparse")
    load_yaml = pytest.importorskip("pytorch_accel_lite.extensions.experiment").load_yaml

    found: Any = load_yaml("greedy: &shared {max_length: 200}\nbeam: {<<: *shared, beam_width: 8}")
    assert found["beam"] == {"max_length": 200, "beam_width": 8}
