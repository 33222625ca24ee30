"""Checkpoints in a single file: portable, and written atomically."""

from __future__ import annotations

import copy
import datetime
import enum
import errno
import io
import os
import pickle
import resource
import stat
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import StepLR

from pytorch_accel_lite import Trainer, callbacks
from pytorch_accel_lite.callbacks import SaveBestModelCallback
from pytorch_accel_lite.checkpoint import read_checkpoint, replacing, write_checkpoint
from tests import ancestor
from tests.launching import run_code
from tests.small_models import equal_weights, listener, make_data, make_model, make_trainer, same_bits, train, weights


def trained(seed: int = 0, **kwargs: Any) -> Trainer:
    """A trainer after two epochs of Adam under a schedule."""
    model = make_model(seed)
    trainer = make_trainer(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01))
    return train(trainer, epochs=2, create_scheduler_fn=lambda optimizer: StepLR(optimizer, 1, gamma=0.9), **kwargs)


def save_file(path: Path, model: nn.Module, prefix: str = "", **more: Any) -> Path:
    """Write a checkpoint with torch alone, its keys prefixed."""
    torch.save({"model_state_dict": {f"{prefix}{k}": v for k, v in model.state_dict().items()}, **more}, path)
    return path


# ------------------------------------------------------------------------------------------ round trip


def test_a_checkpoint_restores_model_optimizer_and_scheduler(tmp_path):
    saved = trained()
    saved.save_checkpoint(tmp_path / "model.pt", checkpoint_kwargs={"epoch": 2, "note": "good", "scores": [0.5, 0.75]})
    loaded = trained(seed=1)
    assert not equal_weights(weights(saved.model), weights(loaded.model))
    checkpoint = loaded.load_checkpoint(tmp_path / "model.pt")
    assert equal_weights(weights(saved.model), weights(loaded.model))
    assert same_bits(saved.optimizer.state_dict(), loaded.optimizer.state_dict())
    assert same_bits(saved.scheduler.state_dict(), loaded.scheduler.state_dict())
    assert (checkpoint["epoch"], checkpoint["note"], checkpoint["scores"]) == (2, "good", [0.5, 0.75])
    assert set(checkpoint) == {
        "model_state_dict", "optimizer_state_dict", "scheduler_state_dict", "epoch", "note", "scores"
    }  # fmt: skip


def test_training_continues_from_a_checkpoint_in_the_same_bits(tmp_path):
    saved = trained()
    saved.save_checkpoint(tmp_path / "model.pt")
    loaded = trained(seed=1)
    loaded.load_checkpoint(tmp_path / "model.pt")
    for trainer in (saved, loaded):
        train(trainer, epochs=2)
    assert equal_weights(weights(saved.model), weights(loaded.model))


def test_a_checkpoint_loads_after_the_scheduler_was_created(tmp_path):
    saved = trained()
    saved.save_checkpoint(tmp_path / "model.pt")
    model = make_model(1)
    seen: list[Any] = []

    def load(trainer: Trainer) -> None:
        trainer.load_checkpoint(tmp_path / "model.pt")
        seen.append((copy.deepcopy(trainer.scheduler.state_dict()), weights(trainer.model)))

    trainer = make_trainer(
        [listener(on_training_run_start=load)], model=model, optimizer=torch.optim.Adam(model.parameters())
    )
    train(trainer, create_scheduler_fn=lambda optimizer: StepLR(optimizer, 1, gamma=0.9))
    assert same_bits(seen[0][0], saved.scheduler.state_dict())
    assert equal_weights(seen[0][1], weights(saved.model))


def test_a_schedule_without_a_place_for_it_is_reported(tmp_path, capsys):
    trained().save_checkpoint(path := tmp_path / "model.pt")
    trainer = make_trainer(model=(model := make_model(1)), optimizer=torch.optim.Adam(model.parameters(), lr=0.01))
    trainer.load_checkpoint(path)
    assert f"The schedule in '{path}' was not loaded: train() creates its own" in capsys.readouterr().out
    trainer.load_checkpoint(path, load_scheduler=False)
    assert capsys.readouterr().out == ""


def test_a_file_is_plain_torch_and_loads_without_this_package(tmp_path):
    trainer = trained()
    trainer.save_checkpoint(tmp_path / "model.pt")
    checkpoint = torch.load(tmp_path / "model.pt", weights_only=True)
    model = make_model(1)
    model.load_state_dict(checkpoint["model_state_dict"])
    assert equal_weights(weights(model), weights(trainer.model))


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("scheduler", [True, False])
def test_loading_keeps_states_missing_in_the_checkpoint(tmp_path, optimizer, scheduler):
    saved, loaded = trained(), trained(seed=1)
    saved.save_checkpoint(tmp_path / "model.pt", save_optimizer=optimizer, save_scheduler=scheduler)
    before = copy.deepcopy((loaded.optimizer.state_dict(), loaded.scheduler.state_dict()))
    checkpoint = loaded.load_checkpoint(tmp_path / "model.pt")
    assert ("optimizer_state_dict" in checkpoint, "scheduler_state_dict" in checkpoint) == (optimizer, scheduler)
    assert equal_weights(weights(saved.model), weights(loaded.model))
    assert same_bits(loaded.optimizer.state_dict(), before[0]) != optimizer
    assert optimizer or same_bits(loaded.scheduler.state_dict(), before[1])


