"""The reprs of public objects."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import pydoc
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanSquaredError

import pytorch_accel_lite.callbacks as shipped
from pytorch_accel_lite import InMemoryRunHistory, LossTracker, RunHistory, Trainer, TrainerCallback
from pytorch_accel_lite.base.trainer_names import AttributeElsewhere
from pytorch_accel_lite.callbacks import (
    DEFAULT_CALLBACKS,
    EarlyStoppingCallback,
    SaveTrainingStateCallback,
    get_default_callbacks,
)
from tests.shipped_callbacks import NEEDED, SHIPPED
from tests.small_models import make_data, make_trainer, train

# ------------------------------------------------------------------------------------------------ trainers


def test_a_trainers_repr_shows_its_model_and_callbacks():
    trainer = make_trainer([EarlyStoppingCallback(2)])
    assert repr(trainer) == (
        "Trainer(\n"
        "    model=Sequential, parameters=49, optimizer=SGD, device=cpu,\n"
        "    callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],\n"
        ")"
    )
    train(trainer, eval_dataset=True)
    assert "optimizer=SGD" in repr(trainer)


def test_the_trainer_of_a_subclass_without_callbacks_fits_a_line():
    class Own(Trainer):
        pass

    assert repr(Own(nn.Linear(2, 1), None, None, [])) == (
        "Own(model=Linear, parameters=3, optimizer=None, device=cpu, callbacks=[])"
    )
    assert "parameters=0 + ?" in repr(Own(nn.LazyLinear(2), None, None, []))


def test_a_half_constructed_trainer_can_be_shown():
    assert "Trainer object at" in repr(Trainer.__new__(Trainer))


def test_the_callbacks_of_a_trainer():
    trainer = make_trainer([shipped.TerminateOnNaNCallback, EarlyStoppingCallback()])
    first, second = trainer.callbacks
    assert isinstance(first, shipped.TerminateOnNaNCallback)
    assert isinstance(second, EarlyStoppingCallback)
    trainer.callback_handler.add_callback(TrainerCallback)
    assert len(trainer.callbacks) == 3

    class Own(Trainer):
        def __init__(self, model: nn.Module, callbacks: Any) -> None:
            self.callbacks = callbacks  # code for pytorch-accelerated may keep them under this name
            super().__init__(model, None, None, callbacks)

    assert Own(nn.Linear(1, 1), []).callbacks == []


def test_signatures_fit_a_screen():
    callbacks = "callbacks: 'Iterable[TrainerCallback | type[TrainerCallback] | None]' = DEFAULT_CALLBACKS, "
    assert callbacks in str(inspect.signature(Trainer))
    methods = [value for value in vars(Trainer).values() if inspect.isfunction(value)]
    for function in (Trainer, *methods):
        assert len(str(inspect.signature(function))) < 12 * 80
    assert str(DEFAULT_CALLBACKS).startswith("(MoveModulesToDeviceCallback, TerminateOnNaNCallback")
    assert (*DEFAULT_CALLBACKS,) == get_default_callbacks() == DEFAULT_CALLBACKS
    assert repr(get_default_callbacks()) == str(DEFAULT_CALLBACKS)


# ----------------------------------------------------------------------------------------------- callbacks


def optional_arguments(callback_class: type) -> dict[str, Any]:
    """The arguments that a callback has a default for, and one more if it takes any; metrics are passed by name."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(callback_class).parameters.items():
        if parameter.default is not parameter.empty:
            found[name] = parameter.default
        elif parameter.kind is parameter.VAR_KEYWORD and callback_class.__name__ != "MetricsCallback":
            found["with_stack"] = True
    return found


