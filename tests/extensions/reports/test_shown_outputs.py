"""ShowOutputsCallback: when and where outputs are shown, without an effect on the training."""

from __future__ import annotations

import ast
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.tracking import GeneralTracker
from matplotlib import pyplot
from PIL import Image
from torch import nn

from pytorch_accel_lite import Trainer, callbacks
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback, ShowOutputsCallback
from tests.launching import CAN_SHARD
from tests.ranks import global_batch, world_size
from tests.small_models import adamw_trainer, equal_weights, float64_data, listener, weights


def model_with_dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1)).double()


def first_output(model: nn.Module) -> str:
    assert not model.training
    assert not torch.is_grad_enabled()
    return f"{model(torch.ones(1, 5).double()).item():.6f}, drawn {torch.rand(()).item():.6f}"


def run(*callbacks: Any, epochs: int = 2, **kwargs: Any) -> Any:
    trainer = adamw_trainer(model_with_dropout(), callbacks=callbacks, seed=3)
    trainer.train(float64_data(24), epochs, per_device_batch_size=global_batch(4), **kwargs)
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
def test_outputs_are_shown_at_intervals_and_change_no_training(every, updates, capsys):
    collect = Collect()
    trainer = run(ShowOutputsCallback(first_output, every), collect.callback)
    assert list(collect.found) == updates
    assert equal_weights(weights(trainer.model), weights(run().model))
    printed = capsys.readouterr().out
    for update, texts in collect.found.items():
        assert f"Update {update}\n  outputs: {texts['outputs']}\n" in printed
    assert len({texts["outputs"] for texts in collect.found.values()}) == len(updates)


def test_dicts_show_their_keys_and_other_values_as_text(capsys):
    shown = ShowOutputsCallback(lambda model: {"one\nline": 1, "two": "a\nb"}, name="unused")
    run(shown, ShowOutputsCallback(lambda model: [1, 2], name="numbers", show=False))
    assert shown.shown[-1] == {"update": 12, "texts": {"one\nline": "1", "two": "a\nb"}}
    printed = capsys.readouterr().out
    assert "  two: a\n  b\n" in printed
    assert "numbers" not in printed


def test_a_resumed_run_shows_the_same_outputs(tmp_path):
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
        assert equal_weights(weights(trainer.model), weights(whole.model))


@pytest.mark.extension("trackers")
def test_outputs_are_in_the_trackers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    show = ShowOutputsCallback(lambda model: {"<b>prompt</b>": "text & more"}, "4 updates")
    run(show, callbacks.TrackerCallback("tensorboard", "board", tmp_path))
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    (tag,) = [tag for tag in events.Tags()["tensors"] if "prompt" in tag]
    assert [event.step for event in events.Tensors(tag)] == [4, 8, 12]
    assert events.Tensors(tag)[0].tensor_proto.string_val == [b"text & more"]


H, W = 6, 9


def pixels(kind: str) -> Any:
    """A picture of 6 by 9 pixels whose left half is red, or grey, and its right half black."""
    numbers = np.zeros((H, W, 3), np.uint8)
    numbers[:, :4, 0] = 255
    match kind:
        case "array of bytes":
            return numbers
        case "array of floats":
            return numbers / 255
        case "channels first":
            return torch.tensor(numbers).permute(2, 0, 1).bfloat16() / 255
        case "grey":
            return torch.tensor(numbers[:, :, 0])
        case "one channel":
            return torch.tensor(numbers[None, :, :, 0]) / 255
        case "image":
            return Image.fromarray(numbers)
    figure = pyplot.figure(figsize=(W / 10, H / 10), dpi=10)
    figure.add_axes((0, 0, 4 / W, 1), facecolor="red").set(xticks=[], yticks=[], frame_on=True)
    return figure


KINDS = ["array of bytes", "array of floats", "channels first", "grey", "one channel", "image", "figure"]


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_of_all_kinds_are_written(kind, tmp_path, capsys, recwarn):
    before = pyplot.get_fignums()
    show = ShowOutputsCallback(lambda model: {"a/b": pixels(kind), "text": "some"}, "6 updates", folder=tmp_path)
    collect = Collect()
    run(show, collect.callback, epochs=1)
    path = tmp_path / "a%2Fb-000006.png"
    written = np.asarray(Image.open(path).convert("RGB"))
    assert written.shape == (H, W, 3)
    red, black = (255, 255, 255) if kind in ("grey", "one channel") else (255, 0, 0), (0, 0, 0)
    if kind == "figure":
        assert pyplot.get_fignums() == before
        assert tuple(written[3, 2]) == red
    else:
        assert tuple(written[0, 0]) == tuple(written[5, 3]) == red
        assert tuple(written[0, 4]) == tuple(written[5, 8]) == black
    texts = {"a/b": str(path), "text": "some"}
    assert show.shown == [{"update": 6, "texts": texts, "pictures": {"a/b": str(path)}}]
    assert collect.found == {6: texts}
    assert f"Update 6\n  a/b: {path}\n  text: some\n" in capsys.readouterr().out
    assert not recwarn


