"""The training step of logical processes, one after another on each real process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply
from torch import nn

from pytorch_accel_lite import attributes
from pytorch_accel_lite.batches import BatchOutput
from pytorch_accel_lite.data import Batch, FailedRead
from pytorch_accel_lite.data.plan import split
from pytorch_accel_lite.devices import accumulation_dtype, to_float
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.events import NonFiniteLossError, StopTrainingError
from pytorch_accel_lite.gradients import Count, GradientWindow, as_weight
from pytorch_accel_lite.logical.gradients import GradientSum
from pytorch_accel_lite.logical.losses import SharedLossTrackers
from pytorch_accel_lite.loops.guarded import BatchFailure, merge_outputs
from pytorch_accel_lite.loops.training import backward, forward
from pytorch_accel_lite.pieces import concatenate_if_possible
from pytorch_accel_lite.randomness import seed_all

if TYPE_CHECKING:
    from pytorch_accel_lite.run import Run
    from pytorch_accel_lite.trainer import Trainer


class LogicalWindow(GradientWindow):
    """Weights the shares of one update, whose gradients are added up over logical processes rather than averaged.

    :param count: number of logical processes
    """

    def __init__(self, trainer: Trainer, steps: int, batch_size: int, count: int) -> None:
        super().__init__(trainer.ranks, trainer.device, steps, batch_size)
        self.is_guarded = True  # the processes forward different numbers of times
        self.nominal = batch_size * steps * count
        self.sums = GradientSum(trainer.ranks, count)
        self.number = 0  # of the logical process that is being computed
        self._count = count
        self.items: dict[int, Count] = {}

    def scale(self, loss: torch.Tensor, num_samples: int, total_samples: int, items: Count | None) -> torch.Tensor:
        """Return the loss of a share, weighted by its part of the window; the step counts the samples."""
        weight: Count = num_samples
        if items is not None:
            # What a share is weighted by before the true number is known is arbitrary, but the same everywhere.
            self.items_per_batch = float(self._batch_size)
            weight = as_weight(items) if num_samples else 0
            self.items[self.number] = self.items.get(self.number, 0) + weight
        return loss * (weight / self.nominal)

    def finish(self, optimizer: Any) -> Count:
        """Give the parameters their gradients, corrected if the window's true size differs from the nominal one."""
        self.sums.finish()
        return super().finish(optimizer)

    def _total_items(self, local: Count) -> Count:
        """Return the number of items in the window, added up in the order of the logical processes."""
        world_size = self._ranks.world_size
        ranges = [range(*split(self._count, rank, world_size)) for rank in range(world_size)]
        zero = torch.zeros((), dtype=accumulation_dtype(self._device), device=self._device)
        found = torch.stack([zero + self.items.get(number, 0) for number in ranges[self._ranks.rank]])
        self.items = {}
        if world_size > 1:
            longest = len(ranges[0])
            mine = torch.cat([found, found.new_zeros(longest - len(found))])
            found = found.new_empty(world_size * longest)
            dist.all_gather_into_tensor(found, mine)
            parts = found.view(world_size, longest)
            found = torch.cat([part[: len(own)] for part, own in zip(parts, ranges, strict=True)])
        return found.sum()


class _Attempt:
    """A step that may fail, and be skipped if the run skips such steps: what else would have changed."""

    def __init__(self, run: Run, window: LogicalWindow) -> None:
        self._run = run
        self._window = window
        self._failures: list[BatchFailure] = []
        self._error: Exception | None = None
        if run.request.skips_failed_batches:
            self._logged = _trackers(run).capture_logged()
            self._items = dict(window.items)

    def note(self, run: Run, number: int, error: Exception) -> None:
        """Note the failure of a share, or raise its error if the run skips none."""
        if not run.request.skips_failed_batches:
            raise error
        self._error = error
        self._failures.append(BatchFailure(number, run.batch_indices, f"{type(error).__name__}: {error}"))

    def has_failed(self, trainer: Trainer) -> bool:
        """Whether any share of the step has failed on any process."""
        if not self._run.request.skips_failed_batches:
            return False
        self._failures = list(chain.from_iterable(trainer.ranks.all_gather_object(self._failures)))
        return bool(self._failures)

    def skip(self, trainer: Trainer, batch: Batch) -> None:
        """Undo what the step has logged and counted, and report the failures of all processes."""
        _trackers(self._run).restore_logged(self._logged)
        self._window.items = self._items
        self._run.batch = batch
        step = self._run.progress.step
        trainer.call_event("on_train_batch_skipped", failures=self._failures, error=self._error, step=step)


