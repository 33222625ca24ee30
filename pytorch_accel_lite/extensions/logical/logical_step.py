"""The training step of logical processes, one after another on each real process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import ClassVar

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply
from torch import nn
from torch.optim import Optimizer

from pytorch_accel_lite.extending import (
    CLOSURE,
    COMPILED,
    FP16,
    MANUAL,
    MICROBATCHES,
    RECOMPUTED,
    SKIPPED_BATCHES,
    Batch,
    BatchOutput,
    Conflict,
    Feature,
    GradientWindow,
    PlainStep,
    Run,
    TrainerLike,
    backward,
)
from pytorch_accel_lite.extension_tools.data_and_batches import share_bounds
from pytorch_accel_lite.extension_tools.modules_and_devices import accumulation_dtype, plain_parts, to_float
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import (
    Count,
    all_optimized_parameters,
    as_weight,
    other_modules,
)
from pytorch_accel_lite.extension_tools.random_numbers import seed_all
from pytorch_accel_lite.extensions.batch_parts import as_returned, concatenate_if_possible, merge_outputs
from pytorch_accel_lite.extensions.logical.gradient_sum import GradientSum
from pytorch_accel_lite.extensions.logical.logical_processes import LogicalProcesses
from pytorch_accel_lite.extensions.logical.sharded_gradients import ShardedGradients, is_fully_sharded


def _has_module(trainer: TrainerLike, matches: Callable[[nn.Module], bool]) -> bool:
    roots = [trainer.model, *other_modules(trainer).values()]
    return any(matches(module) for root in roots for module in root.modules())


_SYNC_BATCH_NORM = Feature(
    "SyncBatchNorm", lambda trainer, run: _has_module(trainer, lambda module: isinstance(module, nn.SyncBatchNorm))
)
_SPARSE = Feature(
    "sparse gradients (nn.Embedding(sparse=True))",
    lambda trainer, run: _has_module(
        trainer, lambda module: isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    ),
)
_SHARDED_OTHERWISE = Feature(
    "weights sharded by other means than fully_shard",
    lambda trainer, run: trainer.is_sharded and (run.data.ranks.replicas > 1 or not is_fully_sharded(trainer.model)),
)
_ONCE = "gradients are added over the logical processes once per update"
LOGICAL = Feature(
    "logical_processes",
    lambda trainer, run: isinstance(trainer.division, LogicalProcesses),
    (
        Conflict(
            MICROBATCHES,
            "where memory runs out, and so the last bits, would depend on the machine. Use more logical processes with "
            "smaller batches, of which one at a time is in memory",
        ),
        Conflict(
            SKIPPED_BATCHES,
            "the shares before the one that fails are part of sums already. Let the dataset return another sample in "
            "place of one that cannot be read",
        ),
        Conflict(
            _SHARDED_OTHERWISE,
            "its gradients are not reduced once per share. Shard the model with fully_shard (FSDP2), or replicate it",
        ),
        Conflict(
            MANUAL,
            "its updates would come before the gradients of other logical processes. Override "
            "calculate_train_batch_loss, which several optimizers can share",
        ),
        Conflict(FP16, "its scaling depends on overflows of a process. Use bf16"),
        Conflict(_SYNC_BATCH_NORM, "it mixes the batches of real processes. Use BatchNorm, or GroupNorm"),
        Conflict(_SPARSE, "they have no fixed size to exchange. Use sparse=False"),
    ),
    excludes=(
        Conflict(CLOSURE, _ONCE),
        Conflict(RECOMPUTED, _ONCE),
        Conflict(COMPILED, "torch does not promise the same bits for compiled code, which logical processes promise"),
    ),
)


class LogicalWindow(GradientWindow):
    """Weights the shares of one update, whose gradients are added up over logical processes rather than averaged.

    Args:
        trainer: the trainer
        steps: number of steps in a full window
        batch_size: number of samples in a batch of one logical process
        count: number of logical processes

    Attributes:
        is_guarded: always true: the processes compute different numbers of forward passes
        sums: the sums of the gradients
        number: the number of the logical process that is being computed
        items: number of items in the step, by the number of the logical process
    """

    def __init__(self, trainer: TrainerLike, steps: int, batch_size: int, count: int) -> None:
        super().__init__(trainer.ranks, trainer.device, steps, batch_size)
        self.is_guarded = True  # the processes run different numbers of forward passes
        self.sums = GradientSum(trainer.ranks, count)
        self.number = 0  # of the logical process that is being computed
        self._count = count
        self.items: dict[int, Count] = {}
        self._found_items: Count = 0

    def restart(self) -> None:
        """Begin the window again, with the logical processes divided among the current processes."""
        self.reset()
        self.is_in_step, self.items = False, {}
        self.sums.restart()

    @property
    def full_size(self) -> int:
        """The number of samples in a full window."""
        return self._batch_size * self.steps * self._count

    def scale(self, loss: torch.Tensor, num_samples: int, total_samples: int, items: Count | None) -> torch.Tensor:
        """Return the loss of a share, weighted by its part of the window; the step counts the samples."""
        weight: Count = num_samples
        if (items is not None) is not self.has_items and num_samples:
            self.note_items(items)
        if items is not None:
            # The weight of a share before the true number is known is arbitrary, but the same on all processes.
            self.items_per_batch = float(self._batch_size)
            weight = as_weight(items) if num_samples else 0
            self.items[self.number] = self.items.get(self.number, 0) + weight
        return loss * (weight / self.full_size)

    def finish(self, optimizer: Optimizer) -> Count:
        """Give the parameters their gradients, corrected if the window's true size differs from the nominal one."""
        self._found_items = 0 if self.items_per_batch is None else self._add_up_items()
        self.finish_sums()
        return super().finish(optimizer)

    def finish_sums(self) -> None:
        """Give the parameters the sums of their gradients. Nothing communicates in an update after this."""
        self.sums.finish()

    def _total_items(self, local: Count) -> Count:
        """Return the number of items in the window."""
        return self._found_items

    def _add_up_items(self) -> torch.Tensor:
        """Return the number of items in the window, added up in the order of the logical processes."""
        world_size = self._ranks.world_size
        ranges = [range(*share_bounds(self._count, rank, world_size)) for rank in range(world_size)]
        zero = torch.zeros((), dtype=accumulation_dtype(self._device), device=self._device)
        items = torch.stack([zero + self.items.get(number, 0) for number in ranges[self._ranks.rank]])
        self.items = {}
        if world_size > 1:
            longest = len(ranges[0])
            padded = torch.cat([items, items.new_zeros(longest - len(items))])
            items = items.new_empty(world_size * longest)
            dist.all_gather_into_tensor(items, padded)
            parts = items.view(world_size, longest)
            items = torch.cat([part[: len(numbers)] for part, numbers in zip(parts, ranges, strict=True)])
        return items.sum()


