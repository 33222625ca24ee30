"""Telling ``DistributedDataParallel`` that other parameters are trained than when it was created."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from pytorch_accel_lite.base.protocols import TrainerLike


def rewrap_model(self: TrainerLike) -> None:
    """Tell ``DistributedDataParallel`` that the set of trained parameters has changed. Call it on every process.

    Call it after freezing or unfreezing parameters in the middle of a run, between updates, for example in
    ``on_train_epoch_start``: the wrapper averages the gradients only of parameters that were trained when it was
    created. With one process, it does nothing.

    :raises RuntimeError: if the weights are sharded, or Accelerate has compiled the wrapper
    """
    if not self.can_rewrap_model:
        raise RuntimeError(
            "The set of trained parameters cannot change in the middle of this run: the model is sharded "
            f"({self.accelerator.distributed_type.value}) or was compiled by Accelerate together with its wrapper. "
            "Freeze before the run, or compile the model yourself with torch.compile."
        )
    old = self.model
    prepared = self.prepared_model
    if prepared is None or not isinstance(old, DistributedDataParallel):
        return
    for name in ("reducer", "logger"):  # removes the old wrapper's hooks from the parameters
        delattr(old, name)
    handler = self.accelerator.ddp_handler
    kwargs = {} if handler is None else handler.to_kwargs()
    new = DistributedDataParallel(old.module, device_ids=old.device_ids, output_device=old.output_device, **kwargs)
    if handler is not None:
        handler.register_comm_hook(new)
    vars(new)["_is_accelerate_prepared"] = True
    models = self.accelerator._models
    models[:] = [new if held is old else held for held in models]
    if prepared.model is old:
        prepared.model = new
    self.model = new
