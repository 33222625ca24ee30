"""What the first training batch shows: a loss that is a sum over samples, or a target that the loss does not use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accel_lite.base.environment import warn_outside
from pytorch_accel_lite.base.inspection import is_ours, is_overridden
from pytorch_accel_lite.base.protocols import TrainerLike

if TYPE_CHECKING:
    from pytorch_accel_lite.data import Batch

_NONE, _SUM = 0, 2  # torch's numbers of reductions
# Operations of autograd that leave a term of a loss what it is.
_TERMS = {"AddBackward0", "SubBackward0", "NegBackward0", "ToCopyBackward0", "ViewBackward0", "SqueezeBackward0"}
# Those that leave the loss of each sample what it is; means over other dimensions than the first do, too.
_OF_EACH = _TERMS | {"PowBackward0", "AbsBackward0", "LogBackward0", "ExpBackward0", "RsubBackward1", "SumBackward1"}
_WEIGHING = ("Mul", "Div", "Softmax", "Mean", "torch::autograd::AccumulateGrad")
_BATCH_EVENTS = ("on_backward_start", "on_backward_end", "on_train_step_end", "on_eval_step_end")


def warn_of_sum(trainer: TrainerLike) -> None:
    """Warn before training if the loss function is known to be a sum over samples, and its result is used as it is."""
    if _is_used_as_it_is(trainer) and _has_sum(trainer.loss_func):
        _warn_of_sum("loss_func has reduction='sum'")


def examine_first_batch(trainer: TrainerLike, batch: Batch, output: dict[str, Any]) -> None:
    """Warn if the loss of the first batch is a sum, or seems to be computed with something else than the target."""
    loss, size = output["loss"], output["batch_size"]
    is_default = _is_used_as_it_is(trainer)
    is_known = is_default and _has_sum(trainer.loss_func)
    if isinstance(size, int) and not is_known and adds_up_samples(loss, size):
        _warn_of_sum("The loss adds up the samples of a batch")
    if is_default and type(batch.data) in (tuple, list) and len(batch.data) == 3 and trainer.loss_func is not None:
        callbacks_get_batches = any(
            not is_ours(type(getattr(listener, "__self__", None)))
            for event in _BATCH_EVENTS
            for listener in trainer.callback_handler.listeners[event]
        )
        if not callbacks_get_batches and _third_is_target(batch.data[1], batch.data[2], output.get("model_outputs")):
            warn_outside(
                "loss_func is called with the second of the three elements of a batch, but the third looks like the "
                "target; it is not used. Let the dataset return (inputs, targets), or a dict if the model takes "
                "several inputs, or override calculate_train_batch_loss and calculate_eval_batch_loss."
            )


def adds_up_samples(loss: torch.Tensor, size: int) -> bool:
    """Whether a term of a loss certainly is a sum over the samples of a batch, as seen from how it was computed.

    What is multiplied or divided, before or after it is added up, may be a mean and does not count.
    """
    terms = _reached([loss.grad_fn], lambda node: node.name() in _TERMS)
    return any(_is_sum(node, size, is_whole=node is loss.grad_fn) for node in terms)


def _reached(nodes: Iterable[Any], continues: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield operations of autograd, and those from whose results they were computed as far as that continues."""
    left, seen = list(nodes), set()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            left += [source for source, _ in node.next_functions if continues(node)]


def _is_sum(node: Any, size: int, is_whole: bool) -> bool:
    if getattr(node, "_saved_reduction", None) == _SUM:  # one of torch's own losses; not a penalty on parameters
        outputs = getattr(node, "_saved_self", None)
        has_rows = outputs is not None and outputs.ndim > 0 and len(outputs) % size == 0
        return is_whole or (has_rows and not _is_weighed(node))
    sizes: tuple[int, ...] = getattr(node, "_saved_self_sym_sizes", ())
    is_over_all = size > 1 and len(sizes) > 0 and sizes[0] == size and node.name() in ("SumBackward0", "SumBackward1")
    return is_over_all and not _is_weighed(node)


def _is_weighed(node: Any) -> bool:
    """Whether what is added up may have been weighed, so that the sum is a mean, or is a parameter."""
    sources = _reached((source for source, _ in node.next_functions), _is_of_each)
    return any(source.name().startswith(_WEIGHING) and not _is_of_each(source) for source in sources)


def _is_of_each(node: Any) -> bool:
    """Whether an operation leaves the loss of each sample what it is."""
    if node.name() == "MeanBackward1":
        return not _includes_first(node)
    return node.name() in _OF_EACH or getattr(node, "_saved_reduction", None) == _NONE


def _includes_first(node: Any) -> bool:
    """Whether a mean over some dimensions is one over the first, too; autograd keeps negative ones unsigned."""
    count = len(node._saved_self_sym_sizes)
    return any((dim if dim < 2**63 else dim - 2**64) % count == 0 for dim in node._saved_dim)


def _third_is_target(second: Any, third: Any, outputs: Any) -> bool:
    """Whether the third element of a batch is certainly like a target, rather than an index, a group or a weight.

    It has the shape of the outputs, and either the second has not, or it has negative values, unlike weights and masks.
    """
    if not all(isinstance(each, torch.Tensor) and each.is_floating_point() for each in (second, third, outputs)):
        return False
    if third.shape != outputs.shape:
        return False
    return second.shape != outputs.shape or bool((third < 0).any())


def _is_used_as_it_is(trainer: TrainerLike) -> bool:
    return not (is_overridden(trainer, "calculate_train_batch_loss") or is_overridden(trainer, "train_step"))


def _has_sum(loss_func: Any) -> bool:
    reduction = loss_func.keywords.get("reduction") if isinstance(loss_func, partial) else None
    return bool((reduction or getattr(loss_func, "reduction", None)) == "sum")


def _warn_of_sum(what: str) -> None:
    warn_outside(
        f"{what}, but the trainer takes a loss for a mean: recorded losses depend on the batch size, and with gradient "
        "accumulation or several processes the gradients are not those of the sum. Divide it by the number of samples, "
        "and multiply the learning rate by the batch size; see 'Your loss is a sum' in the documentation, under "
        "'Coming from your own loop'."
    )
