"""Training states in shards, and sharded models as files for other programs."""

from __future__ import annotations

import functools
import io
import json
import math
import signal
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed import barrier

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint import DamagedStateError, verify_state
from pytorch_accel_lite.checkpoint.disk.shards import find_tensors
from tests.launching import CAN_SHARD, SOAK, die_at_file_operation, in_forks, some_of
from tests.ranks import world_size
from tests.sharded import (
    DATA,
    Parallel,
    create_model,
    fit,
    gathered,
    result_of,
    resume,
    shard,
    sharded_trainer,
    train_and_resume,
)
from tests.small_models import adamw_trainer, equal_weights, largest_difference, listener, same_bits


def saved(how: str, folder: Path, **options: Any) -> dict[str, Any]:
    """The result of a run that saves its states."""
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    callbacks = [SaveTrainingStateCallback(folder / how, 1, 2, **options), ModelEmaCallback(0.8, save_path=None)]
    return result_of(fit(sharded_trainer(how, callbacks), how, update=12))


pytestmark = [pytest.mark.processes, CAN_SHARD, pytest.mark.extension("model_ema")]


@pytest.mark.thorough
@pytest.mark.soak
@pytest.mark.parametrize(
    ("how", "processes", "asynchronous"), some_of([("tp_fsdp", 4, False), ("hsdp", 4, False), ("fsdp", 2, True)])
)
def test_runs_resume_from_shards_to_the_same_bits(tmp_path, job, how, processes, asynchronous):
    options = {"sharded": True, "asynchronous": asynchronous}
    for uninterrupted, *resumed in job(processes).run(train_and_resume, how, tmp_path, **options):
        for again in resumed:
            assert equal_weights(again["weights"], uninterrupted["weights"])
            assert again["history"] == uninterrupted["history"]
    state = tmp_path / how / "update-000000002"
    files = verify_state(state)["files"]
    # Nothing that is sharded is in the other files; copies are written once.
    assert sum("shards" in name for name in files) == processes
    stored = find_tensors(state.glob("shards*"))
    assert {"model.0.weight", "optimizer.state.0.exp_avg"} <= stored.keys()
    assert sum(math.prod(sizes) for _, sizes, _ in stored["model.0.weight"].parts) == 40
    assert any("ModelEmaCallback" in name for name in stored)


def changed_at_the_start(folder: Path) -> dict[str, Any]:
    """The rows of a run that a starting event changes, of runs that resume it, and what the last of these printed."""

    def change(trainer: Trainer, **_: Any) -> None:
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(0.5)

    def train(**kwargs: Any) -> dict[str, Any]:
        saving = SaveTrainingStateCallback(folder, 1, 2, max_checkpoints=None)
        callbacks = [listener(on_training_run_start=change), saving]
        return result_of(fit(sharded_trainer("fsdp", callbacks), "fsdp", **kwargs))

    whole, printed = train(), io.StringIO()
    barrier()
    resumed = []
    for state in sorted(folder.glob("update-*"))[:2]:
        with redirect_stdout(printed):
            resumed.append(train(resume_from=state))
    return {"whole": whole, "resumed": resumed, "printed": printed.getvalue()}


@pytest.mark.thorough
def test_starting_events_change_a_sharded_run_once(tmp_path, job):
    for found in job(2).run(changed_at_the_start, tmp_path):
        for again in found["resumed"]:
            assert equal_weights(again["weights"], found["whole"]["weights"])
            assert again["history"] == found["whole"]["history"]
        assert "The starting events have changed" not in found["printed"]  # unknown, as weights are not gathered for it


@functools.cache
def alone():
    return result_of(fit(sharded_trainer("whole"), "whole", update=12))


