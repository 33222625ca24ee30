"""Training states in a remote store: as exact and safe as on disk, even if the store fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint import DamagedStateError
from tests.faulty_store import FaultyStore
from tests.launching import CAN_SHARD, PATIENCE, SOAK, Fork, run_code
from tests.ranks import rank
from tests.scripts.resumable import run
from tests.small_models import assert_same, changed_manifest, equal_weights, listener, make_trainer, train


def resume(folder: Path) -> Any:
    """A whole run, and one that ends after an epoch and is resume: each machine has its own copy of the state."""
    FaultyStore.reset()
    url = f"faulty://{folder}/states"
    folder.mkdir(exist_ok=True)
    kwargs = {"schedule": False, "save_every_n_steps": 2}
    whole = run(folder / "whole", **kwargs)
    run(folder, epochs=1, save_dir=url, asynchronous=True, **kwargs)
    return whole, run(folder, save_dir=url, max_checkpoints=2, **kwargs)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES = {"flipped": _flip, "truncated": _truncate, "deleted": Path.unlink}


pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a faulty store that has had no fault yet."""
    FaultyStore.reset()
    return tmp_path


def url_of(folder: Path) -> str:
    return f"faulty://{folder}/states"


def names(folder: Path) -> list[str]:
    """The names of the complete states in a store, oldest first."""
    return sorted(path.parent.name for path in folder.glob("states/update-*/manifest.json"))


def saving(folder: Path, epochs: int = 1, callbacks: tuple[TrainerCallback, ...] = (), **saver: Any) -> Any:
    """Train 3 updates an epoch, with a state after each, and return the trainer."""
    saver = {"save_dir": url_of(folder), "save_every_n_steps": 1} | saver
    trainer = make_trainer(callbacks=[SaveTrainingStateCallback(**saver), *callbacks], seed=0)
    return train(trainer, epochs, resume_from="latest")


def test_a_run_resumes_to_the_same_bits(folder):
    kwargs = {"schedule": False, "save_every_n_steps": 2}
    whole = run(folder / "whole", **kwargs)
    run(folder, epochs=1, save_dir=url_of(folder), **kwargs)
    assert names(folder) == ["update-000000002", "update-000000004"]
    assert_same(run(folder, save_dir=url_of(folder), max_checkpoints=1, **kwargs), whole)
    assert len(names(folder)) == 1
    assert {path.name for path in folder.glob("states/*")} == {*names(folder), ".owner.json"}


@pytest.mark.thorough
@pytest.mark.processes
def test_ranks_upload_their_own_files_and_resume_the_same_bits(folder, two_ranks):
    for whole, resumed in two_ranks.run(resume, folder):
        assert resumed["processes"] == 2
        assert_same(resumed, whole)
    manifest = json.loads((folder / "states" / names(folder)[-1] / "manifest.json").read_text())
    assert {"rank00000.pt", "rank00001.pt"} < set(manifest["files"])


def sharded_and_damaged(folder: Path, thoroughly: bool) -> tuple[Any, dict[str, Any]]:
    """A run that saves its states in shards, and runs that find its last one damaged, by address of what is damaged.

    Args:
        thoroughly: each file in each way, rather than each in one
    """
    kwargs = {"schedule": False, "sharded": True, "asynchronous": True, "epochs": 1}
    FaultyStore.reset()
    folder.mkdir(exist_ok=True)
    whole = run(folder, save_dir=f"faulty://{folder}/states", **kwargs)
    files = sorted(path for path in (folder / "states" / "update-000000004").rglob("*") if path.is_file())
    without_manifest = {"deleted": "manifest.json"}  # that is no state, but what a killed run has left
    resume = {}
    for place, file in enumerate(files):
        for how in DAMAGES if thoroughly else [[*DAMAGES][(place + 1) % 3]]:
            if without_manifest.get(how) == file.name:
                continue
            there = folder / f"{how}-{file.name}"
            if rank() == 0:
                shutil.copytree(folder / "states", there / "states")
                DAMAGES[how](there / file.relative_to(folder))
            dist.barrier()
            address = f"faulty://{there}/states/update-000000004/{file.name}"
            resume[address] = run(there, save_dir=f"faulty://{there}/states", **kwargs)
    return whole, resume


@pytest.mark.thorough
@pytest.mark.soak
@pytest.mark.processes
@CAN_SHARD
@pytest.mark.timeout(7200 if SOAK else 600)
def test_each_damaged_file_of_a_sharded_state_is_named(folder, two_ranks):
    """Each in one of three ways; ``make soak`` damages each in all of them."""
    found = two_ranks.run(sharded_and_damaged, folder / "run", thoroughly=SOAK, timeout=max(PATIENCE, 500))
    for whole, resumed in found:
        assert len(resumed) == (20 if SOAK else 7)
        for address, again in resumed.items():
            assert f"Skipping a damaged training state. {address!r} is " in found.output
            older = f"{address.rpartition('/')[0][:-1]}3"
            assert f"Resuming from {older!r}" in found.output
            assert_same(again, whole)


