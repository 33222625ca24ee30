"""Training states with valid checksums but malformed content: the file is named, and an older state used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint import DamagedStateError
from tests.small_models import changed_manifest, make_trainer, train

FIELDS = ["format_version", "saved_at", "progress", "world_size", "seed", "data_seed", "run_config", "files"]
ODD: list[Any] = [..., "odd", [1], float("nan"), True, -(10**30)]


def resumable(folder: Path) -> Trainer:
    return make_trainer([SaveTrainingStateCallback(folder, save_every_n_steps=1)], seed=1)


def resume(folder: Path) -> Trainer:
    return train(resumable(folder), 2, resume_from="latest")


def saved(folder: Path) -> list[Path]:
    """The states of a short run, the newest last."""
    train(resumable(folder))
    return sorted(folder.glob("update-*"))


@pytest.mark.extension("printed_states")
@pytest.mark.sampled
@pytest.mark.parametrize("field", FIELDS)
def test_a_malformed_manifest_field_is_named_and_skipped(tmp_path, field, capsys):
    from pytorch_accel_lite.checkpoint import print_contents

    *_, older, newest = saved(tmp_path)
    intact = (newest / "manifest.json").read_bytes()
    for value in ODD:
        (newest / "manifest.json").write_bytes(intact)
        with changed_manifest(newest) as manifest:
            manifest |= {field: value}
            if value is ...:
                del manifest[field]
        trainer = resumable(tmp_path)
        state = trainer.callbacks[0].find_latest(trainer)
        trainer.callbacks[0].on_training_run_end(trainer)
        assert state.directory == older
        problem = f"it has no '{field}'" if value is ... else f"its '{field}' is "
        assert f"manifest.json' is damaged: {problem}" in capsys.readouterr().out
        print_contents(tmp_path)  # lists the others
        assert f"{older.name}: epoch 1" in capsys.readouterr().out


def test_counts_that_a_newer_version_has_besides_are_ignored(tmp_path, capsys):
    *_, newest = saved(tmp_path)
    with changed_manifest(newest) as manifest:
        manifest["progress"] |= {"tokens": 3_000_000_000, "kind": "text"}
    assert resume(tmp_path).progress.update == 6
    assert f"Resuming from '{newest}'" in capsys.readouterr().out


def test_a_state_without_one_of_the_old_counts_is_damaged(tmp_path, capsys):
    *_, older, newest = saved(tmp_path)
    with changed_manifest(newest) as manifest:
        del manifest["progress"]["samples"]
    assert resume(tmp_path).progress.update == 6
    shown = capsys.readouterr().out
    assert "manifest.json' is damaged: its 'progress' is " in shown
    assert f"Resuming from '{older}'" in shown


@pytest.mark.sampled
@pytest.mark.parametrize("content", [[1], {}, {"history": None}, "text"])
@pytest.mark.parametrize("file", ["trainer.pt", "rank00000.pt"])
def test_a_state_file_with_other_content_is_named_and_skipped(tmp_path, file, content, capsys):
    *_, older, newest = saved(tmp_path)
    torch.save(content, newest / file)
    with changed_manifest(newest, file):
        pass
    assert resume(tmp_path).progress.update == 6
    shown = capsys.readouterr().out
    assert f"{newest.name}/{file}' is damaged: it lacks" in shown
    assert f"Resuming from '{older}'" in shown


def test_if_all_states_are_malformed_each_is_named(tmp_path):
    states = saved(tmp_path)
    for state in states:
        with changed_manifest(state) as manifest:
            del manifest["world_size"]
    with pytest.raises(DamagedStateError, match=r"All training states .* are damaged: .*has no 'world_size'"):
        resume(tmp_path)