def test_states_excluded_from_loading_are_unchanged(tmp_path):
    trained().save_checkpoint(tmp_path / "model.pt")
    loaded = trained(seed=1)
    before = copy.deepcopy(loaded.optimizer.state_dict())
    checkpoint = loaded.load_checkpoint(tmp_path / "model.pt", load_optimizer=False, load_scheduler=False)
    assert same_bits(loaded.optimizer.state_dict(), before)
    assert "optimizer_state_dict" in checkpoint


def test_a_trainer_without_optimizer_saves_and_loads_weights(tmp_path):
    first, second = (make_trainer(model=make_model(seed), optimizer=None) for seed in (0, 1))
    first.save_checkpoint(tmp_path / "model.pt")
    assert set(second.load_checkpoint(tmp_path / "model.pt")) == {"model_state_dict"}
    assert equal_weights(weights(first.model), weights(second.model))


@pytest.mark.parametrize("per_node", [True, False])
def test_missing_folders_are_created(tmp_path, per_node):
    path = f"{tmp_path}/some/where/model.pt"
    trained().save_checkpoint(path, save_per_node=per_node)
    assert trained(seed=1).load_checkpoint(path)
    assert os.listdir(Path(path).parent) == ["model.pt"]


def test_saved_files_have_default_permissions(tmp_path):
    (tmp_path / "other").touch()
    trained().save_checkpoint(tmp_path / "model.pt")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("other", "model.pt")}
    assert len(modes) == 1


@pytest.mark.parametrize("save", ["save_checkpoint", "save_model"])
def test_a_file_that_is_saved_again_keeps_its_permissions(tmp_path, save):
    path = tmp_path / "model.safetensors"
    getattr(trained(), save)(path)
    for mode in (0o600, 0o640, 0o444):
        path.chmod(mode)
        before = path.stat().st_ino
        getattr(trained(), save)(path)
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert path.stat().st_ino != before


def test_nobody_else_can_read_a_private_file_while_it_is_written(tmp_path):
    path, modes = tmp_path / "model.pt", []
    path.touch(mode=0o600)
    with replacing(path) as temporary:
        modes.append(stat.S_IMODE(temporary.stat().st_mode))
    assert modes == [0o600]


def test_a_link_is_replaced_and_its_target_left_alone(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "precious").chmod(0o600)
    (tmp_path / "model.pt").symlink_to(tmp_path / "precious")
    trained().save_checkpoint(tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").is_symlink()
    assert (tmp_path / "precious").read_text() == "mine"
    (tmp_path / "other").touch()
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("other", "model.pt")}
    assert len(modes) == 1


def test_a_saved_file_and_its_folder_are_on_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.readlink(f"/proc/self/fd/{number}")))
    trained().save_checkpoint(tmp_path / "model.pt")
    assert [Path(path).name.rsplit(".", 2)[0] for path in synced] == [".model.pt", tmp_path.name]


def test_saving_in_the_middle_of_a_run_changes_no_bit_of_it(tmp_path):
    save = listener(on_train_step_end=lambda trainer, **_: trainer.save_checkpoint(tmp_path / "model.pt"))
    saving, plain = train(make_trainer([save])), train(make_trainer())
    assert equal_weights(weights(saving.model), weights(plain.model))
    assert equal_weights(torch.load(tmp_path / "model.pt")["model_state_dict"], weights(plain.model))


THINGS = {
    "numpy float": np.float64(0.5),
    "numpy int": np.int64(3),
    "numpy array": np.arange(3),
    "path": Path("data") / "train",
    "date": datetime.date(2024, 2, 29),
    "defaultdict": defaultdict(int, a=1),
    "OrderedDict": OrderedDict(a=1),
    "set": {1, 2},
    "tensor": torch.arange(3),
    "nested": {"a": [1, (2.5, None, True)]},
    "deep numpy": {"history": [{"accuracy": np.float32(0.5)}]},
}


@pytest.mark.parametrize("name", THINGS)
def test_unloadable_entries_are_refused_when_saved(tmp_path, name):
    trainer = trained()
    refusal = ""
    try:
        trainer.save_checkpoint(tmp_path / "model.pt", checkpoint_kwargs={"my_entry": THINGS[name]})
    except (TypeError, ValueError) as error:
        refusal = str(error)
    if refusal:
        assert "my_entry" in refusal
        assert not (tmp_path / "model.pt").exists()
        return
    entry = trainer.load_checkpoint(tmp_path / "model.pt")["my_entry"]
    if "numpy" in name:  # whose numbers may come back as those of Python
        np.testing.assert_equal(entry, THINGS[name])
    else:
        assert same_bits(entry, THINGS[name])


class Mode(enum.StrEnum):
    MIN = "min"


class Level(enum.IntEnum):
    HIGH = 3


Spoken = enum.Enum("Spoken", {"YES": "yes"}, type=str)


class OwnFloat(float):
    def __float__(self) -> float:
        raise AssertionError


class OwnBytes(bytes):
    pass


class OwnOrder(OrderedDict[str, Any]):
    pass


class OwnCounter(Counter[str]):
    pass


class OwnTensor(torch.Tensor):
    pass