def test_arrays_without_an_image_shape_are_shown_as_text(tmp_path):
    values = {
        "integers": torch.tensor([[1, 2]]),
        "batch": torch.zeros(2, 3, 2, 2),
        "row": torch.zeros(3),
        "features": torch.zeros(2, 4, 5),
        "none": np.zeros((0, 3)),
    }
    show = ShowOutputsCallback(lambda model: values, folder=tmp_path / "pictures")
    run(show, epochs=1)
    assert show.shown[0] == {"update": 6, "texts": {name: str(value) for name, value in values.items()}}
    assert not list(tmp_path.iterdir())


def test_values_beyond_those_of_a_picture_are_cut_off(tmp_path):
    wide = torch.tensor([[-1.0, 0.5], [3.0, float("nan")]])
    show = ShowOutputsCallback(lambda model: wide, "3 updates", folder=tmp_path)
    with pytest.warns(UserWarning, match=r"'outputs' as a picture, whose values .* cut off") as said:
        run(show)
    assert len([each for each in said if "cut off" in str(each.message)]) == 1
    assert np.asarray(Image.open(tmp_path / "outputs-000003.png"))[:, :, 0].tolist() == [[0, 128], [255, 0]]


@pytest.mark.extension("trackers")
def test_pictures_are_in_trackers_that_take_images(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    show = ShowOutputsCallback(lambda model: {"half <1>": pixels("grey"), "text": "some"}, "6 updates")
    texts: dict[str, Any] = {}

    class OnlyTexts(GeneralTracker):
        name, requires_logging_directory, tracker = "own", False, None

        def store_init_configuration(self, values):
            pass

        def log(self, values, step, **kwargs):
            texts.update({name: value for name, value in values.items() if isinstance(value, str)})

    run(show, callbacks.TrackerCallback("tensorboard", "board", tmp_path), callbacks.TrackerCallback(OnlyTexts()))
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [event.step for event in events.Images("half <1>")] == [6, 12]
    shown = Image.open(io.BytesIO(events.Images("half <1>")[0].encoded_image_string))
    assert np.array_equal(np.asarray(shown), np.asarray(Image.open("outputs/half <1>-000006.png")))
    assert not [tag for tag in events.Tags()["tensors"] if "half" in tag]
    assert texts == {"half <1>": "outputs/half <1>-000012.png", "text": "some"}


@pytest.mark.thorough
@pytest.mark.extension("trackers")
@pytest.mark.xdist_group("mlflow")
def test_pictures_are_artifacts_of_mlflow(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    show = ShowOutputsCallback(lambda model: {"half": pixels("image")}, "6 updates")
    run(show, callbacks.TrackerCallback("mlflow", "project"), epochs=1)
    (artifact,) = tmp_path.glob("mlruns/*/*/artifacts/**/*.*")
    assert artifact.read_bytes() == Path("outputs/half-000006.png").read_bytes()
    assert artifact.parts[-2:] == ("outputs", "half-000006.png")


def test_without_the_extra_a_picture_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r"A picture in ShowOutputsCallback needs pillow\. Install it with: pip"):
        run(ShowOutputsCallback(lambda model: torch.zeros(3, 4)))


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
    """The text generated by a language model, replicated or sharded."""
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
    assert equal_weights(first[2], second[2])


@pytest.mark.thorough
@CAN_SHARD
@pytest.mark.slow
@pytest.mark.processes
def test_replicated_and_sharded_language_models_generate_alike(two_ranks):
    first, second = two_ranks.run(generating, is_sharded=False)
    assert first == second
    assert list(first) == [2, 4, 6]
    assert all(len(ast.literal_eval(text)) in range(3, 8) for texts in first.values() for text in texts.values())
    assert two_ranks.run(generating, is_sharded=True) == [first, first]


def test_showing_outputs_refuses_invalid_arguments():
    with pytest.raises(TypeError, match="function='text' must be a function of the model"):
        ShowOutputsCallback("text")
    with pytest.raises(TypeError, match="name=3 must be a string that is not empty"):
        ShowOutputsCallback(first_output, name=3)
    with pytest.raises(ValueError, match="every='5 steps' must be a positive number and one of updates"):
        ShowOutputsCallback(first_output, "5 steps")
    with pytest.raises(ZeroDivisionError):
        run(ShowOutputsCallback(lambda model: 1 / 0))
