"""compile_step: training batches are computed by compiled code, with the results and the names of an uncompiled run."""

from __future__ import annotations

import gc
import itertools
import json
import tempfile
import warnings
import weakref
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric

from pytorch_accel_lite import Trainer, callbacks
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.launching import only_with_soak, run_code
from tests.ranks import shared_folder, world_size
from tests.small_models import (
    Blocks,
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    largest_difference,
    listener,
    weights,
)

DOUBLE = float64_data(26)


def _train_with_states(
    compile_step: Any, folder: Path, resume_from: Path | None = None, model: nn.Module | None = None
) -> nn.Module:
    torch.compiler.reset()
    is_double = model is None
    model = float64_model() if model is None else model
    data = DOUBLE if is_double else TensorDataset(*(tensor.float() for tensor in DOUBLE.tensors))
    saving = SaveTrainingStateCallback(folder, save_every_n_steps=2, save_at_end=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    trainer = Trainer(model, nn.MSELoss(), optimizer, [saving], seed=1, compile_step=compile_step)
    trainer.train(data, 2, per_device_batch_size=8 // world_size(), resume_from=resume_from)
    return trainer.model


DATA = float64_data(20, dtype=torch.float32)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
AS_PLAIN = {"backend": "eager"}  # torch's graph, computed by the usual kernels: the bits must be the usual ones


@pytest.fixture(autouse=True)
def forget_other_models():
    """Reset torch's compiler, as compiled modules are shared by all tests."""
    torch.compiler.reset()


class Counts:
    """A backend that computes graphs as they are, and keeps them weakly."""

    def __init__(self) -> None:
        self.graphs: list[weakref.ref[Any]] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs.append(weakref.ref(graph))
        return graph.forward


def small_net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


def train(
    compile_step: Any,
    trainer_class: type[Trainer] = Trainer,
    model: nn.Module | None = None,
    data: Any = DATA,
    optimizer: Any = SGD,
    given: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Trainer:
    """Train for two epochs of two whole batches and a smaller one."""
    model = small_net() if model is None else model
    trainer = trainer_class(
        model, nn.MSELoss(), optimizer, **{"callbacks": (), "seed": 1, "compile_step": compile_step} | (given or {})
    )
    trainer.train(data, 2, **{"per_device_batch_size": 8} | kwargs)
    return trainer


def ours(said: Any) -> list[str]:
    """Return the warnings that are not torch's own, such as one of Python 3.13.0."""
    return [str(each.message) for each in said if "compile_step" in str(each.message)]


def same_run(compiled: Trainer, plain: Trainer) -> bool:
    def metrics(trainer: Trainer) -> Any:
        history = trainer.run_history
        return {name: history.get_metric_values(name) for name in history.get_metric_names()}

    return equal_weights(weights(compiled.model), weights(plain.model)) and metrics(compiled) == metrics(plain)


class Weighted(Trainer):
    """Computes its own loss, and logs a value."""

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        inputs, targets = batch
        outputs = self.model(inputs)
        self.log("mae", (outputs - targets).abs().mean())
        return {"loss": self.loss_func(outputs, targets) + 0.1 * outputs.square().mean(), "batch_size": len(inputs)}


class Doubled(Trainer):
    """Changes the default loss."""

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        output = super().calculate_train_batch_loss(batch)
        return output | {"loss": {"twice": 2 * output["loss"], "size": output["model_outputs"].square().mean()}}


@pytest.mark.slow
@pytest.mark.parametrize("trainer_class", [Trainer, Weighted, Doubled])
def test_the_step_is_one_graph_that_is_compiled_once(trainer_class):
    backend = Counts()
    compiled = train({"backend": backend}, trainer_class, eval_dataset=DATA)
    assert len(backend.graphs) == 1  # and none for evaluations, nor for the smaller batch at the end of each epoch
    assert same_run(compiled, train(False, trainer_class, eval_dataset=DATA))
    assert compiled.model.state_dict().keys() == small_net().state_dict().keys()
    compiled.train(DATA, 1, per_device_batch_size=8)
    assert len(backend.graphs) == 1
    compiled.train(DATA, 1, per_device_batch_size=4)  # compiles again, without the checks of the first batch
    assert len(backend.graphs) == 2


def bf16() -> Accelerator:
    return Accelerator(cpu=True, mixed_precision="bf16")


SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation and clipping": {"gradient_accumulation_steps": 2, "gradient_clip_norm": 0.1},
    "bf16": {"given": {"accelerator": bf16}},
    "parts of batches": {"auto_microbatch": True},
    "a compiled model": {"given": {"compile_model": AS_PLAIN}},
    "an averaged model": {
        "given": {"callbacks": [lambda: callbacks.ModelEmaCallback(0.5, save_path=None)]},
        "eval_dataset": DATA,
    },
    "an optimizer with a closure": {"optimizer": partial(torch.optim.LBFGS, max_iter=2)},
}
OWNERS = {
    "parts of batches": "failed_batches",
    "an averaged model": "model_ema",
    "an optimizer with a closure": "closures",
    "logical processes": "logical",
    "train_step": "manual_optimization",
}


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.extension(OWNERS[name]) if name in OWNERS else ()) for name in SETTINGS],
)
def test_other_features_work_with_a_compiled_step(name, no_accelerator):
    settings = dict(SETTINGS[name])
    given = settings.pop("given", {})

    def run(compile_step: Any) -> Trainer:
        made = dict(given)
        if "accelerator" in made:
            AcceleratorState._reset_state(reset_partial_state=True)
            made["accelerator"] = made["accelerator"]()
        made["callbacks"] = [make() for make in made.get("callbacks", ())]
        return train(compile_step, given=made, **settings)

    backend = Counts()
    assert same_run(run({"backend": backend}), run(False))
    assert backend.graphs