def noted(tensor: torch.Tensor, note: object) -> torch.Tensor:
    """A tensor with an attribute, which torch would write with it."""
    tensor.note = note  # type: ignore[attr-defined]
    return tensor


#: What is loaded in place of a value of a subclass, wherever the value stands.
BECOMES_PLAIN: list[tuple[Any, Any]] = [
    (Mode.MIN, "min"),
    (Spoken.YES, "yes"),
    (Level.HIGH, 3),
    (np.str_("x"), "x"),
    (np.bytes_(b"x"), b"x"),
    (OwnBytes(b"x"), b"x"),
    (OwnFloat(1.5), 1.5),
    (OwnOrder(b=1, a=Mode.MIN), OrderedDict(b=1, a="min")),
    (OwnCounter("aab"), Counter("aab")),
    ({Mode.MIN: 1, Level.HIGH: 2, np.int64(5): 3, np.str_("x"): 4}, {"min": 1, 3: 2, 5: 3, "x": 4}),
    ([(Mode.MIN, {Level.HIGH})], [("min", {3})]),
]
#: Values that torch writes, but of which it loads only some.
OTHER_VALUES: list[Any] = [
    torch.zeros(2).as_subclass(OwnTensor),
    nn.Parameter(torch.zeros(2)),
    nn.UninitializedParameter(),
    torch.eye(2).to_sparse(),
    torch.empty(2, device="meta"),
    torch.zeros(2, dtype=torch.complex64).conj(),
    noted(torch.zeros(2), "text"),
    noted(torch.zeros(2), Mode.MIN),
    noted(nn.Parameter(torch.zeros(2)), Path()),
    np.longdouble(1),
    np.datetime64("2024-02-29"),
    np.float16(1),
    np.void(b"ab"),
    torch.Size([2]),
    torch.float32,
    frozenset({1}),
    10**400,
    "\udc80",
]


@pytest.mark.parametrize(("value", "plain"), BECOMES_PLAIN, ids=repr)
def test_values_of_subclasses_are_loaded_as_plain_ones(tmp_path, value, plain):
    write_checkpoint({"model_state_dict": {}, "my_entry": value}, tmp_path / "model.pt")
    entry = read_checkpoint(tmp_path / "model.pt")["my_entry"]
    assert repr(entry) == repr(plain)
    assert type(entry) is type(plain)


@pytest.mark.filterwarnings("ignore:Validating sparse")
@pytest.mark.parametrize("value", OTHER_VALUES, ids=lambda value: type(value).__name__)
def test_a_value_is_refused_or_can_be_loaded(tmp_path, value):
    refusal = ""
    try:
        write_checkpoint({"model_state_dict": {}, "my_entry": [value]}, tmp_path / "model.pt")
    except TypeError as error:
        refusal = str(error)
    if refusal:
        assert "checkpoint['my_entry'][0] is" in refusal
        assert not (tmp_path / "model.pt").exists()
    else:
        assert "my_entry" in read_checkpoint(tmp_path / "model.pt")


def test_tensors_of_unknown_classes_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"\['my_entry'\] is OwnTensor, which cannot be stored"):
        write_checkpoint({"my_entry": OTHER_VALUES[0]}, tmp_path / "model.pt")


class KnownTensor(torch.Tensor):
    pass


def test_an_attribute_that_does_not_load_is_found_in_each_tensor(tmp_path):
    """Also if tensors of the same class have been written before."""
    with torch.serialization.safe_globals([KnownTensor]):
        for note in (None, "text", Path(), "text"):
            tensor = torch.zeros(2).as_subclass(KnownTensor)
            tensor = tensor if note is None else noted(tensor, note)
            if isinstance(note, Path):
                with pytest.raises(TypeError, match=r"\['my_entry'\] is KnownTensor, which cannot be stored"):
                    write_checkpoint({"model_state_dict": {}, "my_entry": tensor}, tmp_path / "model.pt")
            else:
                write_checkpoint({"model_state_dict": {}, "my_entry": tensor}, tmp_path / "model.pt")
                assert type(read_checkpoint(tmp_path / "model.pt")["my_entry"]) is KnownTensor


def test_attributes_that_cannot_be_loaded_are_left_out(tmp_path):
    kept = {"text": noted(torch.ones(2), "text"), "path": noted(nn.Parameter(torch.ones(2)), Path())}
    write_checkpoint({"model_state_dict": {}, "my_entry": kept}, tmp_path / "model.pt")
    entry = read_checkpoint(tmp_path / "model.pt")["my_entry"]
    assert entry["text"].note == "text"
    assert isinstance(entry["path"], nn.Parameter)
    assert not hasattr(entry["path"], "note")
    assert equal_weights(entry, kept)


def test_an_unloadable_extra_state_of_a_model_is_refused(tmp_path):
    class Located(nn.Linear):
        def get_extra_state(self) -> Any:
            return tmp_path

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError

    with pytest.raises(TypeError, match=r"\['model_state_dict'\]\['_extra_state'\] is \w*PosixPath"):
        make_trainer(model=Located(4, 1)).save_checkpoint(tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()


def test_a_numpy_learning_rate_leaves_the_file_loadable(tmp_path):
    model = make_model()
    trainer = make_trainer(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=np.float64(0.1)))
    train(trainer)
    trainer.save_checkpoint(tmp_path / "model.pt")
    assert trainer.load_checkpoint(tmp_path / "model.pt")["optimizer_state_dict"]["param_groups"][0]["lr"] == 0.1


