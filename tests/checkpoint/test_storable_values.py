"""Values beside the weights of a checkpoint: what is loaded of them, and which are refused."""

from __future__ import annotations

import datetime
import enum
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pytorch_accel_lite.checkpoint import read_checkpoint, write_checkpoint
from tests.checkpoint.small_checkpoints import trained
from tests.small_models import equal_weights, make_model, make_trainer, same_bits, train

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
    "types of torch": {"momentum_dtype": torch.bfloat16, "device": torch.device("cpu"), "shape": torch.Size([2, 3])},
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


def test_options_of_an_optimizer_may_be_types_of_torch(tmp_path):
    def create() -> Any:
        model = make_model()
        options = {"momentum_dtype": torch.bfloat16, "factored_shape": torch.Size([2])}  # as timm's Adafactor has
        return make_trainer(model=model, optimizer=torch.optim.SGD([{"params": model.parameters(), **options}]))

    saved, loaded = create(), create()
    saved.save_checkpoint(tmp_path / "model.pt")
    loaded.optimizer.param_groups[0]["momentum_dtype"] = None
    loaded.load_checkpoint(tmp_path / "model.pt")
    assert loaded.optimizer.state_dict() == saved.optimizer.state_dict()


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


@pytest.mark.parametrize("name", ["model.safetensors", "folder"])
def test_an_extra_state_that_is_no_tensor_is_no_safetensors(tmp_path, name):
    class Counting(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"count": 1}

        def set_extra_state(self, state: Any) -> None:
            assert state == {"count": 1}

    trainer = make_trainer(model=Counting(4, 1))
    with pytest.raises(TypeError, match=r"'_extra_state' is dict, .* Save the model with save_checkpoint\(\)"):
        trainer.save_model(tmp_path / name)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    trainer.save_checkpoint(tmp_path / "model.pt")
    trainer.load_checkpoint(tmp_path / "model.pt")


def test_a_numpy_learning_rate_leaves_the_file_loadable(tmp_path):
    model = make_model()
    trainer = make_trainer(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=np.float64(0.1)))
    train(trainer)
    trainer.save_checkpoint(tmp_path / "model.pt")
    assert trainer.load_checkpoint(tmp_path / "model.pt")["optimizer_state_dict"]["param_groups"][0]["lr"] == 0.1
