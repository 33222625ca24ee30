"""Runs that an error ends: telling their callbacks."""

from __future__ import annotations

import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

from pytorch_accel_lite.base.events import NonFiniteLossError
from pytorch_accel_lite.base.protocols import TrainerLike

if TYPE_CHECKING:
    from pytorch_accel_lite.engine.run import Run


def close_failed(trainer: TrainerLike, run: Run, error: BaseException, ended: bool) -> None:
    """Notify the callbacks that an error ends the run; the caller raises the error itself.

    Does nothing within an outer run, which may catch the error. A rank that fails alone does not fire the ending
    events, as they may communicate with ranks that have not failed.

    :param ended: whether the ending events have already begun; one of their listeners may have failed
    """
    if run.outer is not None:
        return
    run.control.forget()
    together = trainer.ranks.world_size == 1 or isinstance(error, NonFiniteLossError)
    problems = trainer.callback_handler.notify_all("on_exception", trainer, exception=error)
    if together and not ended:
        try:
            run.record_interrupted_epoch(trainer.run_history, run.data.ranks)
            trainer.training_run_end()
        except Exception as failure:
            problems.append(failure)
        problems += trainer.callback_handler.notify_all("on_training_run_end", trainer)
    elif together:
        problems += trainer.callback_handler.notify_rest("on_training_run_end", trainer)
    for problem in problems:
        text = "".join(traceback.format_exception(problem))
        with suppress(OSError):  # a closed output must not hide the error itself
            trainer.print(f"While the run was being ended by {error!r}, another error occurred:\n{text}")
