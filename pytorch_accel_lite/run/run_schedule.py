"""The state of a run's learning rate schedule."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytorch_accel_lite.optimizers.param_group_options import Options


@dataclass(slots=True, eq=False, repr=False)
class RunSchedule:
    """The state of a run's learning rate schedule.

    Attributes:
        initial_options: options of the optimizer before any schedule, if the run has a schedule
        shift: by how many updates the schedule is ahead of ``progress.update``, after a resumption with more or fewer
            updates per epoch
        is_recreated: whether the schedule of a resumed run is recreated rather than restored
    """

    initial_options: Options = field(default_factory=list)
    shift: int = 0
    is_recreated: bool = False