# ----------------------------------------------------------------------------------- wrapped models


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def partly_compiled(model: nn.Module) -> nn.Module:
    model[0] = compiled(model[0])  # type: ignore[index, operator]
    return model


@pytest.mark.parametrize("wrap", [compiled, partly_compiled])
def test_a_compiled_model_is_saved_like_a_plain_one(tmp_path, wrap):
    trainer = make_trainer(model=wrap(make_model(0)))
    trainer.save_checkpoint(tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)["model_state_dict"]
    assert equal_weights(saved, weights(make_model(0)))


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [compiled, partly_compiled])
def test_compiled_and_plain_models_load_each_others_checkpoints(tmp_path, wrap):
    plain, wrapped = make_trainer(model=make_model(0)), make_trainer(model=wrap(make_model(1)))
    plain.save_checkpoint(tmp_path / "plain.pt")
    wrapped.save_checkpoint(tmp_path / "compiled.pt")
    wrapped.load_checkpoint(tmp_path / "plain.pt")
    plain.load_checkpoint(tmp_path / "compiled.pt")
    data = make_data()
    assert torch.equal(wrapped.predict(data), make_trainer(model=make_model(0)).predict(data))
    assert equal_weights(weights(plain.model), weights(make_model(1)))


def test_a_compiled_model_can_be_trained_saved_and_loaded(tmp_path):
    model = compiled(make_model())
    trainer = make_trainer([SaveBestModelCallback(tmp_path / "best.pt", "train_loss_epoch")], model=model)
    train(trainer, epochs=2)
    plain = train(make_trainer(), epochs=2)
    assert equal_weights(torch.load(tmp_path / "best.pt")["model_state_dict"], weights(plain.model))
    assert trainer.get_model() is model
    assert trainer.get_model(keep_torch_compile=False) is model._orig_mod


class Holder(nn.Module):
    """A model with a part that is really called ``module``."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.module = make_model(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


PREFIXES = ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]


@pytest.mark.parametrize(
    ("make", "prefix"), [*((make_model, prefix) for prefix in PREFIXES), (Holder, ""), (Holder, "module.")]
)
@pytest.mark.parametrize("wrap", [compiled, lambda model: model])
def test_wrapper_prefixes_in_a_file_are_ignored(tmp_path, make, prefix, wrap):
    path = save_file(tmp_path / "model.pt", make(1), prefix)
    trainer = make_trainer(model=wrap(make(0)))
    trainer.load_checkpoint(path)
    assert equal_weights(weights(trainer.get_model(keep_torch_compile=False)), weights(make(1)))


# ------------------------------------------------------------------------------ what does not fit


def refuse_file(path: Path, error: type[Exception], match: str, trainer: Trainer | None = None, **kwargs: Any) -> str:
    """Expect an error that names the file, and an unchanged trainer."""
    trainer = trainer or trained()
    before = weights(trainer.model), copy.deepcopy(trainer.optimizer.state_dict()) if trainer.optimizer else None
    with pytest.raises(error, match=match) as caught:
        trainer.load_checkpoint(path, **kwargs)
    assert equal_weights(weights(trainer.model), before[0])
    assert not trainer.optimizer or same_bits(trainer.optimizer.state_dict(), before[1])
    return str(caught.value)


def test_keys_and_shapes_that_do_not_fit_are_all_listed(tmp_path):
    state = make_model(1).state_dict()
    state["0.weight"] = torch.zeros(8, 5)
    state["4.gamma"] = torch.zeros(1)
    del state["2.bias"]
    torch.save({"model_state_dict": state}, tmp_path / "model.pt")
    message = refuse_file(tmp_path / "model.pt", ValueError, "does not fit the model Sequential")
    assert str(tmp_path / "model.pt") in message
    assert "missing in the checkpoint: 2.bias" in message
    assert "not in the model: 4.gamma" in message
    assert "0.weight (checkpoint (8, 5), model (8, 4))" in message


def test_a_prefix_hides_no_other_mismatch_of_a_file(tmp_path):
    state = {f"module.{key}": value for key, value in Holder(1).state_dict().items()}
    del state["module.module.2.bias"]
    torch.save({"model_state_dict": state}, tmp_path / "model.pt")
    message = refuse_file(tmp_path / "model.pt", ValueError, "missing in the checkpoint", make_trainer(model=Holder(0)))
    assert "missing in the checkpoint: module.2.bias. " in message
    assert "not in the model" not in message


def test_a_long_list_of_keys_is_cut(tmp_path):
    path = save_file(tmp_path / "model.pt", nn.ModuleList(nn.Linear(1, 1) for _ in range(50)))
    message = refuse_file(path, ValueError, "and [0-9]+ more")
    assert len(message) < 1000


class Versioned(nn.Linear):
    """Reads its state by the version that the state names, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        assert local_metadata["version"] == 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_modules_with_versioned_states_load_their_own_files(tmp_path, name):
    first, second = (make_trainer(model=nn.Sequential(Versioned(4, 1))) for _ in range(2))
    (first.save_model if name.endswith("safetensors") else first.save_checkpoint)(tmp_path / name)
    second.load_checkpoint(tmp_path / name)
    assert torch.equal(first.model[0].weight, second.model[0].weight)


