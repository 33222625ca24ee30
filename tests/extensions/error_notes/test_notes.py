"""Notes on the errors of a run: where it failed, on which batch, and what to do."""

from __future__ import annotations

import os
import re
import signal
import traceback
from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from pytorch_accel_lite import CallbackHandler, Trainer, TrainerCallback, callbacks
from pytorch_accel_lite.callbacks import StepBasedEvaluationCallback
from tests.launching import some_of
from tests.ranks import IN_ORDER, rank
from tests.small_models import (
    adamw_trainer,
    float64_data,
    float64_model,
    listener,
    make_data,
    make_model,
    make_trainer,
    train,
)

N = 6
INPUTS = torch.randn(N, 4)
TARGETS = torch.randn(N, 1)
CLASSES = torch.tensor([0, 1, 2] * 2)


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an error, without the breaks within their lines."""
    assert max(len(line) for note in error.__notes__ for line in note.splitlines()) <= 80
    return [note.replace("\n    ", " ") for note in error.__notes__]


def note_of(error: BaseException) -> str:
    (note,) = notes_of(error)
    return note


def failure(trainer: Trainer, *data: Any, **kwargs: Any) -> Exception:
    """Train on tensors, or on a dataset, and return the error."""
    dataset = TensorDataset(*data) if isinstance(data[0], torch.Tensor) else data[0]
    with pytest.raises(Exception, match=r".") as caught:
        train(trainer, train_dataset=dataset, **kwargs)
    return caught.value


def advice(model: nn.Module, loss_func: Any, *data: Any, **kwargs: Any) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    note = note_of(failure(make_trainer(model=model, loss_func=loss_func, optimizer=optimizer), *data, **kwargs))
    before, mark, what = note.partition("\n  What to do: ")
    assert mark, before
    assert "\n" not in what
    return what


# ------------------------------------------------------------------------------------------- where, with what


def test_the_note_of_an_error_names_step_batch_model_and_layer():
    error = failure(make_trainer(model=make_model(features=5)), *make_data().tensors)
    assert type(error) is RuntimeError
    assert str(error).endswith("mat1 and mat2 shapes cannot be multiplied (2x4 and 5x8)")
    assert note_of(error).splitlines() == [
        "In training, epoch 1, step 0:",
        "  batch: [Tensor(shape=(2, 4), float32 on cpu), Tensor(shape=(2, 1), float32 on cpu)]; samples [0, 1] of the "
        "dataset",
        "  model: Sequential, weights float32 on cpu",
        "  in Linear(in_features=5, out_features=8, bias=True), the model's '0', with Tensor(shape=(2, 4), float32 on "
        "cpu)",
    ]
    text = "".join(traceback.format_exception(error))
    assert "linear" in text
    assert text.index("cannot be multiplied") < text.index("In training, epoch 1, step 0:")


def fails_in(method: str, error: Exception) -> type[Trainer]:
    def fail(self: Trainer, *args: Any) -> Any:
        if self.progress.update == 2 or method != "calculate_train_batch_loss":
            raise error
        return getattr(Trainer, method)(self, *args)

    return type("Fails", (Trainer,), {method: fail})


SPLITS, OF_FAILED_BATCHES = {"auto_microbatch": True}, pytest.mark.extension("failed_batches")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), MemoryError()])
@pytest.mark.parametrize(
    ("method", "kwargs", "what"),
    [
        ("calculate_train_batch_loss", {}, "lower per_device_batch_size, and raise gradient_accumulation_steps"),
        pytest.param("calculate_train_batch_loss", SPLITS, "not even a single sample fits", marks=OF_FAILED_BATCHES),
        ("calculate_eval_batch_loss", {}, "pass auto_microbatch=True to train() or evaluate(), which splits"),
        pytest.param("calculate_eval_batch_loss", SPLITS, "not even a single sample fits", marks=OF_FAILED_BATCHES),
    ],
)
def test_an_out_of_memory_error_names_holders_and_remedies(method, kwargs, what, error):
    error.__dict__.clear()
    model = make_model()
    model.register_buffer("mean", torch.zeros(100))
    trainer = make_trainer(
        model=model, trainer_class=fails_in(method, error), optimizer=torch.optim.Adam(model.parameters())
    )
    note = note_of(failure(trainer, make_data(), eval_dataset=True, **kwargs))
    # 49 weights and 100 numbers in a buffer, of four bytes; two moments of each weight, and four counts of updates.
    assert "\n  memory: weights 596 B, gradients 0 B, optimizer state 408 B, beside activations\n" in note
    assert f"\n  What to do: {what}" in note


def test_the_memory_of_gradients_and_of_attributes_is_counted():
    class Fails(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.critic = nn.Linear(4, 1)
            self.critic_optimizer = torch.optim.Adam(self.critic.parameters())

        def clip_gradients(self):
            raise MemoryError

    model = nn.Linear(4, 1)
    error = failure(make_trainer(model=model, trainer_class=Fails), make_data())
    assert "\n  memory: weights 40 B, gradients 20 B, optimizer state 0 B, beside activations\n" in note_of(error)


def test_out_of_memory_in_a_prediction_has_its_own_advice():
    trainer = make_trainer(trainer_class=fails_in("calculate_predict_batch_output", MemoryError()))
    with pytest.raises(MemoryError) as caught:
        trainer.predict(make_data())
    assert note_of(caught.value).endswith("What to do: lower per_device_batch_size of predict().")


class Point(NamedTuple):
    x: torch.Tensor
    name: str


@pytest.mark.parametrize(
    ("batch", "shown"),
    [
        ({"x": INPUTS[:2], "mask": [1, 2]}, "{'x': Tensor(shape=(2, 4), float32 on cpu), 'mask': [1, 2]}"),
        (OrderedDict(x=INPUTS[:2]), "OrderedDict({'x': Tensor(shape=(2, 4), float32 on cpu)})"),
        (Point(INPUTS[:2], "a"), "Point(Tensor(shape=(2, 4), float32 on cpu), 'a')"),
        ([[INPUTS[:2], None], 3.0], "[[Tensor(shape=(2, 4), float32 on cpu), None], 3.0]"),
        ({"a": {"b": {"c": {"d": {"e": 2}}}}, "x": INPUTS[:2]}, "{'a': {'b': {'c': {'d': {...}}}}, 'x': Tensor"),
        ([INPUTS[0]] * 9, "Tensor(shape=(4,), float32 on cpu), ...]"),
    ],
)
def test_the_structure_of_a_batch_is_shown(batch, shown):
    class Fails(Trainer):
        def calculate_train_batch_loss(self, batch):
            raise KeyError("labels")

    error = failure(make_trainer(trainer_class=Fails), make_data(), collate_fn=lambda samples: batch)
    assert type(error) is KeyError
    assert shown in note_of(error)


@pytest.mark.parametrize("name", ["calculate_train_batch_loss", "backward_step", "optimizer_step", "clip_gradients"])
def test_an_error_in_any_step_method_has_a_note(name):
    def fail(self, *args):
        if self.progress.step == 1:
            raise LookupError("mine")
        return getattr(Trainer, name)(self, *args)

    error = failure(make_trainer(trainer_class=type("Own", (Trainer,), {name: fail})), make_data())
    assert note_of(error).startswith("In training, epoch 1, step 1:\n  batch: [Tensor(shape=(2, 4), float32 on cpu)")
    assert "in fail" in "".join(traceback.format_exception(error))


@pytest.mark.parametrize(("method", "phase"), [("evaluate", "evaluation"), ("predict", "prediction")])
def test_errors_of_evaluation_and_prediction_have_notes(method, phase):
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        getattr(make_trainer(model=make_model(features=5)), method)(make_data(), per_device_batch_size=2)
    assert note_of(caught.value).startswith(f"In {phase}, step 0:\n  batch: [Tensor(shape=(2, 4), float32 on cpu)")


def test_an_error_of_an_evaluation_within_a_step_has_one_note():
    class Fails(Trainer):
        def calculate_eval_batch_loss(self, batch):
            raise LookupError("mine")

    trainer = make_trainer([StepBasedEvaluationCallback(1)], trainer_class=Fails)
    note, of_callback = notes_of(failure(trainer, make_data(), eval_dataset=True))
    assert note.startswith("In evaluation, epoch 1, step 0:")
    assert of_callback == "In StepBasedEvaluationCallback.on_update_end."


def test_an_error_of_another_trainer_within_a_step_has_one_note():
    other = make_trainer(model=make_model(features=5))

    class Asks(Trainer):
        def calculate_train_batch_loss(self, batch):
            other.predict(make_data(), per_device_batch_size=2)

    assert note_of(failure(make_trainer(trainer_class=Asks), make_data())).startswith("In prediction, step 0:")


def test_notes_added_by_the_user_stay():
    class Fails(Trainer):
        def calculate_train_batch_loss(self, batch):
            error = LookupError("mine")
            error.__notes__ = ["Ask Ada."]
            raise error

    first, second = failure(make_trainer(trainer_class=Fails), make_data()).__notes__
    assert first == "Ask Ada."
    assert second.startswith("In training")


@OF_FAILED_BATCHES
def test_skipped_batches_and_non_finite_losses_have_no_note():
    seen = []
    watch = listener(on_train_batch_skipped=lambda trainer, **kwargs: seen.append(kwargs))
    trainer = make_trainer([callbacks.SkipFailedBatchesCallback(), watch])
    data = [*make_data(4), (torch.randn(5), torch.randn(1)), (torch.randn(5), torch.randn(1))]
    train(trainer, train_dataset=data, train_dataloader_kwargs={"shuffle": False, "num_workers": 0})
    assert not hasattr(seen[0]["error"], "__notes__")
    infinite = make_trainer(loss_func=lambda outputs, targets: outputs.sum() * torch.inf)
    infinite.callback_handler = CallbackHandler(Trainer(make_model(), None, None).callback_handler)
    assert not hasattr(failure(infinite, make_data()), "__notes__")


def test_a_note_omits_unknown_facts():
    class Fails(Trainer):
        def calculate_train_batch_loss(self, batch):
            self.model = None
            raise LookupError("mine")

    error = failure(make_trainer(trainer_class=Fails), make_data(2))
    assert str(error) == "mine"
    assert note_of(error).splitlines() == [
        "In training, epoch 1, step 0:",
        "  batch: [Tensor(shape=(2, 4), float32 on cpu), Tensor(shape=(2, 1), float32 on cpu)]; samples [0, 1] of the "
        "dataset",
    ]


# ----------------------------------------------------------------------------- errors in reading, in callbacks


class Scans(Dataset[Any]):
    """A dataset with a sample that cannot be read, and one of another shape."""

    def __init__(self, unreadable: int = 9, wide: int = 9) -> None:
        self.unreadable, self.wide = unreadable, wide

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == self.unreadable:
            raise OSError(f"scan {index} is damaged")
        return torch.zeros(4 + (index == self.wide)), torch.zeros(1)


class ManyScans(Scans):
    """``Scans`` that are read several at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class ScanStream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return map(Scans(5).__getitem__, range(8))


