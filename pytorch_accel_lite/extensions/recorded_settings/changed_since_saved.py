"""What differs between the settings and data of a resumed run and those of the saved run, and which of both hold."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from itertools import takewhile

from torch.optim.lr_scheduler import LambdaLR, MultiplicativeLR

from pytorch_accel_lite.extending import JsonObject, SettingsRecorder, TrainerLike, TrainingState, UserAttributes
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import schedulers_in
from pytorch_accel_lite.extension_tools.schedules import PlannedLrScheduler
from pytorch_accel_lite.extension_tools.states_and_files import saved_optimizers
from pytorch_accel_lite.extension_tools.texts_and_pages import listed
from pytorch_accel_lite.extensions.data_fingerprints import compare_fingerprints
from pytorch_accel_lite.extensions.recorded_settings.described_values import CODE
from pytorch_accel_lite.extensions.recorded_settings.settings_to_record import (
    DATA,
    datasets_of_run,
    describe_optimizers,
    record_settings,
)

_OF_SIZE = ("train_per_device_batch_size", "gradient_accumulation_steps")
#: Settings that may be absent. Other settings are missing only in states of other versions of torch or this package.
_PARTS = ("callbacks.", "model.", "loss_func.", "eval_dataset")
_MOST_SHOWN = 8  # number of differing settings in a message
_LONGEST = 100  # maximum characters of a value in a message
_ABSENT = ""


class ComparedSettings(SettingsRecorder):
    """Records the settings of runs in training states, and describes which of them a resumed run has changed."""

    def record(self, trainer: TrainerLike, reads_data: bool = True) -> JsonObject:
        """Return the settings of the current run by name, as texts, and the fingerprints of its data."""
        return record_settings(trainer, reads_data)

    def compare(self, trainer: TrainerLike, state: TrainingState, now: JsonObject, attributes: UserAttributes) -> str:
        """Return how the settings in a state differ from those of the run that has loaded it, and which of both hold.

        The text is empty if nothing differs, or if the state has no settings.
        """
        before: JsonObject = json.loads(state.shared.get("settings") or "{}")
        if not before or not now:
            return ""
        changed = _changed(before, now, is_elastic=state.metadata["world_size"] != trainer.ranks.world_size)
        attributes.compared |= {argument for key in changed if (argument := _argument_of_callback(key))}
        held = attributes.names_in(state.shared.get("user_attributes", {}))
        loaded = describe_optimizers(trainer)
        restored: list[str] = []
        new: list[str] = []
        for key in changed:
            was, this = before.get(key, _ABSENT), now.get(key, _ABSENT)
            is_restored = _is_restored(trainer, key) and not _has_another_schedule(trainer, key, was, this)
            if _argument_of_callback(key) not in held and not is_restored:
                new.append(_describe_change(key, was, this))
            elif this != loaded.get(key):
                now[key] = was
                restored.append(_describe_change(key, this, was, "not"))
        new += _changed_data(trainer, before[DATA], now[DATA])
        return _message(_merge_groups(restored), _merge_groups(new), os.fspath(state.directory))

    def optimizer_options(self, trainer: TrainerLike) -> dict[str, str]:
        """Return the options of all parameter groups by name, with the rates before any schedule."""
        return describe_optimizers(trainer)

    def describe_loaded(self, trainer: TrainerLike, before: Mapping[str, str], source: str) -> str:
        """Return which options of the optimizers a file or a state has changed; an empty text if none."""
        now = describe_optimizers(trainer)
        changes = [
            _describe_change(key, before[key], now[key], "not") for key in now if before.get(key, now[key]) != now[key]
        ]
        shown = listed(_merge_groups(changes), _MOST_SHOWN)
        return f"{source!r} has set options of the optimizer: {shown}." if changes else ""


def _changed(before: JsonObject, now: JsonObject, is_elastic: bool) -> list[str]:
    """Return the names of settings that differ; if a part was added or removed, only the name of the whole part."""
    names = [key for key in {**before, **now} if key != DATA and not _is_same(before.get(key), now.get(key))]
    heads = tuple(f"{key}." for key in names)
    return [
        key
        for key in names
        if not (is_elastic and key in _OF_SIZE)  # jobs of another size keep the size of an update if they can
        and ((key in before and key in now) or (key.startswith(_PARTS) and not key.startswith(heads)))
        and "stateful" not in (before.get(key), now.get(key))  # stateful callbacks have a warning of their own
    ]


def _is_same(before: str | None, now: str | None) -> bool:
    if before == now:
        return True
    if before is None or now is None or CODE.sub("", before) != CODE.sub("", now):
        return False
    versions = [match for text in (before, now) for match in CODE.findall(text)]
    return len(set(versions)) > 1  # bytecode of different Python versions cannot be compared


def _argument_of_callback(key: str) -> tuple[str, str] | None:
    """Return the callback and the argument to which a setting belongs."""
    part, _, rest = key.partition(".")
    owner, _, name = rest.partition(".")
    return (owner, name) if part == "callbacks" and name else None


def _is_restored(trainer: TrainerLike, key: str) -> bool:
    """Whether a state restores a setting even if the program has another value."""
    if key == "create_scheduler_fn":
        return not trainer.current_run.schedule.is_recreated and _restores_arguments(trainer)
    return key == "seed" or key.startswith(tuple(f"{name}." for name in saved_optimizers(trainer)))


def _has_another_schedule(trainer: TrainerLike, key: str, was: str, this: str) -> bool:
    """Whether the program passes another class of schedulers than the saved run, whose arguments the state lacks."""
    before, now = was.partition("(")[0], this.partition("(")[0]
    kinds = [type(part).__name__ for part in schedulers_in(trainer.scheduler).values()]
    is_class = before[:1].isupper()  # rather than a function, whose scheduler is not known
    return key == "create_scheduler_fn" and is_class and before != now and now in kinds


def _restores_arguments(trainer: TrainerLike) -> bool:
    """Whether the state of the scheduler has its arguments, as with torch's, rather than only its position."""
    kinds = (PlannedLrScheduler, LambdaLR, MultiplicativeLR)  # the last two without their functions
    return not all(isinstance(part, kinds) for part in schedulers_in(trainer.scheduler).values())


