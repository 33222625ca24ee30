"""``schedule_values``: the rates of a schedule without training."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from pytorch_accel_lite.schedulers import schedule_values


def test_a_preview_shows_groups_and_timm_schedules():
    from timm.scheduler import StepLRScheduler

    assert schedule_values(partial(StepLRScheduler, decay_t=1, decay_rate=0.5), 6, [1.0, 0.1], num_epochs=3) == [
        [1, 1, 0.5, 0.5, 0.25, 0.25], [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    ]  # fmt: skip


@pytest.mark.parametrize("rate", [np.float32(0.5), np.int64(1), torch.tensor(0.5), np.array([0.5, 1.0])], ids=repr)
def test_previews_accept_rates_of_numpy_and_torch(rate):
    values = schedule_values(partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5), 2, rate)
    assert [group[0] for group in values] == np.atleast_1d(np.asarray(rate)).tolist()


def test_previews_name_a_rate_that_is_none():
    with pytest.raises(TypeError, match=r"^lr='high' must be a number, or a list"):
        schedule_values(partial(torch.optim.lr_scheduler.StepLR, step_size=1), 2, "high")
    with pytest.raises(TypeError, match="create_scheduler_fn=None must be a function, not NoneType"):
        schedule_values(None, 2)
