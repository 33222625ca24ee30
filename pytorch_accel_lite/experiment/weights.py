"""Loading the weights of an experiment: its best, its last, or those in a file or a training state."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file

from pytorch_accel_lite.callbacks import PredictionWriterCallback, SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint.beside_model import load_attribute_states, load_loss_state
from pytorch_accel_lite.checkpoint.store import StateStore
from pytorch_accel_lite.checkpoint.training_state import read_state, read_weights
from pytorch_accel_lite.checkpoint.weights import fit_model_state

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer


def find_weights(trainer: Trainer, name: str | os.PathLike[str]) -> Path:
    """Return the path of weights.

    :param name: ``"best"`` for those of the ``SaveBestModelCallback``, ``"last"`` for those in the newest training
        state of the ``SaveTrainingStateCallback``, or the path of a checkpoint, a training state, or safetensors
    :raises FileNotFoundError: if there are none
    """
    if name not in ("best", "last"):
        if not Path(name).exists():
            raise FileNotFoundError(f"There are no weights at {os.fspath(name)!r}. Pass best, last, or another path.")
        return Path(name)
    kind = SaveBestModelCallback if name == "best" else SaveTrainingStateCallback
    for callback in trainer.callbacks:
        if isinstance(callback, SaveBestModelCallback) and name == "best" and Path(callback.save_path).exists():
            return Path(callback.save_path)
        if isinstance(callback, SaveTrainingStateCallback) and name == "last" and callback.save_dir.is_dir():
            found = StateStore(callback.save_dir).find_latest(trainer.print)
            if found is not None:
                return found
    raise FileNotFoundError(
        f"There are no {name} weights yet: they are saved by a {kind.__name__} while the experiment trains. Train it "
        "first, or pass the path of a checkpoint or a training state."
    )


def load_weights(trainer: Trainer, path: Path) -> None:
    """Load the weights of the model, of the loss function and of attributes, from any file that holds some.

    :raises ValueError: if they are those of another model; lists what differs
    """
    model = trainer.get_model(keep_torch_compile=False)
    if path.is_dir():
        state = read_state(path, trainer.ranks)
        model.load_state_dict(fit_model_state(model, read_weights(state), path))
        load_loss_state(trainer, state.shared.get("loss_func", {}), path)
        load_attribute_states(trainer, state.shared.get("attributes", {}), path, is_final=False)
    elif path.suffix == ".safetensors":
        model.load_state_dict(fit_model_state(model, load_file(path), path))
    else:
        trainer.load_checkpoint(path, load_optimizer=False, load_scheduler=False)


def predictions_of(trainer: Trainer, weights: Path, directory: Path) -> PredictionWriterCallback:
    """Return a callback that writes predictions to a directory, and resumes them if they are of the same weights."""
    changed = max(file.stat().st_mtime_ns for file in [weights, *weights.glob("*")])
    source = json.dumps({"weights": os.fspath(weights), "changed": changed})
    about = directory / "weights.json"

    def replace() -> bool:
        is_other = not about.is_file() or about.read_text() != source
        directory.mkdir(parents=True, exist_ok=True)
        about.write_text(source)
        return is_other

    return PredictionWriterCallback(directory, overwrite=trainer.ranks.broadcast_object(replace))
