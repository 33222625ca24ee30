"""Imports: public names, and no side effects."""

from __future__ import annotations

import importlib
import importlib.resources
import json
import sys
from typing import Any

import pytest

import pytorch_accel_lite
from tests import ancestor
from tests.launching import ROOT, run_code, run_python

MODULES = ["", ".trainer", ".callbacks", ".tracking", ".run_config", ".utils", ".checkpoint", ".data", ".schedulers"]


@pytest.mark.parametrize("module", MODULES)
def test_all_public_names_exist(module):
    imported = importlib.import_module(f"pytorch_accel_lite{module}")
    names = getattr(imported, "__all__", [])
    assert len(names) == len(set(names))
    for name in names:
        assert getattr(imported, name) is not None


@pytest.mark.parametrize("module", ["", ".trainer", ".callbacks", ".schedulers"])
def test_public_modules_declare_all(module):
    assert importlib.import_module(f"pytorch_accel_lite{module}").__all__


ANCESTORS_IMPORTS = """
from pytorch_accel_lite import Trainer, TrainerPlaceholderValues
from pytorch_accel_lite.callbacks import (
    CallbackHandler,
    EarlyStoppingCallback,
    LogMetricsCallback,
    LimitBatchesCallback,
    LimitEvalStepsCallback,
    ModelEmaCallback,
    MoveModulesToDeviceCallback,
    PrintProgressCallback,
    ProgressBarCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    StepBasedEvaluationCallback,
    StopTrainingError,
    TerminateOnNaNCallback,
    TrainerCallback,
    WSDCheckpointCallback,
    get_default_callbacks,
)
from pytorch_accel_lite.run_config import TrainerRunConfig
from pytorch_accel_lite.schedulers import CosineLrScheduler, WSDLrScheduler
from pytorch_accel_lite.schedulers.cosine_scheduler import CosineLrScheduler
from pytorch_accel_lite.schedulers.scheduler_base import SchedulerBase, StatefulSchedulerBase
from pytorch_accel_lite.schedulers.wsd_scheduler import WSDLrScheduler, estimate_checkpoint_steps
from pytorch_accel_lite.tracking import InMemoryRunHistory, LossTracker, RunHistory
from pytorch_accel_lite.trainer import (
    DEFAULT_CALLBACKS,
    Trainer,
    TrainerPlaceholderValues,
    TrainerWithTimmScheduler,
    replace_trainer_placeholder_values,
)
from pytorch_accel_lite.finetuning import ModelFreezer
from pytorch_accel_lite.utils import (
    DataLoaderSlice,
    LimitBatches,
    ModelEma,
    local_process_zero_first,
    local_process_zero_only,
    remove_padding,
    world_process_zero_only,
)
"""


@pytest.mark.extension("finetuning", "model_ema", "progress_bar", "named_schedules", "pytorch_accelerated")
def test_imports_of_the_ancestor_work_with_the_package_renamed():
    scope: dict[str, Any] = {}
    exec(ANCESTORS_IMPORTS, scope)
    assert scope["Trainer"] is pytorch_accel_lite.Trainer
    assert issubclass(scope["TrainerWithTimmScheduler"], scope["Trainer"])


@pytest.mark.programs
def test_the_imports_also_work_with_the_ancestor():
    """Verifies the list above."""
    ancestor.skip_without_it()
    run_code(ANCESTORS_IMPORTS.replace("pytorch_accel_lite", "pytorch_accelerated"))


def test_a_name_is_the_same_object_wherever_it_is_imported_from():
    modules = [importlib.import_module(f"pytorch_accel_lite{name}") for name in MODULES]
    for name in pytorch_accel_lite.__all__:
        assert len({id(getattr(module, name)) for module in modules if hasattr(module, name)}) == 1, name


