"""The examples run and give the promised results."""

from __future__ import annotations

import json
import math
import re
import sys

import pytest
import torch
from torch.distributed import barrier

from tests.launching import CAN_SHARD, ROOT, launch, only_with_soak, run_module, run_script
from tests.ranks import shared_folder

pytestmark = pytest.mark.programs


def test_the_first_example_learns_real_digits(tmp_path):
    output = run_script("examples/digits.py", "--epochs", "8", "--output", str(tmp_path))
    accuracy = re.search(r"Test accuracy: ([\d.]+)% of 360 digits", output)
    assert float(accuracy[1]) >= 98
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    best = torch.load(tmp_path / "best_model.pt", weights_only=True)
    assert best["accuracy"] >= 0.98
    assert "model_state_dict" in best


@pytest.mark.thorough
def test_the_first_example_is_also_described_in_a_file(tmp_path):
    printed = run_commands_of("digits", tmp_path, "--train.num_epochs=8")
    assert float(re.search(r"dataset test, .*accuracy ([\d.]+)", printed)[1]) >= 0.98
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert len(json.loads((tmp_path / "tests" / "best" / "default" / "test" / "worst.json").read_text())) == 20


@pytest.mark.thorough
@pytest.mark.extension("unfreezing")
def test_unfreezing_continues_where_the_head_alone_ends():
    output = run_script("examples/finetuning.py")
    accuracy = dict(re.findall(r"^([\w ]+): ([\d.]+)% of \d+ digits", output, re.MULTILINE))
    assert float(accuracy["Pretraining"]) >= 97
    assert float(accuracy["Gradual unfreezing"]) > float(accuracy["Head alone"]) >= 60


@pytest.mark.thorough
def test_metrics_are_the_same_in_the_callback_and_in_the_loop():
    output = run_script("examples/metrics.py")
    callback, loop = re.search(r"in the callback: ([\d.]+), in the loop: ([\d.]+)", output).groups()
    assert callback == loop
    assert float(callback) >= 0.95
    assert float(re.search(r"with averaged weights: ([\d.]+)", output)[1]) >= 0.95


def test_a_custom_event_reaches_the_callback():
    output = run_script("examples/custom_event.py")
    counts = re.search(r"Hard batches per epoch: \[([\d, ]+)\]", output)[1].split(", ")
    assert len(counts) == 5
    assert any(int(count) > 0 for count in counts)
    assert len(re.search(r"the digits \[([\d, ]+)\]", output)[1].split(", ")) == 8


def run_commands_of(name, folder, *options):
    """Run the commands of an example's page, with options that make them quick; each takes those of its own."""
    pytest.importorskip("jsonargparse")
    page = (ROOT / "docs" / "examples" / f"{name}.md").read_text()
    commands = re.findall(r"^python -m pytorch_accel_lite (.*)$", page, re.MULTILINE)
    assert commands[0] == f"train examples/{name}.yaml"
    for command in commands:
        kind = command.partition(" ")[0]
        own = [option for option in options if not option.startswith("--test.") or kind == "test"]
        done = run_module("pytorch_accel_lite", *command.split(), *own, f"--output_dir={folder}")
        assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.thorough
def test_a_language_model_learns_pythons_sources(tmp_path):
    output = run_script("examples/language_model.py", "--updates", "30")
    bits = re.search(r"([\d.]+) bits per byte on \d+ lines .* after\s+30 updates", output)
    assert float(bits[1]) < 3.8  # 8 without a model, between 4 and 5 with the frequencies of the bytes alone
    run_commands_of("language_model", tmp_path, "--train.max_num_train_steps=30", "--test.worst=3")
    [row] = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert row["eval_loss_epoch"] / math.log(2) == pytest.approx(float(bits[1]), abs=0.01)
    worst = json.loads((tmp_path / "tests" / "best" / "default" / "eval" / "worst.json").read_text())
    assert worst[0]["bits_per_byte"] > worst[2]["bits_per_byte"] > float(bits[1])


