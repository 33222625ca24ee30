"""Unfreezing one more layer group every n epochs, and adding it to the optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from pytorch_accel_lite.extending import RunRequest, TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_positive_int, check_range
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import TrainerOptimizer, is_created
from pytorch_accel_lite.extension_tools.texts_and_pages import wrapped
from pytorch_accel_lite.extensions.finetuning import ModelFreezer, ModuleGroup, find_groups, parameters_by_group


class GradualUnfreezingCallback(TrainerCallback):
    """Train only the last layer group at first, and unfreeze one more, from the head downwards, every n epochs.

    From Howard and Ruder, "Universal Language Model Fine-tuning for Text Classification" (2018, arXiv:1801.06146).
    Layer groups are those of ``ModelFreezer``; groups without parameters do not
    count. Frozen groups are kept in evaluation mode. Eventually all groups are unfrozen, even if they were frozen
    before the run.

    Parameters missing from the optimizer are added to it before the scheduler is created, one parameter group per layer
    group, so every scheduler sees all groups. The optimizer ignores frozen parameters. A scheduler that sets learning
    rates itself, such as ``OneCycleLR``, needs a list of rates if the groups are to differ.

    Args:
        every_n_epochs: number of epochs between unfreezings
        lr_decay: factor between the learning rate of an added group and that of the next group towards the head; groups
            already in the optimizer keep their rates
        freeze_batch_norms: keep the weights and statistics of batch norms in frozen groups fixed; if ``False``, they
            are trained from the beginning
        groups: the layer groups from the input to the head; defaults to those of ``ModelFreezer``
    """

    def __init__(
        self,
        every_n_epochs: int = 1,
        lr_decay: float = 1 / 2.6,
        freeze_batch_norms: bool = True,
        *,
        groups: Sequence[ModuleGroup] | None = None,
    ) -> None:
        self.every_n_epochs = check_positive_int("every_n_epochs", every_n_epochs)
        self.lr_decay = check_range("lr_decay", lr_decay, above=0)
        self.freeze_batch_norms = freeze_batch_norms
        self.groups = groups

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        request.unfreezes = True

    def on_dataloaders_created(self, trainer: TrainerLike, **kwargs: object) -> None:
        if trainer.train_dataloader is None or trainer.run_config is not None:  # an evaluation
            return
        model = trainer.get_model(keep_torch_compile=False)
        ModelFreezer(model, groups=self.groups)  # raises an error for a model that it cannot unfreeze
        groups = parameters_by_group(model, self.groups)
        if is_created(trainer.optimizer):
            self._add_to_optimizer(trainer.optimizer, groups)
            self._unfreeze(model, 1)
        else:  # the optimizer will get all trainable parameters; the epoch freezes them later
            self._unfreeze(model, len(groups))

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        if not trainer.can_rewrap_model:
            raise RuntimeError(
                "GradualUnfreezingCallback cannot change which parameters are trained: the model is sharded "
                f"({trainer.accelerator.distributed_type.value}) or was compiled by Accelerate with its wrapper. "
                "Freeze before the run with ModelFreezer, or compile the model yourself with torch.compile."
            )
        epochs = None if trainer.run_config is None else trainer.run_config.num_epochs
        total = len(parameters_by_group(trainer.get_model(keep_torch_compile=False), self.groups))
        if epochs is not None and self._num_trained(epochs) < total:
            message = (
                f"GradualUnfreezingCallback unfreezes {self._num_trained(epochs)} of {total} layer groups in {epochs} "
                "epochs, and the others stay frozen. To train all of them, pass larger groups=[...], or train longer."
            )
            trainer.print(wrapped(message))

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        # Depends on the epoch alone, so a resumed run needs no state.
        if self._unfreeze(trainer.get_model(keep_torch_compile=False), self._num_trained(trainer.progress.epoch)):
            trainer.rewrap_model()

    def _num_trained(self, epoch: int) -> int:
        """Return the number of groups to train in an epoch; may exceed the number of groups."""
        return 1 + (epoch - 1) // self.every_n_epochs

    def _unfreeze(self, model: nn.Module, count: int) -> bool:
        """Freeze all but the last groups with parameters; return whether the set of trained parameters changed."""
        before = [parameter.requires_grad for parameter in model.parameters()]
        freezer = ModelFreezer(model, self.freeze_batch_norms, groups=self.groups)
        indices = [index for index, group in enumerate(find_groups(model, self.groups)) if group.parameters]
        first = indices[-count] if count < len(indices) else 0
        if first > 0:
            freezer.freeze(0, first - 1, set_modules_as_eval=True)
        freezer.unfreeze(first, -1)
        return before != [parameter.requires_grad for parameter in model.parameters()]

    def _add_to_optimizer(self, optimizer: TrainerOptimizer, groups: list[list[nn.Parameter]]) -> None:
        existing = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
        head = next((existing[parameter] for parameter in groups[-1] if parameter in existing), None)
        if head is None:
            raise ValueError(
                "GradualUnfreezingCallback trains the model's last layer group first, but the optimizer has none of "
                "its parameters. Create the optimizer with that group or with all parameters of the model."
            )
        lr = head.get("initial_lr", head["lr"])  # an earlier run's scheduler may have changed the latter
        for distance, group in enumerate(reversed(groups)):
            missing = [parameter for parameter in group if parameter not in existing]
            if missing:
                optimizer.add_param_group({"params": missing, "lr": lr * self.lr_decay**distance})