class LogicalStep(PlainStep):
    """The training steps of all logical processes of this process, one after another."""

    features = (LOGICAL,)
    window_kind: ClassVar[type[LogicalWindow]] = LogicalWindow

    def __init__(self, trainer: TrainerLike, run: Run) -> None:
        super().__init__(trainer, run)
        assert isinstance(trainer.division, LogicalProcesses)  # a run with it has this kind of step
        self._logical = trainer.division
        self._ranks = run.ranks
        batch_size = run.required_config.train_per_device_batch_size
        self._window = self.window_kind(trainer, run.window.steps, batch_size, self._logical.count)
        self._modules = [trainer.model, *other_modules(trainer).values()]
        self._buffered_modules: list[nn.Module] = []
        self._returned: dict[int, BatchOutput] = {}  # what is recorded of the shares, if callbacks may have changed it
        run.window = self._window
        self._sharded = ShardedGradients(trainer.model, run.ranks, self._logical.count)
        self._sharded.take_over(run.cleanup)
        self._find_buffers()

    def begin_replicas(self, trainer: TrainerLike, run: Run) -> None:
        """Start with the same weights and buffers; updates keep them so, as the gradients are the same on all."""
        parameters = self._sharded.without([*trainer.model.parameters(), *all_optimized_parameters(trainer)])
        plain = [part for parameter in dict.fromkeys(parameters) for part in plain_parts(parameter)]
        run.ranks.copy_from_first(list(dict.fromkeys([*plain, *self._buffers()])))

    def forward_backward(self, trainer: TrainerLike, run: Run, batch: Batch) -> BatchOutput | None:
        """Run the forward and backward pass of each logical process, and add up their gradients.

        Returns:
            the merged outputs of the shares of this process
        """
        assert batch.share is not None
        assert batch.total_samples is not None
        window, sums = self._window, self._window.sums
        self._find_buffers()
        before = self._copy_buffers()
        parameters = self._sharded.without([*trainer.model.parameters(), *all_optimized_parameters(trainer)])
        sums.begin_step([p for p in dict.fromkeys(parameters) if p.requires_grad])  # may change between steps
        self._sharded.begin_step()
        first = self._compute_shares(trainer, run, batch, before)
        run.progress.add_samples(batch.total_samples)
        sums.end_step()
        self._sharded.end_step()
        _restore(self._buffers(), first)
        run.ranks.copy_from_first(self._buffers())
        window.has_gradients = True
        window.nominal_size, window.true_size = window.full_size, window.true_size + batch.total_samples
        seed_all(batch.share.seed)
        return self._merge(trainer, run, batch)

    def _compute_shares(
        self, trainer: TrainerLike, run: Run, batch: Batch, before: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Compute the shares of this process one after another, and return the buffers after the first one.

        Args:
            before: the buffers before the step
        """
        self._logical.outputs = {}
        self._returned = {}
        first: list[torch.Tensor] = []
        for share in batch.data:
            if first:
                _restore(self._buffers(), before)
            run.batch = share
            self._logical.begin_share(share)
            output = self._compute(trainer, run, share)
            self._logical.outputs.setdefault(share.share.number, (share, output))  # a filler may have the same number
            first = first or _copies(self._buffers())
        return first

    def _compute(self, trainer: TrainerLike, run: Run, share: Batch) -> BatchOutput:
        """Run the forward and backward pass of a share, and take its gradients; a filler has none."""
        window = self._window
        window.number = self._logical.current
        self._logical.is_computing = True
        self._sharded.begin_share(share.is_filler)
        try:
            output = self.forward(trainer, run, share)
            if share.is_filler:
                loss = window.scale(output["loss"], 0, 0, output.get("num_items_in_batch"))
                if self._sharded.is_needed:
                    trainer.backward_step(loss)
                    window.sums.drop()
            else:
                kept = as_returned(trainer, output)
                if kept is not output:
                    self._returned[window.number] = kept
                backward(trainer, share, output, *share.samples(output), window, trainer.backward_step)
                window.sums.take(window.number)
        finally:
            self._logical.is_computing = False
        return recursively_apply(torch.Tensor.detach, output)  # type: ignore[no-any-return]

    def _merge(self, trainer: TrainerLike, run: Run, batch: Batch) -> BatchOutput:
        """Track the losses of the shares, and return the output of this process's part of the step.

        Batches and outputs are concatenated only if a callback listens to the end of the step.
        """
        for number, (share, output) in self._logical.outputs.items():
            self._logical.current = number
            if not share.is_filler:
                run.loss_trackers.add(self._returned.get(number, output))
        shares, outputs = zip(*self._logical.outputs.values(), strict=True)
        is_seen = trainer.callback_handler.listeners["on_train_step_end"]
        data = shares[0].data
        if is_seen and len(shares) > 1:
            data = concatenate_if_possible([share.data for share in shares])
        if not is_seen:
            names = ("loss", "batch_size", "num_items_in_batch")
            outputs = tuple({name: output[name] for name in names if name in output} for output in outputs)
        output = merge_outputs(outputs)
        run.loss_trackers.note_batch_size(batch, output["batch_size"])  # of what was logged before the first share
        run.batch = batch._replace(data=data)
        run.loss_trackers.note_batch_size(run.batch, output["batch_size"])  # of what callbacks log from now on
        if not batch.is_filler:  # the loss of any share may be the one that is not finite
            loss = output["loss"]
            run.loss_trackers["loss"].loss_value = to_float(loss) if loss.is_cpu else loss
        return output

    def _find_buffers(self) -> None:
        """Find the modules that have buffers, which may change between steps: iterating over all modules is slow."""
        modules = chain.from_iterable(root.modules() for root in self._modules)
        self._buffered_modules = [m for m in dict.fromkeys(modules) if any(True for _ in m.buffers(recurse=False))]

    def _copy_buffers(self) -> list[torch.Tensor]:
        """Return copies of the buffers before a step."""
        return _copies(self._buffers())

    def _buffers(self) -> list[torch.Tensor]:
        buffers = (module.buffers(recurse=False) for module in self._buffered_modules)
        return list(dict.fromkeys(chain.from_iterable(buffers)))


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _restore(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    if tensors:
        with torch.no_grad():
            torch._foreach_copy_(list(tensors), list(values))