def test_batches_are_dicts_and_the_model_returns_its_loss():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_net()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            outputs = self.inner(x)
            return {"loss": (outputs - labels).square().mean(), "logits": outputs}

    def run(compile_step: Any) -> Trainer:
        data = [{"x": x, "labels": y} for x, y in DATA]
        trainer = adamw_trainer(Model(), seed=1, compile_step=compile_step)
        trainer.loss_func = None
        trainer.train(data, 2, train_dataloader_kwargs={"num_workers": 0})
        return trainer

    backend = Counts()
    assert same_run(run({"backend": backend}), run(False))
    assert len(backend.graphs) == 1


@pytest.mark.slow
def test_a_run_with_a_compiled_step_repeats_and_resumes_its_bits(tmp_path):
    def run(compile_step: Any, folder: str, resume_from: Any = None) -> Trainer:
        saving = SaveTrainingStateCallback(tmp_path / folder, save_every_n_steps=2, save_at_end=False)
        return train(compile_step, model=small_net(dropout=0.3), given={"callbacks": [saving]}, resume_from=resume_from)

    step = {"backend": Counts()}
    whole = run(step, "whole")
    assert same_run(run(step, "again"), whole)
    for update in (2, 4):
        assert same_run(run(step, "resumed", tmp_path / f"whole/update-{update:09}"), whole)
    assert len(step["backend"].graphs) == 4  # one for each trainer
    mixed = run(False, "mixed", tmp_path / "whole/update-000000002")
    assert same_run(mixed, whole)


@pytest.mark.thorough
@pytest.mark.extension("streams")
@pytest.mark.slow
def test_varying_sizes_are_recompiled_once():
    lengths = [3, 5, 4, 7, 6, 2, 8, 9, 5, 3]

    def run(compile_step: Any) -> Trainer:
        batches = [(torch.ones(4, n, 5) * n, torch.ones(4, n, 1)) for n in lengths]
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
        model.load_state_dict({name: torch.ones_like(value) / 9 for name, value in model.state_dict().items()})
        trainer = adamw_trainer(model, compile_step=compile_step)
        trainer.create_train_dataloader = lambda *_: batches  # type: ignore[method-assign, assignment]
        trainer.train(DATA, 2, per_device_batch_size=4)
        return trainer

    backend = Counts()
    assert same_run(run({"backend": backend}), run(False))
    assert len(backend.graphs) == 2
    few = Counts()
    with (
        torch._dynamo.config.patch(cache_size_limit=3),
        pytest.warns(UserWarning, match="as many versions as it keeps.*'dynamic': True") as said,
    ):
        limited = run({"backend": few, "dynamic": False})
    assert len(few.graphs) == 3
    assert len(ours(said)) == 1
    assert same_run(limited, run(False))


@pytest.mark.thorough
@pytest.mark.slow
def test_compiled_code_is_freed_with_its_trainer():
    backend = Counts()
    with torch._dynamo.config.patch(cache_size_limit=2):  # of one function
        for _ in range(3):
            train({"backend": backend})
    for _ in range(2):  # what only the code refers to is garbage once that is gone
        gc.collect()
    assert len(backend.graphs) == 3
    assert len([graph for graph in backend.graphs if graph() is not None]) <= 1  # torch holds on to the latest


