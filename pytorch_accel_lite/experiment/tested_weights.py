"""Loading the weights of an experiment: its best, its last, averages of several, or those in a file or a state."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from pytorch_accel_lite.base.validation import check_positive_int
from pytorch_accel_lite.callbacks import PredictionWriterCallback, SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accel_lite.callbacks.best_model import find_kept_models
from pytorch_accel_lite.checkpoint.beside_model import load_attribute_states, load_loss_state, loss_state
from pytorch_accel_lite.checkpoint.files import read_checkpoint, replacing, write_checkpoint, write_tensors
from pytorch_accel_lite.checkpoint.store import DirectoryStore
from pytorch_accel_lite.checkpoint.training_state import open_state, read_directory, verify_state
from pytorch_accel_lite.checkpoint.weights import fit_model_state
from pytorch_accel_lite.optimizers import attributes

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer

# What is averaged, by its place in a checkpoint.
_MODEL, _LOSS, _ATTRIBUTES = "model_state_dict", "loss_func_state_dict", "attribute_state_dicts"
_AVERAGE = re.compile(r"average_(best|last)_(\d+)")


def find_weights(trainer: Trainer, name: str | os.PathLike[str], folder: Path | None = None) -> Path:
    """Return the path of weights. Call it on every process.

    :param name: ``"best"`` for those of the ``SaveBestModelCallback``, ``"last"`` for those in the newest training
        state of the ``SaveTrainingStateCallback``, ``"average_best_3"`` or ``"average_last_3"`` for the mean of the
        best or last three, or the path of a checkpoint, a training state, or safetensors
    :param folder: where averages are written
    :raises FileNotFoundError: if there are none, or not as many
    """
    average = _AVERAGE.fullmatch(os.fspath(name))
    if average and folder is not None:
        found = _several(trainer, average[1], check_positive_int(os.fspath(name), int(average[2])))
        modules = set(attributes.modules(trainer))
        return trainer.ranks.broadcast_object(lambda: _write_average(found, folder / name, modules))
    if name in ("best", "last"):
        return _several(trainer, os.fspath(name), 1)[0]
    if not Path(name).exists():
        raise FileNotFoundError(f"There are no weights at {os.fspath(name)!r}. Pass best, last, or another path.")
    return Path(name)


def _several(trainer: Trainer, kind: str, count: int) -> list[Path]:
    """Return the paths of the best or the last weights, the best or the last first, all of the same callback.

    Of several callbacks, these are the first that has saved as many best models, and that with the newest state.
    """
    of_each: list[list[Path]] = []
    for callback in trainer.callbacks:
        if isinstance(callback, SaveBestModelCallback) and kind == "best":
            of_each.append(_best(callback, count))
        if isinstance(callback, SaveTrainingStateCallback) and kind == "last":
            if isinstance(callback.save_dir, str):
                raise ValueError(f"Fetch the last state from {callback.save_dir!r} first, and pass its directory.")
            of_each.append(_last(trainer, callback.save_dir, count) if callback.save_dir.is_dir() else [])
    if enough := [found[:count] for found in of_each if len(found) >= count]:
        return enough[0] if kind == "best" else max(enough, key=lambda paths: _saved_at(paths[0]))
    found = max(of_each, key=len, default=[])
    saver = "SaveBestModelCallback" if kind == "best" else "SaveTrainingStateCallback"
    keeping = f" with {'keep' if kind == 'best' else 'max_checkpoints'}={count} or more" if count > 1 else ""
    there_are = f"{len(found)} of the {count} {kind} weights" if count > 1 else f"no {kind} weights yet"
    raise FileNotFoundError(
        f"There are {there_are}: they are saved by a {saver}{keeping} while the experiment trains. Train it first, or "
        "pass the path of a checkpoint or a training state."
    )


def _saved_at(state: Path) -> float:
    return DirectoryStore(state.parent).saved_at(state.name)


def _best(callback: SaveBestModelCallback, count: int) -> list[Path]:
    path, metric = Path(callback.save_path), callback.watch_metric
    if not path.exists() or callback.keep == 1 or count == 1:
        return [path] if path.exists() else []
    best = float(read_checkpoint(path)[metric])
    kept = find_kept_models(path).values()
    return sorted(kept, key=lambda other: (abs(float(read_checkpoint(other)[metric]) - best), other.name))


def _last(trainer: Trainer, folder: Path, count: int) -> list[Path]:
    state = DirectoryStore(folder).read_latest(trainer.ranks, trainer.print)
    if state is None:
        return []
    newest = Path(state.directory)
    others = sorted((path for path in folder.glob("update-*") if path.is_dir() and path < newest), reverse=True)
    return [newest, *others][:count]


def _write_average(paths: Sequence[Path], target: Path, modules: Collection[str]) -> Path:
    """Write the mean of all that was learned; what are no floating-point numbers is that of the first.

    :param target: where to write it, without a suffix
    :param modules: names of the trainer's attributes that are modules
    :return: the path of the safetensors, or of a checkpoint if the model is not all that was learned
    """
    first, *others = (_read_learned(path, modules) for path in paths)
    sums = {key: tensor.double() for key, tensor in first.items() if tensor.is_floating_point()}
    for other in others:
        for key, total in sums.items():
            total += other[key]
    mean = first | {key: (total / len(paths)).to(first[key].dtype) for key, total in sums.items()}
    is_model_alone = all(part == _MODEL for part, *_ in mean)
    target = target.with_name(f"{target.name}{'.safetensors' if is_model_alone else '.pt'}")
    before = _read_learned(target, modules) if target.exists() else {}
    if before.keys() == mean.keys() and all(torch.equal(before[key], mean[key]) for key in mean):
        return target  # so that its results are still those of this file
    if is_model_alone:
        with replacing(target) as temporary:
            write_tensors({name: tensor for (_, name), tensor in mean.items()}, temporary)
    else:
        write_checkpoint(_nested(mean), target)
    return target


def _read_learned(path: Path, modules: Collection[str]) -> dict[tuple[str, ...], torch.Tensor]:
    """Return the tensors of the model, of the loss function and of attributes, by their places in a checkpoint."""
    if path.is_dir():
        state = open_state(path, verify_state(path))
        parts = {_MODEL: state.read_weights()}
        state.read_tensors()
        parts |= {_LOSS: state.shared.get("loss_func", {}), _ATTRIBUTES: state.shared.get("attributes", {})}
    else:
        parts = read_checkpoint(path)
    owners: dict[tuple[str, ...], Any] = {(part,): parts.get(part, {}) for part in (_MODEL, _LOSS)}
    owners |= {(_ATTRIBUTES, name): held for name, held in parts.get(_ATTRIBUTES, {}).items() if name in modules}
    return {
        (*owner, name): tensor
        for owner, held in owners.items()
        for name, tensor in held.items()
        if isinstance(tensor, torch.Tensor)
    }


def _nested(flat: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for (*owners, name), value in flat.items():
        inner = result
        for owner in owners:
            inner = inner.setdefault(owner, {})
        inner[name] = value
    return result


def load_weights(trainer: Trainer, path: Path) -> None:
    """Load the weights of the model, of the loss function and of attributes, from any file that holds some.

    Warns if it holds only those of the model, though something else was learned too.

    :raises ValueError: if they are those of another model; lists what differs
    """
    model = trainer.get_model(keep_torch_compile=False)
    if path.is_dir():
        state = read_directory(path, trainer.ranks)
        model.load_state_dict(fit_model_state(model, state.read_weights(), path))
        state.read_tensors()
        load_loss_state(trainer, state.shared.get("loss_func", {}), path)
        load_attribute_states(trainer, state.shared.get("attributes", {}), path)
    elif path.suffix == ".safetensors":
        model.load_state_dict(fit_model_state(model, load_file(path), path))
        _warn_of_others(trainer, path)
    else:
        trainer.load_checkpoint(path, load_optimizer=False, load_scheduler=False)


def _warn_of_others(trainer: Trainer, path: Path) -> None:
    """Warn if something beside the model is trained, which a file of weights does not hold."""
    others = [f"loss_func ({', '.join(learned)})"] if (learned := loss_state(trainer)) else []
    others += [name for name, owner in attributes.trained(trainer).items() if isinstance(owner, torch.nn.Module)]
    if others:
        warnings.warn(
            f"{os.fspath(path)!r} holds only the weights of the model. What is trained beside it stays as it is: "
            f"{', '.join(others)}. Pass a checkpoint or a training state, which hold that too.",
            stacklevel=3,
        )


def source_of(weights: Path, **settings: Any) -> dict[str, Any]:
    """Return what identifies the weights from which results come: their path, and when they were written."""
    changed = max(file.stat().st_mtime_ns for file in [weights, *weights.glob("*")])
    source = {"weights": os.fspath(weights), "changed": changed, **settings}
    return json.loads(json.dumps(source, default=repr))  # type: ignore[no-any-return]


def predictions_of(
    trainer: Trainer,
    weights: Path,
    directory: Path,
    /,  # settings may have these names, too
    shard_size: int = 1024,
    skip_failed: bool = False,
    **settings: Any,
) -> PredictionWriterCallback:
    """Return a callback that writes predictions to a directory, and resumes them if they are of the same weights."""
    source = json.dumps(source_of(weights, **settings))
    about = directory / "weights.json"

    def replace() -> None:
        if about.is_file() and about.read_text() == source:
            return
        directory.mkdir(parents=True, exist_ok=True)
        for old in (*directory.glob("shard-*.pt"), directory / "predictions.json"):
            old.unlink(missing_ok=True)
        about.write_text(source)  # last, so that nothing is resumed as of these weights if it is interrupted before

    trainer.ranks.run_together(replace, only_first=True)
    return PredictionWriterCallback(directory, shard_size, skip_failed=skip_failed)