def _shorten_value(this: str, other: str) -> str:
    """Shorten a description for a message. If both are long, it begins where they differ."""
    this, other = CODE.sub("", this), CODE.sub("", other)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(this, other, strict=False)))
    begin = max(same - 30, 0) if max(len(this), len(other)) > _LONGEST else 0
    return f"{'...' if begin else ''}{this[begin : begin + _LONGEST]}{'...' if len(this) > begin + _LONGEST else ''}"


def _describe_change(key: str, other: str, holds: str, word: str = "was") -> str:
    """Return a text on a setting: the value that holds and the other value, or that a part is new or missing."""
    if _ABSENT in (other, holds) and key.startswith(_PARTS):
        return f"{key.removeprefix('callbacks.')} is {'new' if other == _ABSENT else 'missing'}"
    if CODE.sub("", other) == CODE.sub("", holds):
        return f"{key}={_shorten_value(holds, '')} has other code"
    return f"{key}={_shorten_value(holds, other)} ({word} {_shorten_value(other, holds)})"


def _changed_data(trainer: TrainerLike, before: JsonObject, now: JsonObject) -> list[str]:
    datasets = datasets_of_run(trainer)
    names = [name for name in now if name in before] if before else []
    changes = {name: compare_fingerprints(before[name], now[name], datasets[name]) for name in names}
    others = [name for name in {**before, **now} if (name in before) != (name in now)] if before and now else []
    found = [f"{name}: {change}" for name, change in changes.items() if change]
    return found + [f"{name} is {'new' if name in now else 'missing'}" for name in others]


def _merge_groups(texts: list[str]) -> list[str]:
    """Merge texts that differ only in the number of the parameter group. A text that stays alone keeps its number."""
    merged = [re.sub(r"\.param_groups\[\d+\]", "", text) for text in texts]
    counts = Counter(merged)
    return [*dict.fromkeys(short if counts[short] > 1 else text for short, text in zip(merged, texts, strict=True))]


def _message(restored: list[str], new: list[str], source: str) -> str:
    if not restored and not new:
        return ""
    parts = ["The settings of this program are not those of the run that it resumes."]
    if restored:
        parts.append(f"Kept as in the state: {listed(restored, _MOST_SHOWN)}.")
    if new:
        parts.append(f"Changed from here on: {listed(new, _MOST_SHOWN)}.")
    if restored:
        parts.append(
            "To train with this program's values instead, begin a new run from the weights: "
            f"trainer.load_checkpoint({source!r}, load_optimizer=False, load_scheduler=False), then train() without "
            "resume_from. A callback may also set options of the optimizer in on_training_run_start; learning rates "
            "only if there is no schedule."
        )
    return " ".join(parts)