@pytest.mark.parametrize("callback_class", SHIPPED, ids=lambda cls: cls.__name__)
def test_a_callback_is_shown_as_its_constructor_with_arguments(callback_class, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    needed = NEEDED.get(callback_class.__name__, {})
    for arguments in (needed, optional_arguments(callback_class) | needed):
        shown = ast.parse(repr(callback_class(**arguments)), mode="eval").body
        assert isinstance(shown, ast.Call)
        assert ast.unparse(shown.func) == callback_class.__name__
        assert {keyword.arg for keyword in shown.keywords} == set(arguments)
        for keyword in shown.keywords:
            value = arguments[keyword.arg]
            if isinstance(value, (str, int, float, type(None))):
                assert ast.literal_eval(keyword.value) == value


def test_a_repr_shows_changed_arguments():
    stopping = EarlyStoppingCallback(3)
    stopping.early_stopping_patience = 5
    assert repr(stopping) == "EarlyStoppingCallback(early_stopping_patience=5)"
    assert repr(copy.deepcopy(stopping)) == repr(pickle.loads(pickle.dumps(stopping))) == repr(stopping)


def test_callbacks_of_users_are_shown_in_the_same_way():
    class Mixin:
        def __init__(self, size: int, *rest: Any) -> None:
            self.half = size // 2

    class Mixed(Mixin, TrainerCallback):
        pass

    class Patient(EarlyStoppingCallback):
        def __init__(self, factor: float, **options: Any) -> None:
            super().__init__(int(10 * factor), **options)

    class Careless(EarlyStoppingCallback):
        def __init__(self, path: Path) -> None:
            self.path = path

    class Plain(TrainerCallback):
        pass

    assert repr(Mixed(4, "a", [1])) == "Mixed(4, 'a', [1])"
    assert repr(Patient(0.5, watch_metric="a")) == "Patient(factor=0.5, watch_metric='a')"
    assert repr(Careless(Path("a") / "b")) == "Careless(path='a/b')"
    assert repr(Plain()) == "Plain()"
    with pytest.raises(TypeError, match=r"Plain\(\) takes no arguments"):
        Plain(1)  # type: ignore[call-arg]
    assert str(inspect.signature(Patient)) == "(factor: 'float', **options: 'Any') -> 'None'"


def draw(model: Any, samples: Any) -> torch.Tensor:
    return torch.zeros(4, 4)


def test_large_values_are_abbreviated_and_secrets_left_out():
    class Own(TrainerCallback):
        def __init__(self, value: Any, hf_token: Any = None) -> None:
            pass

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    for value, text in {
        torch.zeros(3, 4): "Tensor(shape=(3, 4), float32 on cpu)",
        model: "Sequential(...)",
        partial(draw, None): "partial(draw, ...)",
        nn.Linear: "Linear",
        nn.ReLU(): "ReLU()",
        make_data(): "TensorDataset(...)",
        tuple(range(100)): "(0, 1, 2, 3, 4, 5, 6, 7, ...)",
        torch.float16: "torch.float16",
    }.items():
        assert repr(Own(value)) == f"Own(value={text})"
    assert len(repr(Own("a" * 1000))) < 100
    assert repr(Own({number: {"a": [[[[1]]]]} for number in range(20)})).count("...") >= 2
    kept = Own({"wandb": {"api_key": "abc", "url": "https://me:abc@host/x"}})
    for own in (kept, Own("https://me:abc@host"), Own(1, hf_token="abc")):
        assert "abc" not in repr(own)
        assert "***" in repr(own)


def test_long_calls_are_wrapped():
    saving = SaveTrainingStateCallback("states", save_every_n_steps=100, asynchronous=True, max_checkpoints=3)
    assert repr(saving) == (
        "SaveTrainingStateCallback(\n"
        "    save_dir='states', save_every_n_steps=100, max_checkpoints=3,\n"
        "    asynchronous=True,\n"
        ")"
    )


# ------------------------------------------------------------------------------------- what a run leaves behind


def test_a_history_is_read_like_a_dict():
    history = InMemoryRunHistory()
    assert history
    assert repr(history) == "InMemoryRunHistory()"
    for loss in (0.5, 0.25):
        history.update_metric("loss", loss)
        history.update_metric("accuracy", 1 - loss)
    assert history["loss"] == [0.5, 0.25]
    assert list(history) == ["loss", "accuracy"]
    assert len(history) == 2
    assert "loss" in history
    assert "los" not in history
    with pytest.raises(KeyError, match=r"'los'\. Did you mean 'loss'\? Recorded: loss, accuracy"):
        history["los"]
    assert repr(history) == "InMemoryRunHistory(loss=0.25, accuracy=0.75)"


def test_the_history_of_a_user_is_read_the_same_way():
    class Own(RunHistory):
        metric_name_prefix = ""
        current_epoch = 1

        def __init__(self) -> None:
            self.rows: list[tuple[str, float]] = []

        def get_metric_names(self):
            return (name for name in dict.fromkeys(name for name, _ in self.rows))

        def get_metric_values(self, metric_name):
            return [value for name, value in self.rows if name == metric_name]

        def get_latest_metric(self, metric_name):
            return self.get_metric_values(metric_name)[-1]

        def update_metric(self, metric_name, metric_value):
            self.rows.append((metric_name, metric_value))

        def delete_metric(self, metric_name): ...

        def set_metric_name_prefix(self, prefix=""): ...

        def _increment_epoch(self): ...

        def reset(self): ...

    trainer = train(make_trainer(run_history=Own()), 2)
    assert len(trainer.run_history["train_loss_epoch"]) == 2
    assert list(trainer.run_history) == ["train_loss_epoch"]
    assert repr(trainer.run_history).startswith("Own(train_loss_epoch=")


def test_the_settings_of_a_run_are_shown_without_the_defaults():
    trainer = make_trainer()
    assert trainer.run_config is None
    train(trainer, 2, gradient_clip_norm=1.0)
    shown = repr(trainer.run_config)
    assert shown.startswith("TrainerRunConfig(\n    num_epochs=2, train_per_device_batch_size=2,")
    assert "gradient_clip_norm=1.0" in shown
    assert "train_dl_kwargs={'batch_size': 2," in shown
    for left_out in ("gradient_clip_value", "scheduler_interval", "process", "None"):
        assert left_out not in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert repr(trainer.current_run) == f"Run(training, {trainer.progress})"


def test_losses_are_shown_if_that_needs_no_device_read():
    tracker = LossTracker()
    tracker.update(0.5, 2)
    assert repr(tracker) == "LossTracker(average=0.5, running_count=2)"
    tracker.total_loss = torch.tensor(1.0)
    assert repr(tracker) == "LossTracker(running_count=2)"


@pytest.mark.extension("metrics")
def test_metrics_are_shown_by_name():
    from pytorch_accel_lite.callbacks import MetricsCallback

    assert repr(MetricsCallback({"mse": MeanSquaredError()})) == "MetricsCallback(metrics={'mse': MeanSquaredError()})"


# ------------------------------------------------------------------------------------------------ notebooks


@pytest.mark.extension("tuning")
def test_results_of_finders_are_shown_once(capsys):
    """A console and a notebook show what is returned; a script prints it."""
    trainer = make_trainer()
    rates = trainer.find_lr(make_data(20), num_steps=10)
    diagnosis = trainer.diagnose(make_data(20), num_steps=3)
    assert capsys.readouterr().out == ""
    assert repr(rates) == str(rates)
    assert repr(rates).startswith("Tried 10 learning rates")
    assert dict(diagnosis.rows())["waiting for data"].endswith("%")
    for row in diagnosis.rows():
        for cell in row:
            assert cell in repr(diagnosis)


def test_help_shows_a_trainers_methods_and_none_of_their_makers():
    text = pydoc.plain(pydoc.render_doc(Trainer))
    assert " |  __repr__(self)" in text
    assert not re.search(r" object( at 0x\w+)?>", text)


def test_help_is_plain_text_with_the_main_methods_first():
    text = pydoc.plain(pydoc.render_doc(Trainer))
    methods = re.findall(r"^ \|  ([a-z]\w*)\(self", text, re.MULTILINE)
    assert methods[:4] == ["train", "evaluate", "predict", "predict_iter"]
    assert text.index("train()``, ``evaluate()`` and ``predict()``") < text.index("Args:\n |      model: ")
    for shown in (text, *(pydoc.plain(pydoc.render_doc(value)) for value in (TrainerCallback, RunHistory, *SHIPPED))):
        assert not re.search(r":(class|meth|func|attr|data|mod|doc):`|:(param|ivar|cvar|returns?|raises)\b.*:", shown)


def test_dir_lists_existing_and_user_defined_names():
    class Own(Trainer):
        _scale = 2.0

        def _create_accelerator(self) -> Any:
            return super()._create_accelerator()

        def fit(self) -> None:
            pass

    model = nn.Linear(1, 1)
    trainer = Own(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    trainer._given = 3  # type: ignore[attr-defined]
    listed = dir(trainer)
    assert [name for name in listed if name.startswith("_") and not name.endswith("__")] == [
        "_create_accelerator", "_given", "_scale",
    ]  # fmt: skip
    assert {"train", "run_history", "check", "fit", "model", "stop_reason"} <= set(listed)
    hidden = {name for name in object.__dir__(trainer) if not name.startswith("_")} - set(listed)
    assert all(isinstance(vars(Trainer)[name], AttributeElsewhere) for name in hidden)