def pad(samples: list[Any]) -> Any:
    raise KeyError("length")


READING = [
    (Scans(5), None, "In reading Scans[5].", "dataset: Scans; samples [4, 5]"),
    (Subset(Scans(5), [3, 1, 5]), None, "In reading Subset[2], which is Scans[5].", "dataset: Subset; samples [2]"),
    (ManyScans(5), None, "", "dataset: ManyScans; samples [4, 5]"),
    pytest.param(ScanStream(), None, "", "dataset: ScanStream", marks=pytest.mark.extension("streams")),
    (Scans(), pad, "", "dataset: Scans; samples [0, 1]\n  collate_fn: pad"),
    (Scans(wide=3), None, "", "dataset: Scans; samples [2, 3]\n  What to do: the samples of a batch differ in shape."),
]
NAMES = ["map-style", "subset", "many at once", "stream", "collate_fn", "shapes"]


@pytest.mark.sampled
@pytest.mark.parametrize(("data", "collate_fn", "sample", "lines"), READING, ids=NAMES)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.soak
@pytest.mark.parametrize("phase", some_of(["training", "training with a seed", "evaluation", "evaluate", "prediction"]))
def test_an_error_in_reading_names_the_samples(data, collate_fn, sample, lines, workers, phase):
    trainer = make_trainer(seed=1 if phase == "training with a seed" else None)
    kwargs = {"num_workers": workers, **({"collate_fn": collate_fn} if collate_fn else {})}
    in_order = {} if isinstance(data, IterableDataset) else {"shuffle": False}
    start = partial(train, trainer, train_dataset=data, train_dataloader_kwargs=kwargs | in_order)
    if phase == "evaluation":
        start = partial(train, trainer, eval_dataset={"small": data}, eval_dataloader_kwargs=kwargs)
        start = partial(start, sanity_check=False)
    elif phase in ("evaluate", "prediction"):
        call = trainer.evaluate if phase == "evaluate" else trainer.predict
        start = partial(call, data, per_device_batch_size=2, dataloader_kwargs=kwargs)
    with pytest.raises((OSError, KeyError, RuntimeError)) as caught:
        start()
    *before, note = notes_of(caught.value)
    if sample:
        assert sample in [*before, *str(caught.value).splitlines()]
    place = {"evaluation": "evaluation on 'small', epoch 1", "evaluate": "evaluation", "prediction": "prediction"}
    head, _, rest = note.partition(":\n  ")
    assert re.fullmatch(rf"In {place.get(phase, 'training, epoch 1')}, step \d, reading a batch", head)
    assert rest.startswith(lines)
    assert ("; after " in note) == (isinstance(data, IterableDataset) and phase.startswith("training"))
    assert ("collate_fn: " in note) == (collate_fn is not None)