@pytest.mark.thorough
@pytest.mark.soak
def test_sharded_and_plain_states_resume_on_any_process_count(tmp_path, job):
    expected = alone()
    job(2).run(saved, "fsdp", tmp_path, sharded="auto")
    saved("whole", tmp_path, sharded="auto")
    of_shards, of_whole = (tmp_path / how / "update-000000002" for how in ("fsdp", "whole"))
    assert not list(of_whole.glob("shards*"))
    resumed = {
        "one, of shards": [resume("whole", of_shards)],
        "two, of shards": job(2).run(resume, "fsdp", of_shards),
        "two, of a whole state": job(2).run(resume, "fsdp", of_whole),
        "three, of shards": job(3).run(resume, "fsdp", of_shards),
    }
    if SOAK:
        resumed["four, of shards"] = job(4).run(resume, "hsdp", of_shards)
        resumed["four in two dimensions, of shards"] = job(4).run(resume, "tp_fsdp", of_shards)
    first = {"shards": resumed["one, of shards"][0], "state": resume("whole", of_whole)}
    for name, by_rank in resumed.items():
        for found in by_rank:
            assert same_bits(found["restored"], first[name.split()[-1]]["restored"]), name
            assert largest_difference(found["weights"], expected["weights"]) < 1e-6, name


def resume_latest(folder: Path) -> None:
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    saving = SaveTrainingStateCallback(folder, sharded=True)
    callbacks = [saving, ModelEmaCallback(0.8, save_path=None)]
    fit(sharded_trainer("fsdp", callbacks), "fsdp", update=12, resume_from="latest")


@pytest.mark.extension("printed_states")
def test_shards_are_inspected_and_damage_is_named(tmp_path, job, capsys):
    from pytorch_accel_lite.checkpoint import print_contents

    job(2).run(saved, "fsdp", tmp_path, sharded=True)
    states = sorted((tmp_path / "fsdp").glob("update-*"))
    print_contents(states[-1])
    assert "in shards: " in capsys.readouterr().out
    for name in verify_state(states[-1])["files"]:
        file = states[-1] / name
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(DamagedStateError, match=rf"{name}.*does not match its checksum"):
            verify_state(states[-1])
        file.write_bytes(content)
    (states[-1] / "shards00001.safetensors").unlink()
    found = job(2).run(resume_latest, tmp_path / "fsdp")
    assert "Skipping a damaged training state." in found.output
    assert "shards00001.safetensors' is missing" in found.output
    assert f"Resuming from {str(states[-2])!r}" in found.output