@pytest.mark.extension("printed_states")
def test_states_at_urls_can_be_loaded_and_inspected(folder, capsys):
    from pytorch_accel_lite.checkpoint import print_contents

    before = saving(folder).get_model().state_dict()
    trainer = make_trainer(callbacks=[SaveTrainingStateCallback()])
    trainer.load_training_state(f"{url_of(folder)}/update-000000003")
    assert equal_weights(trainer.get_model().state_dict(), before)
    capsys.readouterr()
    print_contents(f"{url_of(folder)}/update-000000002")
    assert f"training state {url_of(folder)}/update-000000002, format 2" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match=r"no training state at 'faulty://.*/update-000000009'"):
        trainer.load_training_state(f"{url_of(folder)}/update-000000009")


@pytest.mark.parametrize("name", ["../elsewhere.txt", "/elsewhere.txt", "inner/elsewhere.txt"])
def test_a_state_from_a_store_writes_nothing_outside_its_folder(folder, name):
    """Otherwise, whoever can write to the store could overwrite files of those who resume from it."""
    saving(folder)
    with changed_manifest(folder / "states" / "update-000000003") as manifest:
        manifest["files"][name] = manifest["files"]["trainer.pt"]
    trainer = make_trainer(callbacks=[SaveTrainingStateCallback()])
    with pytest.raises(DamagedStateError, match=rf"lists '{name}', which is not the name of a file"):
        trainer.load_training_state(f"{url_of(folder)}/update-000000003")


@pytest.mark.soak
@pytest.mark.slow
def test_sigkill_at_each_operation_leads_to_the_same_bits(folder):
    """Kills at every fifth operation; ``make soak`` at each."""
    kwargs: dict[str, Any] = {"max_checkpoints": 1, "save_every_n_steps": 3, "epochs": 2}
    whole = run(folder / "whole", **kwargs)
    for number in range(1, 100, 1 if SOAK else 5):
        there = folder / f"killed{number}"
        there.mkdir()

        def killed(there=there, number=number):
            FaultyStore.reset(kills_at=number)
            run(there, save_dir=url_of(there), **kwargs)

        status = Fork(killed, folder / "output").wait()
        assert status in (0, -signal.SIGKILL), (folder / "output").read_text()
        assert_same(run(there, save_dir=url_of(there), **kwargs), whole)
        assert len(names(there)) == 1
        assert len(list(there.glob("states/update-*/files-*"))) == 1  # nothing is left of interrupted saves
        if status == 0:  # the run had fewer operations
            break
    assert number > 20


