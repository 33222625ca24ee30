"""Errors in a user's data, functions, models and callbacks: their tracebacks are kept, and some are explained."""

from __future__ import annotations

import contextlib
import io
import sys
import traceback

import pytest

from pytorch_accel_lite.callbacks import DEFAULT_CALLBACKS
from tests.small_models import Broken, listener, make_model, make_trainer, notes_of_error, train


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", [None, 0])
def test_an_error_in_a_training_dataset_keeps_its_traceback(workers, seed):
    trainer = make_trainer(seed=seed)
    with pytest.raises(OSError, match="scan 4 is unreadable") as caught:
        train(trainer, train_dataset=Broken(), train_dataloader_kwargs={"num_workers": workers, "shuffle": False})
    text = "".join(traceback.format_exception(caught.value))
    assert 'raise OSError(f"scan {index} is unreadable")' in text
    assert "small_models.py" in text
    assert "__getitem__" in text
    train(trainer)
    assert trainer.progress.epochs_completed == 1


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_an_error_in_an_evaluated_dataset_keeps_its_traceback(method):
    trainer = make_trainer()
    with pytest.raises(OSError, match="scan 4 is unreadable") as caught:
        getattr(trainer, method)(Broken(), dataloader_kwargs={"num_workers": 0})
    assert 'raise OSError(f"scan {index} is unreadable")' in "".join(traceback.format_exception(caught.value))


def broken(*args, **kwargs):
    raise LookupError("not here")


@pytest.mark.parametrize(("of_trainer", "of_train"), [
    ({}, {"collate_fn": broken, "train_dataloader_kwargs": {"num_workers": 0}}),
    ({}, {"create_scheduler_fn": broken}),
    ({"callbacks": [listener(on_optimizer_step_end=broken)]}, {}),
    ({"loss_func": broken}, {}),
], ids=["collate", "schedule", "event", "loss"])  # fmt: skip
def test_an_error_in_the_users_functions_keeps_its_traceback(of_trainer, of_train):
    with pytest.raises(LookupError, match=r"^not here") as caught:
        train(make_trainer(**of_trainer), **of_train)
    assert "in broken" in "".join(traceback.format_exception(caught.value))


def test_an_error_in_a_model_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        train(make_trainer(model=make_model(features=5)))
    assert "linear" in "".join(traceback.format_exception(caught.value))


def test_an_error_is_not_masked_by_an_output_that_nobody_reads(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    def fail(trainer, **kwargs):
        monkeypatch.setattr(sys, "stdout", Closed())
        raise ValueError("the error itself")

    def fail_too(trainer, **kwargs):
        raise RuntimeError("in the ending event")

    with pytest.raises(ValueError, match="the error itself"):
        train(make_trainer([listener(on_train_step_end=fail, on_training_run_end=fail_too)]))


def test_a_key_that_a_step_does_not_return_is_explained():
    reads = listener(on_train_step_end=lambda trainer, batch_output, **kwargs: batch_output["logits"])
    with pytest.raises(KeyError, match=r"^'logits'") as caught:
        train(make_trainer([reads]))
    assert "batch_output has the keys 'loss', 'model_outputs', 'batch_size'." in notes_of_error(caught.value)


def test_an_evaluation_metric_is_absent_before_the_first():
    looks = listener(on_train_epoch_end=lambda trainer: trainer.run_history.get_latest_metric("eval_loss_epoch"))
    with pytest.raises(ValueError, match="There has been no evaluation yet, which follows on_train_epoch_end"):
        train(make_trainer([looks]), eval_dataset=True)


@pytest.mark.parametrize("event", ["on_train_epoch_end", "on_training_run_epoch_end"])
def test_text_that_the_output_cannot_encode_ends_no_run(event):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    with contextlib.redirect_stdout(output):
        prints = listener(**{event: lambda trainer: trainer.print("in", "100 µs", sep="\t")})
        train(make_trainer([prints, *DEFAULT_CALLBACKS]))
    assert b"\nin\t100 \\xb5s\n" in b"\n" + output.buffer.getvalue()