def test_a_worker_that_is_killed_has_a_note():
    class Killed(Scans):
        def __getitem__(self, index: int) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    error = failure(make_trainer(), Killed(), train_dataloader_kwargs={"num_workers": 1})
    assert "What to do: a worker process was ended from outside" in note_of(error)


def fails(trainer: Trainer, **kwargs: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("event", "place"),
    [
        ("on_training_run_start", None),
        ("on_train_epoch_start", "In training, epoch 1."),
        ("on_train_step_start", "In training, epoch 1, step 0:\n  batch: "),
        ("on_update_end", "In training, epoch 1, step 0:\n  batch: "),
        ("on_train_epoch_end", "In training, epoch 1."),
        ("on_eval_step_end", "In evaluation, epoch 1, step 0:\n  batch: "),
        ("on_eval_epoch_end", "In evaluation, epoch 1."),
        ("on_training_run_epoch_end", "In training, epoch 1."),
    ],
)
def test_an_error_in_a_callback_names_it_and_the_event(event, place):
    class Mine(TrainerCallback):
        pass

    setattr(Mine, event, lambda self, trainer, **kwargs: fails(trainer))
    of_callback, *others = notes_of(failure(make_trainer([Mine()]), make_data(), eval_dataset=True))
    assert of_callback == f"In Mine.{event}."
    assert len(others) == (place is not None)
    assert all(note.startswith(place) for note in others)
    if place and place.endswith("batch: "):
        assert "; samples [0, 1] of the dataset" in others[0]