def test_a_missing_file_is_named(tmp_path):
    refuse_file(tmp_path / "model.pt", FileNotFoundError, r"no checkpoint at '.*model\.pt'")


def test_a_folder_is_not_a_checkpoint(tmp_path):
    refuse_file(tmp_path, FileNotFoundError, "no checkpoint at")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    "content", [b"", b"this is no checkpoint", b"PK\x03\x04 broken", pickle.dumps({"a": 1})], ids=repr
)
def test_a_file_that_is_not_a_checkpoint_is_named(tmp_path, content):
    (tmp_path / "model.pt").write_bytes(content)
    refuse_file(tmp_path / "model.pt", ValueError, r"model\.pt' cannot be loaded as plain tensors and values")


@pytest.mark.parametrize(
    ("content", "holds"), [([1, 2], "list"), ({"state_dict": {}, "epoch": 1}, "'state_dict', 'epoch'"), ({}, "dict")]
)
def test_a_torch_file_without_model_state_dict_is_refused(tmp_path, content, holds):
    torch.save(content, tmp_path / "model.pt")
    message = rf"model\.pt' is not a checkpoint: it has no 'model_state_dict'\. It holds {holds}\. Load what"
    refuse_file(tmp_path / "model.pt", ValueError, message)


def test_weights_that_torch_has_saved_are_loaded(tmp_path):
    model = make_model(seed=5)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    trainer = make_trainer(model=make_model())
    trainer.load_checkpoint(tmp_path / "model.pt")
    assert equal_weights(weights(trainer.model), weights(model))


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
def test_a_file_that_was_cut_short_is_named(tmp_path, keep):
    trained().save_checkpoint(tmp_path / "model.pt")
    content = (tmp_path / "model.pt").read_bytes()
    (tmp_path / "model.pt").write_bytes(content[: int(len(content) * keep)])
    refuse_file(tmp_path / "model.pt", ValueError, r"model\.pt' cannot be loaded as plain tensors and values")


class Malicious:
    """Runs a program when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return subprocess.check_call, ([sys.executable, "-c", f"open({str(self.trace)!r}, 'w')"],)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    trace = tmp_path / "was_run"
    pickle.loads(pickle.dumps(Malicious(trace)))
    assert trace.exists()  # the program really runs when nothing prevents it
    trace.unlink()
    save_file(tmp_path / "model.pt", make_model(1), extra=Malicious(trace))
    refuse_file(tmp_path / "model.pt", ValueError, r"model\.pt' cannot be loaded")
    assert not trace.exists()


def test_loading_a_checkpoint_with_an_optimizer_needs_one(tmp_path):
    trained().save_checkpoint(tmp_path / "model.pt")
    trainer = make_trainer(model=make_model(1), optimizer=None)
    refuse_file(tmp_path / "model.pt", ValueError, "no optimizer.*load_optimizer=False", trainer)
    trainer.load_checkpoint(tmp_path / "model.pt", load_optimizer=False)


def test_the_state_of_another_optimizer_is_refused(tmp_path):
    trained().save_checkpoint(tmp_path / "model.pt")
    model = make_model(1)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    trainer = make_trainer(model=model, optimizer=torch.optim.Adam(groups))
    refuse_file(tmp_path / "model.pt", ValueError, "parameter group", trainer)


# ------------------------------------------------------------------------------------- failing writes


class FileSize:
    """Limits the size of files of this process, to simulate a full disk."""

    def __init__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(self, size: int = 1000) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, self.before[1]))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


@pytest.fixture
def file_size():
    size = FileSize()
    yield size
    size.free()


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_full_disk_at_any_point_keeps_the_old_file(tmp_path, file_size, name):
    """Torch reports a full disk within a file as "unexpected pos"."""
    trainer, path = trained(), tmp_path / name
    save = trainer.save_checkpoint if name == "model.pt" else trainer.save_model
    save(path)
    before = path.read_bytes()
    with torch.no_grad():
        next(trainer.model.parameters()).add_(1)
    for size in range(0, path.stat().st_size, 50):
        file_size.limit(size)
        with pytest.raises(OSError, match=r"File too large: '.*/model") as raised:
            save(path)
        file_size.free()
        assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(
    "callback",
    [
        SaveBestModelCallback,
        pytest.param(
            lambda: callbacks.ModelEmaCallback(save_path="best_model.pt"), marks=pytest.mark.extension("model_ema")
        ),
    ],
)
def test_a_full_disk_is_named_if_the_best_model_does_not_fit(tmp_path, monkeypatch, file_size, callback):
    monkeypatch.chdir(tmp_path)
    train(make_trainer([callback()]), eval_dataset=True)
    size = Path("best_model.pt").stat().st_size
    limits = listener(on_eval_epoch_end=lambda t, **_: file_size.limit(size // 2))
    with pytest.raises(OSError, match=r"File too large: 'best_model\.pt'"):
        train(make_trainer([limits, callback()]), eval_dataset=True)


def test_an_entry_that_cannot_be_stored_leaves_the_old_file(tmp_path):
    trainer = trained()
    trainer.save_checkpoint(tmp_path / "model.pt")
    before = (tmp_path / "model.pt").read_bytes()
    with pytest.raises((TypeError, ValueError, AttributeError, pickle.PicklingError)):
        trainer.save_checkpoint(tmp_path / "model.pt", checkpoint_kwargs={"function": lambda: None})
    assert (tmp_path / "model.pt").read_bytes() == before
    assert os.listdir(tmp_path) == ["model.pt"]


def test_temporary_files_of_killed_processes_are_removed(tmp_path):
    left, under_way, foreign = (tmp_path / f".best.pt.{name}.tmp" for name in ("0123abcd", "89efcdab", "notes"))
    for path in (left, under_way, foreign):
        path.touch()
    for path in (left, foreign):
        os.utime(path, (0, 0))
    train(make_trainer([SaveBestModelCallback(tmp_path / "best.pt", "train_loss_epoch")]))
    assert {*tmp_path.iterdir()} == {tmp_path / "best.pt", under_way, foreign}


def test_a_best_model_that_was_not_saved_does_not_count(tmp_path, file_size):
    callback = SaveBestModelCallback(tmp_path / "best.pt", "score", greater_is_better=True)
    record = listener(on_train_epoch_end=lambda t: t.run_history.update_metric("score", t.progress.epoch))

    def fill_the_disk(trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.epoch == 2:
            file_size.limit()

    kept: list[Any] = []
    keep = listener(on_train_epoch_end=lambda t: kept.append(weights(t.model)))
    disk = listener(on_train_epoch_end=fill_the_disk, on_exception=lambda trainer, **_: file_size.free())
    trainer = make_trainer([record, keep, disk, callback])
    with pytest.raises(OSError, match="File too large"):
        train(trainer, epochs=3)
    assert (callback.best_metric, callback.best_metric_epoch) == (1, 1)
    assert torch.load(tmp_path / "best.pt")["score"] == 1
    trainer.load_checkpoint(tmp_path / "best.pt")
    assert equal_weights(weights(trainer.model), kept[0])


# ------------------------------------------------------------------------------------- the ancestor's

ANCESTOR = """
import sys
import torch
from torch import nn
from pytorch_accelerated import Trainer
from torch.optim.lr_scheduler import StepLR

