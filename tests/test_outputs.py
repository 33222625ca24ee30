"""Outputs of a model that are shown while it is trained: when, where, and that training does not notice."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import RunLogCallback, SaveTrainingStateCallback, ShowOutputsCallback, TrackerCallback
from tests.launching import CAN_SHARD
from tests.ranks import global_batch, world_size
from tests.tasks import equal, listener, quiet_trainer, regression_data, weights


def model_with_dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1)).double()


def first_output(model: nn.Module) -> str:
    assert not model.training
    assert not torch.is_grad_enabled()
    return f"{model(torch.ones(1, 5).double()).item():.6f}, drawn {torch.rand(()).item():.6f}"


def run(*callbacks: Any, epochs: int = 2, **kwargs: Any) -> Any:
    trainer = quiet_trainer(model_with_dropout(), callbacks=callbacks, seed=3)
    trainer.train(regression_data(24), epochs, per_device_batch_size=global_batch(4), **kwargs)
    return trainer


class Collect:
    """Collects what is shown, by update."""

    def __init__(self) -> None:
        self.found: dict[int, dict[str, str]] = {}
        self.callback = listener(on_outputs=self._note)

    def _note(self, trainer: Any, outputs: dict[str, str], **kwargs: Any) -> None:
        self.found[trainer.progress.update] = dict(outputs)


@pytest.mark.parametrize(
    ("every", "updates"),
    [("1 epochs", [6, 12]), ("5 updates", [5, 10]), ("0.5 epochs", [3, 6, 9, 12]), ("6 updates", [6, 12])],
)
def test_outputs_are_shown_at_intervals_and_training_does_not_notice(every, updates, capsys):
    collect = Collect()
    trainer = run(ShowOutputsCallback(first_output, every), collect.callback)
    assert list(collect.found) == updates
    assert equal(weights(trainer.model), weights(run().model))
    printed = capsys.readouterr().out
    for update, texts in collect.found.items():
        assert f"Update {update}\n  outputs: {texts['outputs']}\n" in printed
    assert len({texts["outputs"] for texts in collect.found.values()}) == len(updates)


def test_a_dict_has_names_and_other_values_are_shown_as_text(capsys):
    shown = ShowOutputsCallback(lambda model: {"one\nline": 1, "two": "a\nb"}, name="unused")
    run(shown, ShowOutputsCallback(lambda model: [1, 2], name="numbers", show=False))
    assert shown.shown[-1] == {"update": 12, "texts": {"one\nline": "1", "two": "a\nb"}}
    printed = capsys.readouterr().out
    assert "  two: a\n  b\n" in printed
    assert "numbers" not in printed


def test_a_resumed_run_shows_the_same(tmp_path):
    collect = Collect()
    whole = run(
        ShowOutputsCallback(first_output, "5 updates"),
        collect.callback,
        SaveTrainingStateCallback(tmp_path, save_every_n_steps=1),
    )
    for state in sorted(tmp_path.glob("update-*"))[:-1]:
        again = Collect()
        shown = ShowOutputsCallback(first_output, "5 updates")
        states = SaveTrainingStateCallback(tmp_path / "others")
        trainer = run(shown, again.callback, states, resume_from=state)
        after = int(state.name[7:])
        assert again.found == {update: texts for update, texts in collect.found.items() if update > after}
        assert [each["texts"] for each in shown.shown] == [collect.found[5], collect.found[10]]
        assert equal(weights(trainer.model), weights(whole.model))


def test_outputs_are_on_the_page_and_in_the_trackers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    show = ShowOutputsCallback(lambda model: {"<b>prompt</b>": "text & more"}, "4 updates")
    run(show, RunLogCallback(tmp_path / "log"), TrackerCallback("tensorboard", "board", tmp_path))
    record = json.loads((tmp_path / "log" / "run.json").read_text())
    assert [shown["update"] for shown in record["outputs"]] == [4, 8, 12]
    html = (tmp_path / "log" / "summary.html").read_text()
    assert html.index("Update 12") < html.index("Update 4")
    assert "&lt;b&gt;prompt&lt;/b&gt;" in html
    assert "text &amp; more" in html
    assert "text & more" in (tmp_path / "log" / "summary.md").read_text()
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    (tag,) = [tag for tag in events.Tags()["tensors"] if "prompt" in tag]
    assert [event.step for event in events.Tensors(tag)] == [4, 8, 12]
    assert events.Tensors(tag)[0].tensor_proto.string_val == [b"text & more"]


def on_ranks() -> Any:
    collect = Collect()
    trainer = run(ShowOutputsCallback(first_output, "5 updates"), collect.callback)
    return world_size(), collect.found, weights(trainer.get_model())


def continue_text(model: Any) -> dict[str, Any]:
    """Tokens that a language model draws after fixed ones."""
    prompts = {"one": [1, 2, 3], "two": [4, 5]}
    drawn = {"max_new_tokens": 4, "do_sample": True, "pad_token_id": 0}
    return {name: model.generate(torch.tensor([ids]), **drawn)[0].tolist() for name, ids in prompts.items()}


def generating(is_sharded: bool) -> Any:
    """What a language model generates whose weights are on every process, or sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(
        GPT2Config(vocab_size=17, n_positions=16, n_embd=8, n_layer=2, n_head=2, eos_token_id=0)
    )
    for module in [*model.transformer.h, model] if is_sharded else ():
        fully_shard(module, mesh=init_device_mesh("cpu", (world_size(),)))
    collect, optimizer = Collect(), torch.optim.AdamW(model.parameters(), lr=0.01)
    callbacks = [ShowOutputsCallback(continue_text, "2 updates"), collect.callback]
    trainer = Trainer(model, None, optimizer, callbacks=callbacks, seed=3)
    tokens = torch.randint(1, 17, (12, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer.train(data, 2, per_device_batch_size=global_batch(4))
    return collect.found


@pytest.mark.processes
def test_several_processes_compute_the_same(two_ranks):
    first, second = two_ranks(on_ranks)
    assert first[0] == second[0] == 2
    assert first[1] == second[1]
    assert list(first[1]) == [5, 10]
    assert equal(first[2], second[2])


@CAN_SHARD
@pytest.mark.slow
@pytest.mark.processes
def test_replicated_and_sharded_language_models_generate_the_same(two_ranks):
    first, second = two_ranks.run(generating, is_sharded=False)
    assert first == second
    assert list(first) == [2, 4, 6]
    assert all(len(ast.literal_eval(text)) in range(3, 8) for texts in first.values() for text in texts.values())
    assert two_ranks.run(generating, is_sharded=True) == [first, first]


def test_bad_input():
    with pytest.raises(TypeError, match="function='text' must be a function of the model"):
        ShowOutputsCallback("text")
    with pytest.raises(ValueError, match="every='5 steps' must be a positive number and one of updates"):
        ShowOutputsCallback(first_output, "5 steps")
    with pytest.raises(ZeroDivisionError):
        run(ShowOutputsCallback(lambda model: 1 / 0))