def test_an_error_in_a_predictions_step_names_the_callback():
    trainer = make_trainer([listener(on_predict_step_end=fails)])
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.predict(make_data(), per_device_batch_size=2)
    first, second = notes_of(caught.value)
    assert first.endswith(".on_predict_step_end.")
    assert second.startswith("In prediction, step 0:\n  batch: ")


def note_of_an_unreadable_stream() -> str:
    """The notes on a failing stream that rank 0 reads for all."""
    trainer = adamw_trainer(float64_model(features=4, dtype=torch.float32))
    with pytest.raises((OSError, RuntimeError)) as caught:
        trainer.train(ScanStream(), 1, per_device_batch_size=1, train_dataloader_kwargs={"num_workers": 0})
    return f"{caught.value}\n{note_of(caught.value)}"


@pytest.mark.extension("streams")
@pytest.mark.processes
def test_an_unreadable_batch_is_named_on_all_processes(two_ranks):
    first, second = two_ranks(note_of_an_unreadable_stream)
    # The first process reads ahead of the steps that are computed.
    said = r"In training, epoch 1, step [0-2], reading a batch, on process {} of 2:\n  dataset: ScanStream"
    assert re.match("scan 5 is damaged\n" + said.format(0), first)
    assert re.match("Rank 0 failed: OSError: scan 5 is damaged\n" + said.format(1), second)


def note_of_an_unreadable_sample() -> list[str]:
    """The notes on unreadable samples in the same step of both processes."""
    kwargs = {"num_workers": 0, **IN_ORDER}
    trainer = adamw_trainer(float64_model(features=4, dtype=torch.float32))
    with pytest.raises(OSError, match="is damaged") as caught:
        trainer.train(Scans(2 * rank() + 1), 1, per_device_batch_size=2, train_dataloader_kwargs=kwargs)
    return notes_of(caught.value)


@pytest.mark.processes
def test_each_process_names_its_own_samples(two_ranks):
    for number, notes in enumerate(two_ranks(note_of_an_unreadable_sample)):
        assert notes == [
            f"In reading Scans[{2 * number + 1}].",
            f"In training, epoch 1, step 0, reading a batch, on process {number} of 2:\n"
            f"  dataset: Scans; samples [{2 * number}, {2 * number + 1}]",
        ]