LOOK = """
import json, logging, random, sys, warnings
import accelerate, numpy, torch, tqdm


def states():
    return [
        torch.get_rng_state().tolist(),
        repr(numpy.random.get_state()),
        repr(random.getstate()),
        torch.initial_seed(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.get_num_threads(),
        str(torch.get_default_dtype()),
        torch.is_grad_enabled(),
        torch.multiprocessing.get_start_method(allow_none=True),
        repr(warnings.filters),
    ]


def levels():
    loggers = {"": logging.root} | logging.root.manager.loggerDict
    return {
        name: (logger.level, len(logger.handlers), logger.disabled, logger.propagate)
        for name, logger in loggers.items() if isinstance(logger, logging.Logger)
    }


seen = {}
torch.manual_seed(1)
random.seed(2)
numpy.random.seed(3)
before, modules = states(), set(sys.modules)
before_levels = levels()

import pytorch_accel_lite
import pytorch_accel_lite.callbacks, pytorch_accel_lite.run_config, pytorch_accel_lite.tracking
import pytorch_accel_lite.schedulers, pytorch_accel_lite.trainer, pytorch_accel_lite.utils

seen["modules"] = sorted(set(sys.modules) - modules)
seen["after importing"] = [old == new for old, new in zip(before, states(), strict=True)]
after = levels()
seen["levels after importing"] = {name for name in before_levels if after[name] != before_levels[name]}
seen["levels of new loggers"] = {n: level for n, level in after.items() if n not in before_levels}

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before, before_levels = states(), levels()
trainers = [
    pytorch_accel_lite.Trainer(model, torch.nn.MSELoss(), optimizer),
    pytorch_accel_lite.Trainer(model, torch.nn.MSELoss(), optimizer, seed=4),
    pytorch_accel_lite.TrainerWithTimmScheduler(model, torch.nn.MSELoss(), optimizer),
]
seen["after constructing"] = [old == new for old, new in zip(before, states(), strict=True)]
after = levels()
seen["levels after constructing"] = {name for name in before_levels if after[name] != before_levels[name]}
seen["all modules"] = sorted(sys.modules)
print(json.dumps(seen, default=list))
"""


@pytest.fixture(scope="module")
def fresh_interpreter() -> dict[str, Any]:
    """What a fresh interpreter saw before and after importing the package and constructing trainers."""
    return json.loads(run_python(LOOK).splitlines()[-1])


@pytest.mark.parametrize("when", ["importing", "constructing"])
def test_importing_and_constructing_change_no_random_state(fresh_interpreter, when):
    assert fresh_interpreter[f"after {when}"] == [True] * 12


@pytest.mark.parametrize("when", ["importing", "constructing"])
def test_importing_and_constructing_change_no_loggers_level(fresh_interpreter, when):
    assert fresh_interpreter[f"levels after {when}"] == []


@pytest.mark.thorough
def test_new_loggers_leave_level_and_handlers_to_the_user(fresh_interpreter):
    for name, (level, handlers, disabled, propagate) in fresh_interpreter["levels of new loggers"].items():
        assert (level, handlers, disabled, propagate) == (0, 0, False, True), name


def test_importing_costs_only_accelerate_torch_numpy_and_tqdm(fresh_interpreter):
    packages = {name.partition(".")[0] for name in fresh_interpreter["modules"]}
    foreign = packages - {"pytorch_accel_lite", "accelerate", "numpy", "torch", "tqdm"} - set(sys.stdlib_module_names)
    assert not {name for name in foreign if not name.startswith("_")}
    assert "pytorch_accel_lite" in packages


@pytest.mark.sampled
@pytest.mark.parametrize(
    "package",
    [
        "matplotlib",
        "pandas",
        "timm",
        "sklearn",
        "torchvision",
        "torchmetrics",
        "IPython",
        "jsonargparse",
        "optuna",
        "scipy",
        "torchinfo",
    ],
)
@pytest.mark.parametrize("when", ["modules", "all modules"])
def test_extras_are_imported_only_when_they_are_used(fresh_interpreter, package, when):
    before = set(fresh_interpreter["all modules"]) - set(fresh_interpreter["modules"]) if when == "modules" else set()
    assert not [name for name in set(fresh_interpreter[when]) - before if name.partition(".")[0] == package]


def test_the_package_is_marked_as_typed():
    assert importlib.resources.files("pytorch_accel_lite").joinpath("py.typed").is_file()
    assert "py.typed" in (ROOT / "pyproject.toml").read_text()


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    assert pytorch_accel_lite.__version__ == version("pytorch-accel-lite")
