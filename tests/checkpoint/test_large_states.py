"""Training states with tensors in files of their own: exactness, damage and older formats."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import NonFiniteLossError, Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint import DamagedStateError, verify_state
from tests.small_models import adamw_trainer, changed_manifest, equal_weights, float64_data

BIG, SEVERAL_PIECES = 150, 2100


def large_trainer(width: int = BIG, callbacks: Any = (), **kwargs: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, width), nn.Linear(width, width), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return Trainer(model, nn.MSELoss(), optimizer, callbacks, seed=3, **kwargs)


def train(trainer: Trainer, **kwargs: Any) -> Trainer:
    trainer.train(float64_data(8, dtype=torch.float32), 2, per_device_batch_size=4, **kwargs)
    return trainer


@pytest.mark.extension("model_ema")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_momentum_and_averages_resume_to_the_same_bits(tmp_path, asynchronous):
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    def callbacks(folder: Path) -> list[Any]:
        saving = SaveTrainingStateCallback(folder, save_every_n_steps=1, asynchronous=asynchronous)
        ema = ModelEmaCallback(decay=0.9, evaluate_during_training=False, save_path=tmp_path / "ema.pt")
        return [ema, saving]

    whole = train(large_trainer(callbacks=callbacks(tmp_path / "states")))
    saved = sorted((tmp_path / "states").glob("update-*"))
    assert len(saved) == 4
    for state in saved:
        assert "trainer.safetensors" in verify_state(state)["files"]
        shutil.copytree(state, tmp_path / "again" / state.name)
        resumed = train(large_trainer(callbacks=callbacks(tmp_path / "again")), resume_from="latest")
        shutil.rmtree(tmp_path / "again")
        assert equal_weights(resumed.model.state_dict(), whole.model.state_dict())
        momentum = [trainer.optimizer.state_dict()["state"] for trainer in (resumed, whole)]
        assert all(equal_weights(momentum[0][index], momentum[1][index]) for index in momentum[1])
        averages = [next(iter(trainer.callback_handler)).state_dict() for trainer in (resumed, whole)]
        assert equal_weights(*(found["module"] for found in averages))


def flip_last(content: bytearray) -> None:
    content[-1] ^= 1


def swap_pieces(content: bytearray) -> None:
    size = 8 << 20
    content[:size], content[size : 2 * size] = content[size : 2 * size], content[:size]


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip_last, swap_pieces])
def test_damage_anywhere_in_a_file_of_several_pieces_is_named(tmp_path, damage: Callable[[bytearray], None]):
    trainer = train(large_trainer(SEVERAL_PIECES))
    trainer.save_training_state(tmp_path / "state")
    for name in ("model.safetensors", "trainer.safetensors"):
        path = tmp_path / "state" / name
        intact = path.read_bytes()
        content = bytearray(intact)
        damage(content)
        path.write_bytes(content)
        before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
        with pytest.raises(DamagedStateError, match=rf"{name}' is damaged: its content does not match its checksum"):
            trainer.load_training_state(tmp_path / "state")
        assert equal_weights(trainer.model.state_dict(), before)
        path.write_bytes(intact)
    verify_state(tmp_path / "state")


class Kept:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_tensors_of_every_kind_are_restored_exactly(tmp_path):
    flat = torch.randn(40_000)
    kept = {
        "plain": torch.randn(200, 200),
        "views of one": [flat[:20_000], flat[20_000:]],
        "transposed": torch.randn(150, 300).t(),
        "complex": torch.randn(100, 100, dtype=torch.complex128),
        "dotted": {"a": {"b": torch.ones(200, 200)}, "a.b": torch.zeros(200, 200)},
        "ordered": OrderedDict(b=torch.randn(200, 200, dtype=torch.bfloat16), a=1),
        "whole numbers": (torch.arange(50_000), torch.randn(3)),
    }
    trainer = large_trainer()
    trainer.register_for_checkpointing("kept", Kept(kept))
    trainer.save_training_state(tmp_path / "state")
    other, found = large_trainer(), Kept(None)
    other.register_for_checkpointing("kept", found)
    other.load_training_state(tmp_path / "state")
    assert_alike(found.state, kept)
    first, second = found.state["views of one"]
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert found.state["transposed"].stride() == kept["transposed"].stride()


def assert_alike(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_alike(found[key], value)
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    else:
        assert found == expected


def as_in_format_1(state: Path) -> None:
    """Give a state without large tensors the manifest, and the generator of python, that versions 0.1 and 0.2 wrote."""
    files = json.loads((state / "manifest.json").read_bytes())["files"]
    assert "trainer.safetensors" not in files
    own = torch.load(state / "rank00000.pt")
    version, numbers, cached = own["generators"]["python"]
    own["generators"]["python"] = version, tuple(numbers.tolist()), cached
    torch.save(own, state / "rank00000.pt")
    with changed_manifest(state, *files) as manifest:
        manifest["format_version"] = 1


@pytest.mark.extension("printed_states")
def test_states_of_earlier_versions_are_verified_and_resumed(tmp_path, capsys):
    from pytorch_accel_lite.checkpoint import print_contents

    def small_trainer() -> Trainer:
        return large_trainer(5, [SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=1)])

    whole = train(small_trainer())
    state = shutil.copytree(tmp_path / "states" / "update-000000001", tmp_path / "old")
    as_in_format_1(state)
    print_contents(state)
    assert "format 1" in capsys.readouterr().out
    assert equal_weights(train(small_trainer(), resume_from=state).model.state_dict(), whole.model.state_dict())
    content = bytearray((state / "trainer.pt").read_bytes())
    flip_last(content)
    (state / "trainer.pt").write_bytes(content)
    with pytest.raises(DamagedStateError, match=r"trainer.pt' is damaged"):
        train(small_trainer(), resume_from=state)


def test_weights_of_any_size_are_checked():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    trainer = adamw_trainer(model)
    with torch.no_grad():
        model[0].weight.fill_(1e30)  # whose squares overflow
        trainer.check_weights()
        for tensor, bad in ((model[0].bias, math.inf), (model[0].weight, math.nan), (model.mask, math.nan)):
            before = tensor.clone()
            tensor[0] = bad
            with pytest.raises(NonFiniteLossError, match="infinite or NaN"):
                trainer.check_weights()
            tensor.copy_(before)
    trainer.check_weights()


@pytest.mark.parametrize("save", [Trainer.save_model, Trainer.save_checkpoint])
def test_non_finite_weights_are_saved_with_a_warning(save, tmp_path):
    trainer = adamw_trainer(nn.Linear(2, 2))
    save(trainer, tmp_path / "finite.safetensors")
    with torch.no_grad():
        trainer.model.bias[0] = math.nan
    with pytest.warns(UserWarning, match=rf"{save.__name__}\(\) saves weights that are infinite or NaN") as said:
        save(trainer, tmp_path / "nan.safetensors")
    assert [each.filename for each in said] == [__file__]


def calls_while_resuming(folder: Path, length: int) -> int:
    """The number of function calls while a run with a long history is resumed."""
    trainer = large_trainer(5)
    trainer.train(float64_data(8, dtype=torch.float32), 1)
    for number in range(length):
        trainer.run_history.update_metric("own", number / 3)
    trainer.save_training_state(folder)
    resumed, calls = large_trainer(5), []
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    try:
        resumed.train(float64_data(8, dtype=torch.float32), 1, resume_from=folder)
    finally:
        sys.setprofile(None)
    assert resumed.run_history["own"] == [number / 3 for number in range(length)]
    return calls.count("call")


def test_resuming_does_not_visit_each_value_of_the_history(tmp_path):
    calls_while_resuming(tmp_path / "first", 20)
    short, long = (calls_while_resuming(tmp_path / str(length), length) for length in (20, 20_000))
    assert abs(long - short) < 2000
