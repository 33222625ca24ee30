"""The check of the learning rates that a run will use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pytorch_accel_lite.base.inspection import is_overridden
from pytorch_accel_lite.tuning.probing import Finding, NotApplicableError, Probe

#: Parts of the names of schedulers that raise the rate again on purpose.
_CYCLIC = ("cyclic", "restart", "cycle")


def check_schedule(probe: Probe) -> Iterator[Finding]:
    """Compute the learning rate of every update of the run.

    A schedule whose length is in epochs, but which is stepped after every update, ends long before the run; one that is
    too long never gets where it should.
    """
    create = probe.arguments["create_scheduler_fn"]
    config = probe.run.required_config
    groups = probe.trainer.optimizer.param_groups
    if create is None:
        idle = [number for number, group in enumerate(groups) if group.get("lr") == 0]
        if idle:
            yield Finding(f"The learning rate of parameter group {idle} is 0.", "Give the group another one.")
        elif is_overridden(probe.trainer, "create_scheduler"):
            raise NotApplicableError("create_scheduler() is the program's own.")
        else:
            raise NotApplicableError("The run has no schedule.")
        return
    if isinstance(create, Mapping) or config.max_num_train_steps is None or config.scheduler_metric is not None:
        raise NotApplicableError(
            "The rates follow a metric, belong to several optimizers, or the run has no known length."
        )
    try:
        curve = max(probe.curves, key=max)
    except TypeError as error:
        raise NotApplicableError(f"The schedule cannot be computed without the run: {error}") from error
    except ValueError as error:
        yield Finding(
            f"The schedule raised an error: {error}.",
            "Give its length in updates: TrainerPlaceholderValues.NUM_EPOCHS * NUM_UPDATE_STEPS_PER_EPOCH.",
        )
        return
    given = max(float(group.get("initial_lr", group.get("lr", 0.0))) for group in groups)
    if 0 < max(curve) < 0.01 * given:
        yield Finding(
            f"The highest learning rate of the run is {max(curve):.3g}, that of the optimizer {given:.3g}.",
            "LambdaLR multiplies the optimizer's rate: return factors. Or shorten the warm-up.",
            fails=False,
            details={"highest": max(curve), "given": given},
        )
        return
    yield from _look_at_curve(curve, getattr(getattr(create, "func", create), "__name__", "").lower())


def _look_at_curve(curve: list[float], name: str) -> Iterator[Finding]:
    peak, updates = max(curve), len(curve)
    details = {"first": curve[0], "highest": peak, "last": curve[-1], "updates": updates}
    length = "Give its length in updates, with TrainerPlaceholderValues, or pass scheduler_interval='epoch'."
    if min(curve) < 0:
        yield Finding(
            f"The learning rate is negative after update {_first(curve, lambda r: r < 0)}.", length, details=details
        )
        return
    if peak == 0:
        yield Finding(
            "The learning rate is 0 in every update.", "Look at the factors of the schedule.", details=details
        )
        return
    if updates < 10:
        return
    at = curve.index(peak)
    small = _first(curve[at:], lambda rate: rate < 0.01 * peak) + at
    lowest = min(curve[updates // 2 :])
    is_cyclic = any(part in name for part in _CYCLIC) and "onecycle" not in name
    if at == updates - 1 and curve[0] < peak:
        yield Finding(
            f"The learning rate still rises at the end of the run, after {updates} updates, to {peak:.3g}: the warm-up "
            "never ends.",
            length,
            fails=False,
            details=details,
        )
    elif not is_cyclic and curve[-1] > 2 * lowest and curve[-1] > 0.02 * peak:
        yield Finding(
            f"The learning rate falls to {lowest:.3g} and rises again to {curve[-1]:.3g} at the end of the run.",
            length,
            fails=False,
            details=details,
        )
    elif small < 0.5 * updates:
        yield Finding(
            f"The learning rate is below a hundredth of its peak, {peak:.3g}, from update {small} of {updates}.",
            length,
            fails=False,
            details=details,
        )
    elif len(set(curve)) == 1 and not any(part in name for part in ("constant", "lambda")):
        yield Finding(
            f"The learning rate is {peak:.3g} in all {updates} updates: the schedule never changes it.",
            "Shorten its steps or milestones.",
            fails=False,
            details=details,
        )


def _first(curve: list[float], is_it: object) -> int:
    return next((number for number, rate in enumerate(curve) if is_it(rate)), len(curve))  # type: ignore[operator]