# --------------------------------------------------------------------------------------- reasons not to


class Own(Trainer):
    def train_step(self, batch: Any) -> None:
        self.update(self.calculate_train_batch_loss(batch)["loss"])


class Reads(Trainer):
    """Reads a number from the loss."""

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        outputs = self.model(batch[0])
        loss = self.loss_func(outputs, batch[1])
        return {"loss": loss * (1 if loss.item() > 0 else 2), "model_outputs": outputs}


def fails(graph: Any, inputs: Any) -> Any:
    raise OSError("no space left")


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "train_step": (
        {"trainer_class": Own},
        r"not compiled, because with an overridden train_step, .*compile_model=True",
    ),
    "logical processes": ({"given": {"logical_processes": 2}}, "not compiled, because with logical_processes"),
    "a number that is read": (
        {"trainer_class": Reads},
        r"compiled in parts, because .*(data-dependent|Tensor.item).* at File .*test_compiled",
    ),
    "its backend": ({"compile_step": {"backend": fails}}, "not compiled, because OSError: no space left"),
}


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.extension(OWNERS[name]) if name in OWNERS else ()) for name in REASONS],
)
def test_a_graph_break_is_reported_once_with_its_reason(name):
    settings, reason = REASONS[name]
    settings = {"compile_step": AS_PLAIN} | settings
    with pytest.warns(UserWarning, match=reason) as said:
        found = train(**settings)
    assert len(ours(said)) == 1
    assert same_run(found, train(**settings | {"compile_step": False}))


@pytest.mark.thorough
@pytest.mark.slow
def test_recompiling_frees_partly_compiled_code():
    backend = Counts()
    models, compiled = [], []
    with torch._dynamo.config.patch(cache_size_limit=2):  # of one function, and the function is shared
        for width in range(3, 8):
            model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 1))
            models.append(weakref.ref(model))
            with pytest.warns(UserWarning, match="compiled in parts"):
                train({"backend": backend}, Reads, model)
            compiled.append(len(backend.graphs))
    del model
    gc.collect()
    assert [model() for model in models[:-1]] == [None] * 4
    assert len({after - before for before, after in itertools.pairwise(compiled)}) == 1  # none met the limit


def inductor() -> None:
    """Print how runs compiled by inductor compare with each other and with one without compilation."""
    from torch._inductor import config

    warnings.simplefilter("ignore")  # of torch, about this machine
    config.compile_threads = 1  # starts no processes that compile, each of which imports torch
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        options = {"options": {"fallback_random": True}}  # the random numbers of uncompiled code
        plain = _train_with_states(False, folder / "plain", model=Blocks())
        found = [_train_with_states(options, folder / name, model=Blocks()) for name in ("one", "two")]
        resumed = _train_with_states(options, folder / "three", folder / "one/update-000000002", model=Blocks())
    one, two, three = (weights(model) for model in (*found, resumed))
    difference = largest_difference(one, weights(plain))
    print(
        json.dumps(
            {"repeated": equal_weights(one, two), "resumed": equal_weights(one, three), "difference": difference}
        )
    )


@pytest.mark.thorough
@pytest.mark.slow
def test_a_missing_compiler_is_warned_of(monkeypatch):
    from torch._inductor import config, cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    monkeypatch.setattr(config.cpp, "cxx", ("/nowhere/g++",))
    with pytest.warns(UserWarning, match=r"is not compiled, because .*C\+\+ compiler") as said:
        found = train(True)
    cpp_builder.cpp_compiler_search.cache_clear()
    assert ours(said)
    assert same_run(found, train(False))