class LogicalStep:
    """Makes the training steps of a run: those of all logical processes of this process, one after another."""

    def __init__(self, trainer: Trainer, run: Run) -> None:
        assert trainer.logical is not None
        self._logical = trainer.logical
        batch_size = run.required_config.train_per_device_batch_size
        self._window = LogicalWindow(trainer, run.window.steps, batch_size, self._logical.count)
        self._modules = [trainer.model, *attributes.modules(trainer).values()]
        run.window = self._window
        run.averaged_here = []
        run.synced_buffers = []
        run.special_step = self.forward_and_backward
        shared = [*trainer.model.parameters(), *attributes.all_optimized_parameters(trainer), *self._buffers()]
        trainer.ranks.copy_from_first(list(dict.fromkeys(shared)))

    def forward_and_backward(self, trainer: Trainer, run: Run, batch: Batch) -> BatchOutput | None:
        """Run the forward and backward pass of each logical process, and add up their gradients.

        :return: the outputs of the shares of this process, put together, or ``None`` if the step is skipped
        """
        assert batch.share is not None
        assert batch.total_samples is not None
        attempt = _Attempt(run, self._window)
        before = _copies(self._buffers())
        self._window.sums.begin_step(self._trained(trainer))
        first = self._compute_shares(trainer, run, batch, before, attempt)
        run.progress.add_samples(batch.total_samples)
        if attempt.has_failed(trainer):
            self._window.sums.forget_step()
            _restore(self._buffers(), before)
            seed_all(batch.share.place)
            attempt.skip(trainer, batch)
            return None
        self._window.sums.end_step()
        _restore(self._buffers(), first)
        _broadcast(self._buffers(), trainer.ranks)
        nominal, true = self._window.sizes or (self._window.nominal, 0)
        self._window.sizes = nominal, true + batch.total_samples
        seed_all(batch.share.place)
        return self._put_together(run, batch)

    def _compute_shares(
        self, trainer: Trainer, run: Run, batch: Batch, before: list[torch.Tensor], attempt: _Attempt
    ) -> list[torch.Tensor]:
        """Compute the shares of this process one after another, and return the buffers after the first."""
        self._logical.outputs = {}
        first: list[torch.Tensor] = []
        for share in batch.data:
            if first:
                _restore(self._buffers(), before)
            run.batch = share
            self._logical.begin_share(share)
            try:
                output = self._compute(trainer, run, share)
            except (StopTrainingError, NonFiniteLossError):
                raise
            except Exception as error:
                attempt.note(run, self._logical.current, error)
            else:
                self._logical.outputs[self._logical.current] = share, output
            first = first or _copies(self._buffers())
        return first

    def _compute(self, trainer: Trainer, run: Run, share: Batch) -> BatchOutput:
        """Run the forward and backward pass of a share, and take its gradients; a filler has none."""
        if isinstance(share.data, FailedRead):
            raise share.data.error
        window = self._window
        window.number = self._logical.current
        self._logical.is_computing = True
        try:
            output = forward(trainer, share)
            if share.num_samples:
                backward(trainer, run, share, output, *share.samples(output))
                window.sums.take(window.number)
            else:
                window.scale(output["loss"], 0, 0, output.get("num_items_in_batch"))
        finally:
            self._logical.is_computing = False
        detached: BatchOutput = recursively_apply(torch.Tensor.detach, output)
        return detached

    def _put_together(self, run: Run, batch: Batch) -> BatchOutput:
        """Track the losses of the shares, and return the output of this process's part of the step."""
        for number, (share, output) in self._logical.outputs.items():
            self._logical.current = number
            if share.num_samples:
                run.loss_trackers.add(output)
        shares, outputs = zip(*self._logical.outputs.values(), strict=True)
        data = shares[0].data if len(shares) == 1 else concatenate_if_possible([share.data for share in shares])
        run.batch = batch._replace(data=data)
        whole = merge_outputs(outputs)
        if batch.num_samples:  # the loss of any share may be the one that is not finite
            loss = whole["loss"]
            run.loss_trackers["loss"].loss_value = to_float(loss) if loss.is_cpu else loss
        return whole

    def _trained(self, trainer: Trainer) -> list[nn.Parameter]:
        """Return the parameters that get gradients, which may change between steps."""
        parameters = [*trainer.model.parameters(), *attributes.all_optimized_parameters(trainer)]
        return [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]

    def _buffers(self) -> list[torch.Tensor]:
        return list(dict.fromkeys(chain.from_iterable(module.buffers() for module in self._modules)))


def _trackers(run: Run) -> SharedLossTrackers:
    assert isinstance(run.loss_trackers, SharedLossTrackers)
    return run.loss_trackers


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _restore(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    if tensors:
        with torch.no_grad():
            torch._foreach_copy_(list(tensors), list(values))


def _broadcast(tensors: Sequence[torch.Tensor], ranks: Ranks) -> None:
    """Copy the first process's buffers to all others, in one message for each dtype."""
    if ranks.world_size == 1:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    for group in by_dtype.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        dist.broadcast(flat, src=0)
        parts = flat.split([tensor.numel() for tensor in group])  # type: ignore[no-untyped-call]
        _restore(group, [part.view(tensor.shape) for part, tensor in zip(parts, group, strict=True)])
