"""``print_contents``: what a training state contains, and which states are in a folder."""

from __future__ import annotations

from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint import print_contents
from tests.small_models import make_data, make_trainer


def test_a_state_is_printed_and_states_are_listed(tmp_path, capsys):
    make_trainer([SaveTrainingStateCallback(tmp_path / "states", save_every_n_epochs=1)]).train(make_data(), 2)
    older, newer = sorted((tmp_path / "states").glob("update-*"))
    (older / "manifest.json").write_text("{")
    capsys.readouterr()
    print_contents(newer)
    shown = capsys.readouterr().out
    assert f"training state {newer}, format 2, saved 2" in shown
    assert "\nalso: optimizer\n" in shown
    assert " bytes  model.safetensors\n" in shown
    print_contents(tmp_path)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{newer}: epoch 2, update ")
    assert f"{older / 'manifest.json'}' is damaged" in second