@pytest.mark.thorough
def test_a_gan_learns_to_draw_digits(tmp_path):
    output = run_script("examples/gan.py", "--epochs", "6", "--output", str(tmp_path))
    sure, kinds = re.search(r"A classifier is ([\d.]+)% sure of 1,000 drawn digits, of (\d+) kinds", output).groups()
    assert float(sure) > 50
    assert int(kinds) >= 5
    assert len(list(tmp_path.glob("epoch_*.png"))) == 6
    run_commands_of("gan", tmp_path / "file", "--train.num_epochs=1", "--callbacks.every_n_epochs=1")
    of_file = tmp_path / "file" / "pictures" / "epoch_001.png"
    assert of_file.read_bytes() == (tmp_path / "epoch_001.png").read_bytes()


@pytest.mark.thorough
def test_progressive_resizing_trains_one_model_on_growing_images():
    pytest.importorskip("timm")
    output = run_script("examples/progressive_resizing.py")
    found = re.findall(r"^(\d+) pixels: ([\d.]+)% of 90 shapes", output, re.MULTILINE)
    assert [size for size, _ in found] == ["32", "48", "64"]
    assert float(found[-1][1]) >= 90


@pytest.mark.thorough
def test_mixup_trains_on_mixed_images_and_evaluates_on_real_ones():
    pytest.importorskip("timm")
    output = run_script("examples/mixup.py")
    assert float(re.search(r"Test accuracy of the averaged weights: ([\d.]+)% of 360 digits", output)[1]) >= 96


@pytest.mark.thorough
def test_a_search_tries_settings_and_plots_its_results(tmp_path):
    pytest.importorskip("optuna")
    pytest.importorskip("jsonargparse")
    output = run_script("examples/search.py", "--trials", "2", "--output", str(tmp_path))
    assert "\n2 trials, of which 0 were pruned\nBest accuracy: " in output
    assert sorted(path.parent.name for path in tmp_path.glob("*/metrics.jsonl")) == ["0", "1"]
    assert (tmp_path / "search.png").stat().st_size > 10_000


@only_with_soak
def test_a_search_may_choose_among_names(tmp_path):
    pytest.importorskip("optuna")
    pytest.importorskip("jsonargparse")
    space = (ROOT / "examples" / "search.yaml").read_text().replace("digits.yaml", f"{ROOT}/examples/digits.yaml")
    space = space.replace("space:\n", "space:\n  optimizer: {choices: [AdamW, Adam]}\n")
    (tmp_path / "names.yaml").write_text(space)
    output = run_script("examples/search.py", str(tmp_path / "names.yaml"), "--trials=3", "--output", str(tmp_path))
    assert re.search(r"\n  optimizer: Adam", output)


@only_with_soak
def test_a_killed_elastic_run_ends_in_the_same_bits():
    command = [sys.executable, "examples/elastic.py", "--epochs", "1", "--processes", "2", "1"]
    output = launch(command, warm=True).stdout
    assert output.count("2 processes: killed after update") == 1
    assert output.endswith("the same bits\n")


def train_sharded(checkpoint: str) -> str:
    """Run the example on each process of a job; return the text that its model predicts for itself at the end."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import sharded

        with shared_folder() as folder:
            sharded.main(checkpoint, folder, "eager")
            model = sharded.AutoModelForCausalLM.from_pretrained(folder / "model")
            barrier()
            assert len(list((folder / "states" / "update-000000012").glob("shards*"))) == 2
            return sharded.predicted(model)
    finally:
        sys.path.remove(str(ROOT / "examples"))


@only_with_soak
@CAN_SHARD
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_sharded_model_trains_and_leaves_one_file(tmp_path, two_ranks):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=128, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    first, second = two_ranks.run(train_sharded, str(tmp_path))
    assert first == second
    expected = "he quick brown fox jumps over the lazy dog. the"[: len(first)]
    assert sum(map(str.__eq__, first, expected)) > 8  # of 32 letters


def test_every_example_is_listed_in_the_documentation():
    listed = re.findall(r"`(examples/\w+\.py)`", (ROOT / "docs" / "examples.md").read_text())
    assert sorted(listed) == sorted(f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py"))
