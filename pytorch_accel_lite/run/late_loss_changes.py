"""The error of callbacks that change the loss after the backward pass, where that has no effect."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper

from pytorch_accel_lite.data.sources import BatchOutput
from pytorch_accel_lite.run.events import events_between, keywords_of

#: Events after the backward pass, where a change of the loss would have no effect. In pytorch-accelerated,
#: ``on_train_step_end`` fires before the backward pass.
AFTER_BACKWARD = tuple(
    event for event in events_between("on_backward_start", "on_train_epoch_end") if "batch_output" in keywords_of(event)
)


class AfterBackward:
    """A listener to an event after the backward pass, when it is too late to change the loss."""

    def __init__(self, listener: Callable[..., object], event: str) -> None:
        update_wrapper(self, listener)  # for inspect.signature(), and for code that looks for the owner
        self.__wrapped__ = listener
        self.__self__ = getattr(listener, "__self__", listener)
        self._event = event

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Call the listener.

        Raises:
            RuntimeError: if it changes the loss
        """
        output: BatchOutput = kwargs.get("batch_output") or {}  # type: ignore[assignment]
        loss = output.get("loss")
        version = getattr(loss, "_version", 0)
        self.__wrapped__(*args, **kwargs)
        if loss is not None and _is_another_loss(loss, version, output.get("loss")):
            raise RuntimeError(
                f"{type(self.__self__).__name__}.{self._event} changes batch_output['loss'], but the gradients have "
                "been computed already. Change it in on_backward_start, which is called with the same arguments before "
                "the backward pass."
            )


def _is_another_loss(loss: object, version: int, after: object) -> bool:
    """Whether a loss was changed in place, or replaced; a replacement without a graph is only for display."""
    if after is loss:
        return bool(getattr(loss, "_version", 0) != version)
    needs_gradients = getattr(after, "requires_grad", None)
    return needs_gradients is not None and (needs_gradients or not getattr(loss, "requires_grad", False))