def note_of_an_error() -> str:
    """The notes on an error of all ranks in their first step."""
    trainer = adamw_trainer(float64_model(features=4))
    try:
        trainer.train(float64_data(12), 1, per_device_batch_size=2)
    except RuntimeError as error:
        return "\n".join(error.__notes__)
    return "no error"


@pytest.mark.processes
def test_the_note_names_the_process(two_ranks):
    for number, note in enumerate(two_ranks(note_of_an_error)):
        start = (
            f"In training, epoch 1, step 0, on process {number} of 2:\n  batch: [Tensor(shape=(2, 5), float64 on cpu)"
        )
        assert note.startswith(start)


# ---------------------------------------------------------------------------------------------- what to do


def one_layer(outputs: int = 1) -> nn.Module:
    return nn.Linear(4, outputs)


class Gives(nn.Module):
    """A model that returns a given object."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.change = change

    def forward(self, x: torch.Tensor) -> Any:
        return self.change(self.layer(x))


MSE, CE, BCE = nn.MSELoss(), nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss()
YES_OR_NO = (TARGETS > 0).float()
FLOATS, CLASSES_TAKEN = "Let the dataset return tensor.float()", "targets.long() without a dimension of size 1"
KNOWN: dict[str, tuple[nn.Module, Any, tuple[Any, ...], str]] = {
    "inputs in float64": (one_layer(), MSE, (torch.from_numpy(np.ones((N, 4))), TARGETS), FLOATS),
    "images in bytes": (nn.Conv2d(1, 3, 3), MSE, (torch.zeros(N, 1, 6, 6).byte(), TARGETS), FLOATS),
    "a model in float64": (one_layer().double(), MSE, (INPUTS, TARGETS), "convert the model"),
    "classes as columns": (one_layer(3), CE, (INPUTS, CLASSES[:, None]), "targets.squeeze(1)"),
    "classes as floats": (one_layer(3), CE, (INPUTS, CLASSES.float()), CLASSES_TAKEN),
    "classes in 32 bits": (one_layer(3), CE, (INPUTS, CLASSES.int()), CLASSES_TAKEN),
    "one-hot classes": (one_layer(3), CE, (INPUTS, torch.eye(3).repeat(2, 1).long()), "targets.float()"),
    "labels out of range": (one_layer(3), CE, (INPUTS, torch.full((N,), 3)), "the labels must range from 0"),
    "negative labels": (one_layer(3), functional.nll_loss, (INPUTS, CLASSES - 1), "the labels must range from 0"),
    "yes or no as whole numbers": (one_layer(), BCE, (INPUTS, YES_OR_NO.long()), "use targets.float()"),
    "yes or no without the shape of the outputs": (one_layer(), BCE, (INPUTS, YES_OR_NO[:, 0]), "unsqueeze(1)"),
    "probabilities of another shape": (Gives(torch.sigmoid), nn.BCELoss(), (INPUTS, YES_OR_NO), "CrossEntropyLoss"),
    "an index that an embedding lacks": (
        nn.Embedding(2, 1),
        MSE,
        (torch.full((N,), 2), TARGETS),
        "raise num_embeddings of the embedding",
    ),
    "batch norm over a sample": (nn.BatchNorm1d(4), MSE, (INPUTS[:1], INPUTS[:1]), "{'drop_last': True}"),
    "classes in the last dimension": (
        nn.Linear(4, 3),
        CE,
        (torch.randn(N, 5, 4), torch.zeros(N, 5).long()),
        "outputs.transpose(1, 2)",
    ),
    "outputs in a tuple": (Gives(lambda y: (y, y)), CE, (INPUTS, CLASSES), "loss_func=lambda outputs, targets"),
    "outputs in a dict": (Gives(lambda y: {"logits": y}), MSE, (INPUTS, TARGETS), "pass loss_func=None"),
    "inputs as lists": (one_layer(3), CE, ([([1.0] * 4, 1)] * N,), "with_format('torch')"),
    "two inputs": (nn.Bilinear(4, 4, 1), MSE, (INPUTS, INPUTS, TARGETS), "return a dict with the names of forward's"),
    "weights of 16 bits": (nn.Linear(4, 1).bfloat16(), MSE, (INPUTS, TARGETS), "Trainer(mixed_precision='bf16')"),
    "tensors on another device": (
        Gives(lambda y: y + torch.ones(3, device="meta")),
        MSE,
        (INPUTS, TARGETS),
        "Create other tensors on device=trainer.device",
    ),
}


@pytest.mark.filterwarnings("ignore:The last batch of an epoch has a single sample")
@pytest.mark.parametrize(("model", "loss_func", "data", "answer"), KNOWN.values(), ids=KNOWN.keys())
def test_unhelpful_error_messages_are_explained(model, loss_func, data, answer):
    assert answer in advice(model, loss_func, *data)


@pytest.mark.parametrize(
    ("metrics", "outputs", "targets", "answer"),
    [
        ({"accuracy": MulticlassAccuracy(5)}, 3, CLASSES, "made for another number of classes"),
        ({"accuracy": MulticlassAUROC(5)}, 3, CLASSES, "made for another number of classes"),
        ("accuracy", 1, TARGETS, "a metric for regression, such as 'r2score'"),
    ],
)
def test_metrics_unfit_for_the_targets_are_explained(metrics, outputs, targets, answer):
    trainer = make_trainer(model=one_layer(outputs), loss_func=CE if outputs > 1 else MSE, metrics=metrics)
    data = TensorDataset(INPUTS, targets)
    _, mark, advice = "".join(notes_of(failure(trainer, data, eval_dataset=data))).partition("What to do: ")
    assert mark
    assert answer in advice


def by_hand(outputs, targets):
    return (outputs - targets).sum()


@pytest.mark.parametrize("loss_func", [nn.L1Loss(), functional.mse_loss, by_hand, partial(functional.mse_loss)])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_the_note_of_an_error_in_the_loss_shows_its_inputs(loss_func):
    note = note_of(failure(make_trainer(model=one_layer(3), loss_func=loss_func), INPUTS, torch.zeros(N, 2)))
    assert note.splitlines()[3] == (
        "  in the loss, with Tensor(shape=(2, 3), float32 on cpu) and Tensor(shape=(2, 2), float32 on cpu)"
    )


def test_an_error_in_a_custom_step_is_explained_too():
    class Own(Trainer):
        def calculate_train_batch_loss(self, batch):
            x, y = batch
            return {"loss": functional.cross_entropy(self.model(x), y)}

    trainer = make_trainer(model=one_layer(3), trainer_class=Own)
    assert "(targets.squeeze(1))" in note_of(failure(trainer, INPUTS, CLASSES[:, None]))


def test_an_error_that_is_not_known_has_no_advice():
    def fails(outputs, targets):
        raise ZeroDivisionError("mine")

    assert "What to do" not in note_of(failure(make_trainer(loss_func=fails), make_data()))


def test_several_targets_are_shown_if_the_loss_takes_only_one():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 1).double()

        def forward(self, x):
            return self.linear(x)

    rows = [{"x": x, "answer": y, "id": 1, "name": 2} for x, y in float64_data(4)]
    with pytest.raises(AttributeError) as caught:
        Trainer(Named(), nn.MSELoss(), None, callbacks=[]).evaluate(rows, per_device_batch_size=2)
    of_loss = " ".join(caught.value.__notes__[-1].partition("in the loss")[2].split())
    assert " and {'answer': Tensor(" in of_loss
    assert "'id': " in of_loss
    assert "does not take: 'answer', 'id', 'name'. If one is the target, call it 'target'" in of_loss
    assert "targets['answer']" in of_loss


class AddsGroup(TrainerCallback):
    def on_update_end(self, trainer, **kwargs):
        if trainer.progress.update == 1:
            trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@pytest.mark.parametrize("schedule", ["cosine", lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, float)])
def test_groups_added_beside_a_schedule_have_advice(schedule):
    with pytest.raises((ValueError, IndexError)) as caught:
        train(make_trainer([AddsGroup()]), create_scheduler_fn=schedule)
    [note] = notes_of(caught.value)
    assert "What to do: the optimizer has 2 parameter groups, but had 1 when" in note


def test_a_prediction_without_decoder_inputs_has_advice():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 9, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    trainer = Trainer(model, None, None, callbacks=[])
    with pytest.raises(ValueError, match="exactly one of") as caught:
        trainer.predict([{"input_ids": torch.arange(4), "labels": torch.arange(3)}])
    assert "override calculate_predict_batch_output" in notes_of(caught.value)[0]