from tests.small_models import make_data, make_model

folder = sys.argv[1]


def trained(seed):
    model = make_model(seed)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.Adam(model.parameters(), lr=0.01), callbacks=[])
    alone = {"num_workers": 0, "shuffle": False}
    trainer.train(
        make_data(), 2, per_device_batch_size=2, train_dataloader_kwargs=alone,
        create_scheduler_fn=lambda optimizer: StepLR(optimizer, 1, gamma=0.9),
    )
    return trainer


first = trained(2)
first.save_checkpoint(f"{folder}/ancestor.pt", checkpoint_kwargs={"epoch": 2})

second = trained(3)
checkpoint = second.load_checkpoint(f"{folder}/ours.pt")
assert checkpoint["note"] == "ours"
second.save_checkpoint(f"{folder}/ours_saved_by_the_ancestor.pt")
"""


@pytest.fixture(scope="module")
def exchange(tmp_path_factory):
    """A folder with a file saved by the ancestor, and one of ours that it loaded and saved again."""
    ancestor.skip_without_it()
    folder = tmp_path_factory.mktemp("exchange")
    trained().save_checkpoint(folder / "ours.pt", checkpoint_kwargs={"note": "ours"})
    run_code(ANCESTOR, str(folder))
    return folder


def test_a_file_of_the_ancestor_is_loaded_with_its_optimizer(exchange):
    theirs = torch.load(exchange / "ancestor.pt", weights_only=True)
    trainer = trained(seed=1)
    assert trainer.load_checkpoint(exchange / "ancestor.pt")["epoch"] == 2
    assert equal_weights(weights(trainer.model), theirs["model_state_dict"])
    assert same_bits(trainer.optimizer.state_dict(), theirs["optimizer_state_dict"])
    assert trainer.scheduler.state_dict()["_step_count"] == theirs["scheduler_state_dict"]["_step_count"]
    train(trainer)


def test_the_ancestor_loads_our_file_with_its_optimizer(exchange):
    ours = torch.load(exchange / "ours.pt", weights_only=True)
    back = torch.load(exchange / "ours_saved_by_the_ancestor.pt", weights_only=True)
    assert equal_weights(ours["model_state_dict"], back["model_state_dict"])
    assert same_bits(ours["optimizer_state_dict"], back["optimizer_state_dict"])
    assert back["scheduler_state_dict"]["_step_count"] == ours["scheduler_state_dict"]["_step_count"]


# ------------------------------------------------------------------------------------------ damage


def flip(path: Path, position: int, bit: int = 0x40) -> bytes:
    """Change a byte of a file, and return what it was before."""
    content = path.read_bytes()
    path.write_bytes(content[:position] + bytes([content[position] ^ bit]) + content[position + 1 :])
    return content


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_no_flipped_byte_of_a_checkpoint_is_used(tmp_path, name):
    path, model = tmp_path / name, nn.Linear(2, 2)
    trainer = make_trainer(model=model)
    save = (
        trainer.save_model if name.endswith("safetensors") else partial(trainer.save_checkpoint, save_optimizer=False)
    )
    save(path)
    saved = weights(model)
    loaded = []
    positions = range(0, path.stat().st_size, 3)
    for position in positions:
        content = flip(path, position)
        with suppress(ValueError):
            loaded.append(read_checkpoint(path)["model_state_dict"])
        path.write_bytes(content)
    assert all(equal_weights(other, saved) for other in loaded)  # flipped in what fills the space between records
    assert len(loaded) < len(positions) - 50


# ------------------------------------------------------------------------------------------ open files


class InPieces(io.FileIO):
    """An unbuffered file that writes only a few bytes at a time."""

    def write(self, data: Any) -> int:
        return super().write(memoryview(data)[:1000])


@pytest.mark.parametrize("opened", [io.BytesIO, partial(open, mode="w+b"), partial(InPieces, mode="w+")])
@pytest.mark.parametrize("method", ["save_checkpoint", "save_model"])
def test_an_open_file_is_written_and_read_from_its_position(tmp_path, opened, method):
    saved, loaded = trained(), trained(seed=1)
    with io.BytesIO() if opened is io.BytesIO else opened(tmp_path / "file") as file:
        file.write(b"before")
        getattr(saved, method)(file)
        end = file.tell()
        if opened is not io.BytesIO:
            assert (tmp_path / "file").stat().st_size == end  # nothing is left in a buffer
        file.seek(6)
        assert same_bits(loaded.load_checkpoint(file)["model_state_dict"], weights(saved.model))
        assert file.tell() == end
        assert equal_weights(weights(saved.model), weights(loaded.model))
        if method == "save_checkpoint":
            assert same_bits(saved.optimizer.state_dict(), loaded.optimizer.state_dict())
        file.seek(6)
        assert equal_weights(read_checkpoint(file)["model_state_dict"], weights(saved.model))


def test_saving_to_an_open_file_equals_saving_to_a_path(tmp_path):
    trainer = trained()
    for name, save in {"model.pt": trainer.save_checkpoint, "model.safetensors": trainer.save_model}.items():
        save(tmp_path / name)
        with open(tmp_path / "open", "wb") as file:
            save(file)
        read = torch.load if name == "model.pt" else load_file
        assert same_bits(read(tmp_path / "open"), read(tmp_path / name))
    other = trained(seed=1)
    with open(tmp_path / "open", "rb") as file:
        other.load_checkpoint(file)
    assert equal_weights(weights(other.model), weights(trainer.model))


@pytest.mark.parametrize("method", ["save_checkpoint", "save_model"])
def test_no_flipped_byte_of_an_open_file_is_used(method):
    trainer, file = make_trainer(model=nn.Linear(2, 2)), io.BytesIO()
    getattr(trainer, method)(file)
    saved, loaded, content = weights(trainer.model), [], file.getvalue()
    positions = range(0, len(content), 7)
    for position in positions:
        damaged = content[:position] + bytes([content[position] ^ 0x40]) + content[position + 1 :]
        with suppress(ValueError):
            loaded.append(read_checkpoint(io.BytesIO(damaged))["model_state_dict"])
    assert all(equal_weights(other, saved) for other in loaded)
    assert len(loaded) < len(positions) - 20


def test_a_damaged_open_file_is_named_and_not_loaded(tmp_path):
    other = make_trainer(model=make_model(1))
    before, file = weights(other.model), io.BytesIO()
    make_trainer(model=make_model(0)).save_checkpoint(file)
    content = bytearray(file.getvalue())
    content[content.index(make_model(0).state_dict()["0.weight"].numpy().tobytes())] ^= 0x40
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"The file '<BytesIO>' is damaged: its content does not match its checksum"):
        other.load_checkpoint(io.BytesIO(content))
    with open(tmp_path / "model.pt", "rb") as opened, pytest.raises(ValueError, match=r"model\.pt' is damaged"):
        read_checkpoint(opened)
    for cut in (0, 100, len(content) // 2):
        with pytest.raises(ValueError, match="'<BytesIO>' cannot be loaded as plain tensors"):
            read_checkpoint(io.BytesIO(content[:cut]))
    assert equal_weights(weights(other.model), before)


def test_checkpoints_one_after_another_are_not_mixed_up():
    file = io.BytesIO()
    for seed in (0, 1):
        start = file.tell()
        write_checkpoint({"model_state_dict": make_model(seed).state_dict()}, file)
    file.seek(0)
    with pytest.raises(ValueError, match=r"does not begin at its position. Call seek\(\)"):
        read_checkpoint(file)
    file.seek(start)
    assert equal_weights(read_checkpoint(file)["model_state_dict"], weights(make_model(1)))


def closed() -> io.BytesIO:
    file = io.BytesIO()
    file.close()
    return file


def test_anything_but_an_open_binary_file_is_an_error(tmp_path):
    trainer, path = trained(), tmp_path / "file"
    calls = {
        "save_path": trainer.save_checkpoint,
        "path": trainer.save_model,
        "checkpoint_path": trainer.load_checkpoint,
    }
    with open(path, "wb") as to_write, open(path, "rb") as to_read:
        for argument, call in calls.items():
            mode, verb, other = (
                ("rb", "read", to_write) if call == trainer.load_checkpoint else ("wb", "written", to_read)
            )
            files = {
                f"is open as text. Open it with mode '{mode}'": io.StringIO(),
                "is closed": closed(),
                f"cannot be {verb}. Open it with '{mode}'": other,
                "must be a path or an open binary file, not int": 3,
            }
            for problem, file in files.items():
                with pytest.raises((TypeError, ValueError), match=rf"^{argument}=.*{problem}"):
                    call(file)
    assert path.read_bytes() == b""


def test_a_full_disk_is_named_if_a_file_is_open(tmp_path, file_size):
    trainer = trained()
    for save in (trainer.save_checkpoint, trainer.save_model):
        with open(tmp_path / "model", "wb", buffering=0) as file:
            file_size.limit(100)
            with pytest.raises(OSError, match=r"File too large: '.*/model'"):
                save(file)
            file_size.free()


def save_and_load_open_files(folder: Path) -> list[Any]:
    trainer = make_trainer(model=make_model(0))
    rank, found = trainer.ranks.rank, []
    for save in (trainer.save_checkpoint, trainer.save_model):
        file = io.BytesIO() if rank == 0 else (folder / "ignored").open("wb")
        save(file)
        found.append(file.tell())
        save(io.BytesIO() if rank == 0 else None)
        try:
            save(closed())
        except ValueError as error:
            found.append(str(error).split(" object at ")[0])
    own = io.BytesIO()
    torch.save(make_model(1).state_dict(), own)
    own.seek(0)
    trainer.load_checkpoint(own)
    found.append(equal_weights(weights(trainer.model), weights(make_model(1))))
    try:
        trainer.load_checkpoint(io.BytesIO(own.getvalue()[: -20 if rank else None]))
    except ValueError as error:
        found.append(str(error))
    return found


@pytest.mark.processes
def test_only_the_main_process_writes_its_open_file(tmp_path, two_ranks):
    first, second = two_ranks.run(save_and_load_open_files, tmp_path)
    assert first[0] > 0 < first[2]
    assert second[0] == second[2] == 0
    assert (first[1], *first[3:]) == (second[1], *second[3:])
    assert first[1].startswith("save_path=")
    assert first[3].startswith("path=")
    assert first[4] is True
    assert "<BytesIO>" in first[5]


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "model"])
def test_damaged_weights_are_not_loaded(tmp_path, name):
    path = tmp_path / name
    trainer = trained()
    (trainer.save_checkpoint if name.endswith(".pt") else trainer.save_model)(path)
    file = path / "model.safetensors" if path.is_dir() else path
    weight = next(iter(trainer.model.parameters())).detach().numpy().tobytes()
    flip(file, file.read_bytes().index(weight))
    other = trained(seed=1)
    before = weights(other.model)
    with pytest.raises(ValueError, match=rf"{file.name}' is damaged: its content does not match its checksum"):
        other.load_checkpoint(path)
    assert equal_weights(weights(other.model), before)


def test_a_damaged_best_model_is_not_loaded_at_the_end(tmp_path):
    path = tmp_path / "best.pt"

    def damage(trainer: Trainer, **kwargs: Any) -> None:
        weight = torch.load(path)["model_state_dict"]["0.weight"].numpy().tobytes()
        flip(path, path.read_bytes().index(weight))

    callbacks = [listener(on_training_run_end=damage), SaveBestModelCallback(path, "train_loss_epoch")]
    with pytest.raises(ValueError, match=r"best.pt' is damaged"):
        train(make_trainer(callbacks=callbacks), epochs=1)


def test_files_of_others_have_no_checksum_and_are_loaded(tmp_path):
    model = make_model(0)
    torch.save(model.state_dict(), tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "plain.safetensors")
    torch.serialization.set_crc32_options(False)
    try:
        save_file(tmp_path / "unchecked.pt", model)
    finally:
        torch.serialization.set_crc32_options(True)
    for file in tmp_path.iterdir():
        other = make_trainer(model=make_model(1))
        other.load_checkpoint(file)
        assert equal_weights(weights(other.model), weights(model))


def test_other_libraries_read_files_with_a_checksum(tmp_path):
    trainer = trained()
    trainer.save_model(tmp_path / "model.safetensors")
    trainer.save_checkpoint(tmp_path / "model.pt")
    plain = torch.load(tmp_path / "model.pt", weights_only=True)["model_state_dict"]
    assert equal_weights(safetensors.torch.load_file(tmp_path / "model.safetensors"), plain)


def load_damaged(path: Path) -> str:
    trainer = make_trainer(model=make_model(1))
    try:
        trainer.load_checkpoint(path, load_optimizer=False)
    except ValueError as error:
        return str(error)
    return "loaded"


@pytest.mark.processes
def test_damaged_weights_are_refused_on_all_processes(tmp_path, two_ranks):
    make_trainer(model=make_model(0)).save_checkpoint(tmp_path / "model.pt")
    weight = make_model(0).state_dict()["0.weight"].numpy().tobytes()
    path = tmp_path / "model.pt"
    flip(path, path.read_bytes().index(weight))
    first, second = two_ranks.run(load_damaged, path)
    assert first == second
    assert "model.pt' is damaged: its content does not match its checksum" in first