def resumed_by_itself(folder: Path | str, epochs: int = 2) -> dict[str, Any]:
    """The result of a run on one process that saves states in shards, and resumes the last if there is one."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).double()
    saving = SaveTrainingStateCallback(folder, 1, 3, max_checkpoints=1, sharded=True, asynchronous=True)
    trainer = Parallel(model, nn.MSELoss(), partial(torch.optim.AdamW, lr=0.02), [saving], seed=3)
    trainer.train(DATA, epochs, per_device_batch_size=7, resume_from="latest")
    return result_of(trainer)


@pytest.mark.soak
@pytest.mark.timeout(7200 if SOAK else 1800)
def test_sigkill_at_each_file_operation_leads_to_the_same_bits(tmp_path):
    """Kills one process at every seventy-first operation; ``make soak`` at each."""

    def run(folder, number=0):
        def fork(rank):
            if number:
                die_at_file_operation(number)
            result = resumed_by_itself(folder / "states")
            torch.save(result, folder / "result.pt")

        folder.mkdir(exist_ok=True)
        (status,) = in_forks(fork, tmp_path / "output")
        assert status in (0, -signal.SIGKILL), (tmp_path / "output").read_text()
        return status

    assert run(tmp_path / "whole") == 0
    whole = torch.load(tmp_path / "whole" / "result.pt")
    for number in range(5, 400, 1 if SOAK else 71):
        folder = tmp_path / f"killed{number}"
        killed = run(folder, number) != 0
        assert not killed or run(folder) == 0
        found = torch.load(folder / "result.pt")
        assert equal_weights(found["weights"], whole["weights"])
        assert found["history"] == whole["history"]
        assert [path.name for path in folder.glob("states/update-*")] == ["update-000000008"]
        if not killed:  # the run had fewer operations
            break
    assert number > 40


def test_shards_in_a_remote_store_resume_to_the_same_bits(tmp_path):
    pytest.importorskip("pytorch_accel_lite.extensions.remote")

    def fork(rank):
        whole = resumed_by_itself("memory://bucket/whole")
        resumed_by_itself("memory://bucket/run", epochs=1)
        resumed = resumed_by_itself("memory://bucket/run")
        assert equal_weights(resumed["weights"], whole["weights"])
        assert resumed["history"] == whole["history"]

    (status,) = in_forks(fork, tmp_path / "output")
    printed = (tmp_path / "output").read_text()
    assert status == 0, printed
    assert "Resuming from 'memory://bucket/run/update-000000004'" in printed


@pytest.mark.thorough
def test_torch_reads_the_shards(tmp_path, job):
    storage = pytest.importorskip(
        "torch.distributed.checkpoint.hf_storage", reason="HuggingFaceStorageReader needs torch 2.8"
    )
    from torch.distributed import checkpoint

    job(2).run(saved, "fsdp", tmp_path, sharded=True)
    state = tmp_path / "fsdp" / "update-000000002"
    (state / "model.safetensors").unlink()  # holds nothing, as all is sharded
    stored = {name: tensor.read() for name, tensor in find_tensors(sorted(state.glob("shards*"))).items()}
    target = {name: torch.zeros_like(tensor) for name, tensor in stored.items()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):  # a single process
        checkpoint.load(target, storage_reader=storage.HuggingFaceStorageReader(str(state)))
    assert all(torch.equal(target[name], tensor) for name, tensor in stored.items())


@pytest.mark.thorough
def test_a_missing_file_of_shards_is_an_error(tmp_path, job):
    job(2).run(saved, "fsdp", tmp_path, sharded=True)
    _, *later = sorted((tmp_path / "fsdp" / "update-000000002").glob("shards*"))
    [*_, tensor] = find_tensors(later).values()
    with pytest.raises(ValueError, match=r"The files lack \d+ of \d+ elements of .* Is one missing\?"):
        tensor.read()


def test_sharded_states_without_shards_are_an_error(tmp_path):
    saving = SaveTrainingStateCallback(tmp_path, sharded=True)
    trainer = adamw_trainer(nn.Linear(5, 1).double(), callbacks=[saving])
    with pytest.raises(ValueError, match=r"sharded=True: the weights of Linear are not sharded. Shard the model"):
        trainer.train(DATA, 1)
    assert trainer.progress.update == 0
    with pytest.raises(ValueError, match=r"sharded='yes' must be True, False or 'auto'"):
        SaveTrainingStateCallback(tmp_path, sharded="yes")


def loaded(how: str, folder: Path) -> dict[str, Any]:
    """The weights that a sharded model loads from a directory, and those of its saved file."""
    model = create_model()
    nn.init.zeros_(model[0].weight)
    trainer = Trainer(shard(model, how), nn.MSELoss(), None, [], accelerator=Accelerator(cpu=True))
    trainer.load_checkpoint(folder)
    trainer.save_model(folder / "again" / f"{how}.safetensors")
    return gathered(trainer.model.state_dict())


@pytest.mark.sampled
@pytest.mark.parametrize(("how", "processes"), [("fsdp", 2), ("tp_fsdp", 4)])
def test_a_sharded_model_loads_a_directory_and_saves_one_file(tmp_path, job, how, processes):
    whole = dict(create_model().state_dict())
    names = {name: f"model-{number}.safetensors" for number, name in enumerate(whole)}
    for name, file in names.items():
        safetensors.torch.save_file({name: whole[name]}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for found in job(processes).run(loaded, how, tmp_path):
        assert equal_weights(found, whole)
    assert equal_weights(safetensors.torch.load_file(tmp_path / "again" / f"{how}.safetensors"), whole)
    trainer = adamw_trainer(create_model())
    (tmp_path / "model-0.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-0.safetensors is missing in .*, whose index names"):
        trainer.load_checkpoint(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint at .*: it has no weights as safetensors"):
        trainer.load_checkpoint(tmp_path / "empty")


def saved_by_transformers(folder: Path) -> dict[str, Any]:
    import transformers

    config = transformers.DistributedConfig(fsdp_size=world_size())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    trainer = Trainer(model, None, None, [], accelerator=Accelerator(cpu=True))
    trainer.get_model().save_pretrained(folder / "again")
    trainer.load_checkpoint(folder / "again")
    return gathered(trainer.model.state_dict())


@pytest.mark.sampled
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_saves_a_sharded_model(tmp_path, two_ranks, tied):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DistributedConfig"):
        pytest.skip("this version of transformers has no DistributedConfig")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, tie_word_embeddings=tied, **sizes)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    for found in two_ranks.run(saved_by_transformers, tmp_path):
        assert equal_weights(found, dict(model.state_dict()))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert equal_weights(again.state_dict(), model.state_dict())
