"""Invalid arguments of ``Trainer``: the error names the argument, its value and the remedy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pytorch_accel_lite import InMemoryRunHistory, Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import EarlyStoppingCallback
from tests.refusals import WHOLE, booleans_of
from tests.small_models import make_data, make_model, make_trainer, train


class NeedsArgument(TrainerCallback):
    def __init__(self, folder: str) -> None:
        self.folder = folder


class NotConstructed(EarlyStoppingCallback):
    def __init__(self) -> None:
        self.mine = 1


# What the trainer is made with, the error, and what its message must match.
CONSTRUCTOR: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "model=None": ({"model": None}, TypeError, r"model=None must be a torch\.nn\.Module"),
    "model is a class": ({"model": nn.Linear}, TypeError, r"model=<class .*Linear.*must be an instance"),
    "loss_func is a name": ({"loss_func": "mse"}, TypeError, "loss_func='mse' must be callable.*Pass a loss function"),
    "loss_func is the optimizer": (
        {"loss_func": torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)},
        TypeError,
        r"loss_func=SGD.*must be callable.*comes after it: Trainer\(model, loss_func, optimizer\)",
    ),
    "model is a dataset": ({"model": make_data()}, TypeError, r"model=.*The arguments are Trainer\(model, loss_func"),
    "loss_func is a class of modules": ({"loss_func": nn.MSELoss}, TypeError, r"loss_func=.*MSELoss.*(instance|\(\))"),
    "optimizer is a number": ({"optimizer": 0.1}, TypeError, r"optimizer=0\.1 must be an instance"),
    "callbacks=None": ({"callbacks": None}, TypeError, "callbacks=None must be a list"),
    "callbacks is one callback": ({"callbacks": TrainerCallback()}, TypeError, r"callbacks=.*must be a list"),
    "callbacks is one class": ({"callbacks": TrainerCallback}, TypeError, r"callbacks=.*must be a list"),
    "callbacks is a name": ({"callbacks": "bar"}, TypeError, r"callbacks='bar' must be a list"),
    "a callback is a function": (
        {"callbacks": [print]},
        TypeError,
        r"callbacks: .*print.*is not a TrainerCallback.*Pass",
    ),
    "a callback is another class": (
        {"callbacks": [dict]},
        TypeError,
        r"callbacks: .*dict.*is not a TrainerCallback.*Pass",
    ),
    "a callback is a class that needs arguments": (
        {"callbacks": [NeedsArgument]},
        TypeError,
        r"callbacks: the class NeedsArgument needs arguments: missing.*'folder'. Pass NeedsArgument\(\.\.\.\)",
    ),
    "a callback whose constructor of ours was not called": (
        {"callbacks": [NotConstructed()]},
        TypeError,
        r"NotConstructed\.__init__ does not call super\(\)\.__init__\(\.\.\.\), the constructor of EarlyStopping",
    ),
    "run_history is a class": ({"run_history": InMemoryRunHistory}, TypeError, r"run_history=.*InMemoryRunHistory"),
    "run_history is a dict": ({"run_history": {}}, TypeError, r"run_history=\{\} must be an instance of RunHistory"),
    "accelerator is a name": (
        {"accelerator": "cpu"},
        TypeError,
        r"accelerator='cpu' must be an accelerate\.Accelerator",
    ),
    "seed is a name": ({"seed": "today"}, TypeError, f"seed='today' {WHOLE}"),
    "seed=1.5": ({"seed": 1.5}, TypeError, rf"seed=1\.5 {WHOLE}"),
    "seed=-1": ({"seed": -1}, ValueError, r"seed=-1 must be"),
    "compile_model is a name": (
        {"compile_model": "inductor"},
        TypeError,
        r"compile_model='inductor' must be True, False, or a dict.*torch\.compile",
    ),
    "compile_model=None": ({"compile_model": None}, TypeError, "compile_model=None must be True"),
    "compile_step is a name": (
        {"compile_step": "inductor"},
        TypeError,
        r"compile_step='inductor' must be True, False, or a dict.*torch\.compile",
    ),
    "compile_model has a typo": (
        {"compile_model": {"mod": "max-autotune"}},
        TypeError,
        r"compile_model has the key 'mod', which is not an argument of torch.compile. Did you mean 'mode'",
    ),
    "channels_last=2": ({"channels_last": 2}, TypeError, "channels_last=2 must be True or False"),
    "check_replicas is a word": ({"check_replicas": "no"}, TypeError, "check_replicas='no' must be True or False, not"),
    "deterministic is a word": (
        {"deterministic": "yes"},
        TypeError,
        "deterministic='yes' must be True, False, or None",
    ),
    "seed is too large": ({"seed": 2**40}, ValueError, rf"seed={2**40} must be"),
}


@pytest.mark.parametrize(("arguments", "error", "match"), CONSTRUCTOR.values(), ids=CONSTRUCTOR.keys())
def test_a_trainer_refuses_invalid_arguments(arguments, error, match):
    model = make_model()
    given = {"model": model, "loss_func": nn.MSELoss(), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with pytest.raises(error, match=match):
        Trainer(**({"callbacks": []} | given | arguments))


@pytest.mark.parametrize(
    "call",
    [
        lambda t, **word: t.evaluate(make_data(), **word),
        lambda t, **word: t.predict(make_data(), **word),
        pytest.param(lambda t, **word: t.check(make_data(), **word), marks=pytest.mark.extension("checking")),
        lambda t, **word: t.save_checkpoint("a.pt", **word),
        lambda t, **word: t.load_checkpoint("a.pt", **word),
        lambda t, **word: t.save_model("a", **word),
        lambda t, **word: t.save_training_state("a", **word),
    ],
    ids=["evaluate", "predict", "check", "save_checkpoint", "load_checkpoint", "save_model", "save_training_state"],
)
def test_methods_refuse_words_as_booleans(call, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer()
    names = booleans_of(getattr(trainer, request.node.callspec.id))
    assert names
    for name in names:
        with pytest.raises(TypeError, match=f"{name}='no' must be True"):
            call(trainer, **{name: "no"})
    assert not list(tmp_path.iterdir())


def test_numpy_booleans_and_0_and_1_are_accepted():
    train(make_trainer(channels_last=np.False_, check_replicas=0), auto_microbatch=np.bool_(False), reset_run_history=1)
