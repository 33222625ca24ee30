"""Checkpoints in open files, on disk and in memory."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pytorch_accel_lite.checkpoint import read_checkpoint, write_checkpoint
from tests.checkpoint.small_checkpoints import trained
from tests.small_models import equal_weights, make_model, make_trainer, same_bits, weights


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