@pytest.mark.sampled
@pytest.mark.parametrize("damage", ["manifest.json", "model.safetensors", "trainer.pt", "rank00000.pt", "missing"])
def test_a_damaged_object_is_named_and_an_older_state_is_used(folder, damage, capsys):
    saving(folder)
    newest = folder / "states" / "update-000000003"
    target = next(newest.rglob("model.safetensors" if damage == "missing" else damage))
    if damage == "missing":
        target.unlink()
    else:
        content = bytearray(target.read_bytes())
        content[len(content) // 2] ^= 1
        target.write_bytes(content)
    capsys.readouterr()
    saving(folder, epochs=2)
    printed = capsys.readouterr().out
    assert "Skipping a damaged training state. 'faulty://" in printed
    assert target.name in printed
    assert "/update-000000002': epoch 1, update 2" in printed


def test_folders_left_by_killed_processes_are_removed(folder, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    old, new = (folder / f"pytorch_accel_lite-state-{name}" for name in ("of a killed process", "of another one"))
    for path in (old, new):
        path.mkdir()
        (path / "model.safetensors").touch()
    os.utime(old, (0, 0))
    saving(folder)
    assert sorted(folder.glob("pytorch_accel_lite-state-*")) == [new]


def test_states_that_are_all_damaged_are_an_error(folder):
    saving(folder, max_checkpoints=1)
    (folder / "states" / "update-000000003" / "manifest.json").write_text("{")
    with pytest.raises(DamagedStateError, match=r"All training states in 'faulty://.*Remove them"):
        saving(folder, epochs=2)


def test_a_store_that_fails_ends_the_run_and_keeps_the_states(folder):
    saving(folder)
    FaultyStore.reset(fails_at=4)
    with pytest.raises(OSError, match=r"cannot be reached: ConnectionResetError: the store is gone.*credentials"):
        saving(folder, epochs=2)
    assert names(folder)[-1] == "update-000000003"
    FaultyStore.reset()
    assert saving(folder, epochs=2).progress.update == 6


@pytest.mark.parametrize("fault", [{"fails_at": 4}, {"loses_bytes": True}])
def test_a_run_can_continue_when_the_store_fails(folder, fault, capsys):
    FaultyStore.reset(**fault)
    saving(folder, continue_on_error=True)
    printed = capsys.readouterr().out
    assert "could not be saved; the run continues" in printed
    if "loses_bytes" in fault:
        assert names(folder) == []
        assert "10 of" in printed
    else:
        assert names(folder) == ["update-000000002", "update-000000003"]


class Claims(TrainerCallback):
    """Another run that starts to save at the same address after the first update."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_step_end(self, trainer, **kwargs):
        if trainer.progress.update == 2:
            (self.folder / "states" / ".owner.json").write_text('{"token": "a", "host": "node7", "process": 12}')


def test_a_run_ends_when_another_takes_over_its_url(folder):
    with pytest.raises(RuntimeError, match=r"Another run \(process 12 on node7\).*save_dir of its own"):
        saving(folder, callbacks=(Claims(folder),))
    assert names(folder) == ["update-000000001"]
    assert (folder / "states" / ".owner.json").exists()  # of the other run


def test_an_older_run_ends_even_if_the_other_has_finished(folder):
    def start_another(trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update == 2:
            saving(folder, max_checkpoints=None)

    with pytest.raises(RuntimeError, match="has started to save its training states"):
        saving(folder, callbacks=(listener(on_train_step_end=start_another),))
    assert names(folder) == [f"update-00000000{n}" for n in (1, 2, 3)]


def test_a_run_goes_on_if_another_fails_before_it_saves(folder):
    def start_another(trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update == 2:
            fails = listener(on_training_run_start=lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                saving(folder, callbacks=(fails,))

    assert saving(folder, callbacks=(listener(on_train_step_end=start_another),)).progress.update == 3


def test_invalid_addresses_are_errors(tmp_path):
    def start(url: str) -> None:
        train(make_trainer(callbacks=[SaveTrainingStateCallback(url)]))

    with pytest.raises(ValueError, match="Protocol not known: nowhere"):
        start("nowhere://bucket/run")
    with pytest.raises(FileNotFoundError, match=r"faulty://.*/missing/states.* cannot be written: "):
        start(f"faulty://{tmp_path}/missing/states")


def test_without_s3fs_the_error_names_what_to_install():
    code = (
        "from tests.launching import forget; from pytorch_accel_lite.callbacks import SaveTrainingStateCallback\n"
        "from tests.small_models import make_trainer, train\n"
        "forget('fsspec')\n"
        "forget('s3fs', installed=False)\n"
        "try: train(make_trainer(callbacks=[SaveTrainingStateCallback('s3://bucket/run')]))\n"
        "except ImportError as error: print(error)"
    )
    assert "Install s3fs to access S3" in run_code(code)


def test_a_file_url_is_a_directory(tmp_path):
    callback = SaveTrainingStateCallback(f"file://{tmp_path}/states")
    train(make_trainer(callbacks=[callback]))
    assert callback.save_dir == tmp_path / "states"
    assert len(list(callback.save_dir.glob("update-*"))) == 1


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The address of a server that speaks S3, in a process of its own."""
    # Not in the extra "test": pip tries hundreds of versions to make boto3 and s3fs agree.
    pytest.importorskip("moto.server", reason="no server that speaks S3: pip install 'moto[s3]' flask flask-cors")
    pytest.importorskip("s3fs", reason="needs s3fs")
    script = (
        "from moto.server import ThreadedMotoServer as Server; server = Server(port=0, verbose=False); server.start();"
        "print(server.get_host_and_port()[1], flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", script], text=True, **pipes) as server:
        assert server.stdout is not None
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{int(server.stdout.readline())}")
        monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        yield
        server.terminate()


@pytest.mark.slow
def test_a_run_resumes_from_s3_to_the_same_bits(tmp_path, s3, monkeypatch):
    import s3fs

    kwargs = {"schedule": False, "save_every_n_steps": 2, "max_checkpoints": 1}
    with pytest.raises(FileNotFoundError, match=r"There is no s3://bucket/run/.*bucket does not exist"):
        run(tmp_path, save_dir="s3://bucket/run", **kwargs)
    s3fs.S3FileSystem().mkdir("bucket")
    run(tmp_path, epochs=1, save_dir="s3://bucket/run", asynchronous=True, **kwargs)
    assert_same(run(tmp_path, save_dir="s3://bucket/run", **kwargs), run(tmp_path / "whole", **kwargs))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(OSError, match=r"s3://bucket/run/.* cannot be reached: NoCredentialsError.*Check the address"):
        run(tmp_path, save_dir="s3://bucket/run", **kwargs)