class Counting(Trainer):
    """Counts in a metric, in an attribute on which the loss depends, and in a list."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen = MeanMetric()
        self.calls = 0
        self.sizes: list[int] = []

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        self.calls += 1
        self.sizes.append(len(batch[0]))
        self.seen.update(batch[0].mean(1))
        output = super().calculate_train_batch_loss(batch)
        return output | {"loss": output["loss"] / self.calls}


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", fails])
def test_a_compiled_step_with_a_state_computes_each_batch_once(backend):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch gives up some of it
        found = train({"backend": backend}, Counting)
    plain = train(False, Counting)
    assert found.calls == plain.calls == 6
    assert found.sizes == plain.sizes
    assert found.seen.weight == plain.seen.weight == 2 * len(DATA)
    assert torch.equal(found.seen.compute(), plain.seen.compute())
    assert same_run(found, plain)


def test_fullgraph_raises_the_compilers_error():
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=r"data-dependent|Tensor\.item"):
        train(AS_PLAIN | {"fullgraph": True}, Reads)


@pytest.mark.filterwarnings("ignore:Using a target size")  # torch's, before ours
@pytest.mark.parametrize(
    ("data", "error"),
    [
        (TensorDataset(torch.ones(8, 4), torch.ones(8, 1)), "shapes cannot be multiplied"),
        (TensorDataset(torch.ones(8, 5), torch.ones(8)), "would be broadcast"),
    ],
)
def test_mistakes_in_a_compiled_step_are_reported_as_usual(data, error):
    for asked in ({}, {"fullgraph": True}):
        with pytest.raises((RuntimeError, ValueError), match=error) as raised:
            train(AS_PLAIN | asked, data=data)
        assert not isinstance(raised.value, torch._dynamo.exc.TorchDynamoException)


def test_invalid_compile_options_are_refused():
    options: Any
    for options, error in (
        ({"backend": "induktor"}, "Invalid backend: 'induktor'"),
        ({"modus": "default"}, "the key 'modus', .*Did you mean 'mode'"),
    ):
        with pytest.raises((TypeError, RuntimeError), match=error):
            train(options)


# ---------------------------------------------------------------------------------- processes, devices


def train_compiled() -> dict[str, Any]:
    """Train compiled, uncompiled, and compiled from the middle; return how these compare."""
    # torch ignores it itself unless warnings are errors.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with shared_folder() as folder:
        whole = _train_with_states({"backend": backend}, folder / "whole")
        count = len(graphs)
        plain = _train_with_states(False, folder / "plain")
        resumed = _train_with_states({"backend": backend}, folder / "resumed", folder / "whole/update-000000002")
    return {
        "graphs": count,
        "difference": largest_difference(weights(whole), weights(plain)),
        "resumed": equal_weights(weights(resumed), weights(whole)),
    }


@pytest.mark.thorough
def test_processes_compile_the_model_inside_their_wrapper(two_ranks):
    for found in two_ranks(train_compiled):
        assert found["graphs"] >= 1
        assert found["difference"] < 1e-6
        assert found["resumed"]


@pytest.mark.slow
@only_with_soak
def test_inductor_gives_the_same_results_within_rounding_errors():
    """Runs in its own process, as it loads inductor."""
    printed = run_code(f"from {__name__} import inductor; inductor()")
    found = json.loads(printed.splitlines()[-1])
    assert found["repeated"]
    assert found["resumed"]
    assert 0 < found["difference"] < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("accumulation", [1, 3])
def test_cuda_graphs_overwrite_nothing_that_is_still_in_use(accumulation):
    losses: list[torch.Tensor] = []
    keep = listener(on_train_step_end=lambda trainer, batch_output, **kwargs: losses.append(batch_output["loss"]))
    settings = {"gradient_accumulation_steps": accumulation, "train_dataloader_kwargs": {"drop_last": True}}
    plain = train(False, Weighted, given={"callbacks": [keep]}, **settings)
    replayed = train({"mode": "reduce-overhead"}, Weighted, given={"callbacks": [keep]}, **settings)
    half = len(losses) // 2
    assert torch.allclose(torch.stack(losses[:half]), torch.stack(losses[half:]), atol=1e-4)
    assert largest_difference(weights(replayed.model), weights(plain.model)) < 1e-4


def test_a_loss_replaced_on_an_object_is_the_one_compiled():
    def twice(trainer: Trainer, batch: Any) -> Any:
        output = Trainer.calculate_train_batch_loss(trainer, batch)
        return output | {"loss": 2 * output["loss"]}

    def trained(trainer: Trainer) -> Trainer:
        trainer.train(DATA, 1, per_device_batch_size=10)
        trainer.calculate_train_batch_loss = MethodType(twice, trainer)
        trainer.train(DATA, 1, per_device_batch_size=10)
        return trainer

    def make(compile_step: Any) -> Trainer:
        return Trainer(small_net(), nn.MSELoss(), SGD, callbacks=(), seed=1, compile_step=compile_step)

    assert same_run(trained(make(AS_PLAIN)), trained(make(False)))
