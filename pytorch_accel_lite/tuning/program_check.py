"""A test suite for a training program: tries it in several ways before the run, and reports what looks wrong."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.run_settings import RunRequest
from pytorch_accel_lite.base.text import wrapped
from pytorch_accel_lite.base.validation import check_positive_number
from pytorch_accel_lite.engine.lifecycle import create_eval_loaders
from pytorch_accel_lite.engine.trial import trial
from pytorch_accel_lite.schedulers.named_schedules import ScheduleArgument, resolve_names
from pytorch_accel_lite.tuning import (
    checks_of_data,
    checks_of_losses,
    checks_of_schedules,
    checks_of_sequences,
    checks_of_steps,
    checks_of_training,
)
from pytorch_accel_lite.tuning.probing import Finding, NotApplicableError, Probe, describe_error
from pytorch_accel_lite.tuning.reports import Report

#: A function that tries a program and yields what it finds. Reports have its name, without ``check_``, and its
#: docstring: the first paragraph tells what it does, the second why that matters.
Check = Callable[[Probe], Iterable[Finding] | None]

#: All checks, the cheapest first.
CHECKS: tuple[Check, ...] = (
    checks_of_steps.check_runs,
    checks_of_losses.check_broadcast,
    checks_of_losses.check_initial_loss,
    checks_of_schedules.check_schedule,
    checks_of_steps.check_determinism,
    checks_of_steps.check_batch_independence,
    checks_of_steps.check_permutation,
    checks_of_losses.check_mean_loss,
    checks_of_losses.check_processes,
    checks_of_losses.check_precision,
    checks_of_sequences.check_causality,
    checks_of_sequences.check_padding,
    checks_of_training.check_gradients,
    checks_of_steps.check_inputs_matter,
    checks_of_steps.check_reload,
    checks_of_data.check_augmentation,
    checks_of_data.check_data,
    checks_of_data.check_leakage,
    checks_of_training.check_learns,
)

Status = Literal["passed", "failed", "warned", "not applicable"]


@dataclass(frozen=True)
class CheckResult:
    """The result of a check.

    :param name: name of the check
    :param status: ``"passed"``, ``"failed"``, ``"warned"`` or ``"not applicable"``
    :param message: what was seen, or the reason why the check is not applicable
    :param details: the same for programs: numbers, names of parameters, indices of samples
    :param tried: what the check does
    :param why: why that matters
    :param advice: what to change
    """

    name: str
    status: Status
    message: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    tried: str = ""
    why: str = ""
    advice: str = ""

    def lines(self) -> list[str]:
        """Return what was seen, what to change, why, and what was done, in a line each."""
        told = {"To change": self.advice, "Why it matters": self.why, "What was done": self.tried}
        return [
            f"{self.name} {self.status}: {self.message}",
            *(f"{what}: {text}" for what, text in told.items() if text),
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines())


@dataclass(repr=False)
class CheckReport(Report):
    """The result of :meth:`Trainer.check <pytorch_accel_lite.Trainer.check>`; its repr is a table with advice.

    ``report["gradients"]`` is the result of one check.

    :param results: the result of each check
    """

    results: list[CheckResult]

    def _with(self, status: Status) -> list[CheckResult]:
        return [result for result in self.results if result.status == status]

    @property
    def ok(self) -> bool:
        """Whether no check failed; there may be warnings."""
        return not self.failures

    @property
    def failures(self) -> list[CheckResult]:
        """The checks that found a mistake."""
        return self._with("failed")

    @property
    def warnings(self) -> list[CheckResult]:
        """The checks that found what may be a mistake."""
        return self._with("warned")

    @property
    def passed(self) -> list[CheckResult]:
        """The checks that found nothing."""
        return self._with("passed")

    @property
    def not_applicable(self) -> list[CheckResult]:
        """The checks that cannot tell, with the reason in ``message``."""
        return self._with("not applicable")

    def __getitem__(self, name: str) -> CheckResult:
        found = next((result for result in self.results if result.name == name), None)
        if found is None:
            raise KeyError(f"There is no check {name!r}, only {', '.join(result.name for result in self.results)}.")
        return found

    def summary(self) -> str:
        """Return how many checks passed, failed and so on."""
        counts = {status: len(self._with(status)) for status in ("failed", "warned", "passed", "not applicable")}
        return ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "no checks"

    def rows(self) -> list[tuple[str, str]]:
        """Return the name of each check with its status and, if it is not applicable, the reason."""
        skipped = "not applicable"
        return [(r.name, f"{r.status}: {r.message}" if r.status == skipped else r.status) for r in self.results]

    def notes(self) -> list[str]:
        """Return what was found, why it matters and what to change."""
        return [str(result) for result in (*self.failures, *self.warnings)]

    def __repr__(self) -> str:
        rows = self.rows()
        width = max((len(name) for name, _ in rows), default=0)
        lines = [wrapped(f"  {name:<{width}}  {text}", " " * (width + 4)) for name, text in rows]
        for result in (*self.failures, *self.warnings):
            first, *others = result.lines()
            lines += ["", wrapped(first, "  "), *(wrapped(f"  {line}", "    ") for line in others)]
        return "\n".join([f"Checks: {self.summary()}", *lines])


class ProgramError(RuntimeError):
    """Raised by ``check(strict=True)`` if a check fails.

    :ivar report: the report
    """

    def __init__(self, report: CheckReport) -> None:
        super().__init__(f"{len(report.failures)} checks failed.\n" + "\n".join(map(str, report.failures)))
        self.report = report


def check(
    self: TrainerLike,
    train_dataset: Any,
    eval_dataset: Any = None,
    per_device_batch_size: int = 8,
    num_epochs: int | None = None,
    max_num_train_steps: int | None = None,
    gradient_accumulation_steps: int = 1,
    gradient_clip_value: float | None = None,
    create_scheduler_fn: ScheduleArgument | None = None,
    train_dataloader_kwargs: dict[str, Any] | None = None,
    eval_dataloader_kwargs: dict[str, Any] | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    *,
    gradient_clip_norm: float | None = None,
    scheduler_interval: Literal["update", "epoch"] = "update",
    scheduler_metric: str | None = None,
    warmup_steps: int | float = 0,
    seconds: float = 60.0,
    strict: bool = False,
    only: Sequence[str] | None = None,
    skip: Sequence[str] = (),
    extra: Sequence[Check] = (),
    reset_run_history: bool = True,
    resume_from: Any = None,
    eval_every_n_epochs: int | None = 1,
    auto_microbatch: bool = False,
    sanity_eval_batches: int = 0,
) -> CheckReport:
    """Try the program on a few batches, and report what looks like a mistake, before an expensive run.

    The model, the loss, the step and the data are tried in several ways whose results must agree: a batch twice, in
    parts, in another order, with more padding, and so on. See :doc:`/checking` for the checks. What does not apply, or
    cannot be told, is said. Model, optimizer, generators and history are restored afterwards; callbacks are not
    involved. Takes the arguments of :meth:`train`, of which some, such as ``resume_from``, make no difference.

    :param seconds: when to leave out the remaining checks
    :param strict: whether to raise an error if a check fails
    :param only: names of the checks to make; all by default
    :param skip: names of checks to leave out
    :param extra: your own checks: functions that are passed a :class:`~pytorch_accel_lite.tuning.probing.Probe`, and
        yield each :class:`~pytorch_accel_lite.tuning.probing.Finding`
    :return: the report, to be printed in a script; consoles and notebooks show it
    :raises ProgramError: if ``strict`` and a check fails
    """
    check_positive_number("seconds", seconds)
    chosen = _choose(only, skip, extra)
    if self.ranks.world_size > 1:
        raise RuntimeError("check() tries a program on a single process. Call it without a launcher.")
    request = RunRequest(
        num_epochs=1 if num_epochs is None and max_num_train_steps is None else num_epochs,
        max_num_train_steps=max_num_train_steps,
        gradient_accumulation_steps=gradient_accumulation_steps,
        gradient_clip_value=gradient_clip_value,
        gradient_clip_norm=gradient_clip_norm,
        scheduler_interval=scheduler_interval,
        scheduler_metric=scheduler_metric,
    )
    arguments = {"create_scheduler_fn": resolve_names(create_scheduler_fn, warmup_steps, scheduler_interval)}
    size = per_device_batch_size
    train_copy, eval_copy = map(checks_of_data.independent_copy, (train_dataset, eval_dataset))
    with trial(self, "check", train_copy, size, request, train_dataloader_kwargs, collate_fn) as run:
        if eval_dataset is not None:
            run.data.eval_dataset = eval_copy
            create_eval_loaders(self, run, size, eval_dataloader_kwargs)
        probe = Probe(self, run, arguments, seconds)
        results = CheckReport([_make(one, probe, seconds) for one in chosen])
    if strict and not results.ok:
        raise ProgramError(results)
    return results


def name_of(one: Check) -> str:
    """Return the name of a check in reports."""
    return one.__name__.removeprefix("check_")


def _choose(only: Sequence[str] | None, skip: Sequence[str], extra: Sequence[Check]) -> list[Check]:
    checks = {name_of(one): one for one in (*CHECKS, *extra)}
    for argument, names in (("only", only or ()), ("skip", skip)):
        unknown = [name for name in names if name not in checks]
        if unknown or isinstance(names, str):
            raise ValueError(f"{argument}={names!r}: there are the checks {', '.join(checks)}. Pass a list of these.")
    return [one for name, one in checks.items() if (only is None or name in only) and name not in skip]


def _make(one: Check, probe: Probe, seconds: float) -> CheckResult:
    """Make a check, whatever it raises."""
    name = name_of(one)
    tried, _, why = (" ".join(text.split()) for text in (inspect.getdoc(one) or "").partition("\n\n"))
    if probe.seconds_left <= 0:
        return CheckResult(name, "not applicable", f"left out after {seconds:g} seconds", {}, tried, why)
    try:
        with probe.leaving_no_trace(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            findings = list(one(probe) or ())
    except NotApplicableError as reason:
        return CheckResult(name, "not applicable", str(reason), {}, tried, why)
    except Exception as error:
        message = f"The program raised {describe_error(error)}"
        return CheckResult(name, "not applicable", message, {}, tried, why)
    if not findings:
        return CheckResult(name, "passed", "", {}, tried, why)
    status: Status = "failed" if any(finding.fails for finding in findings) else "warned"
    messages, advice = (
        " ".join(dict.fromkeys(texts)) for texts in zip(*((f.message, f.advice) for f in findings), strict=True)
    )
    details = {key: value for finding in findings for key, value in finding.details.items()}
    return CheckResult(name, status, messages, details, tried, why, advice)
