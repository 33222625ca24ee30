"""``trainer.check()``: runs the checks of a training program, and reports what looks wrong."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from pytorch_accel_lite.data import NamedData
from pytorch_accel_lite.extending import Division, RunRequest, Snapshot, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_range, describe_error
from pytorch_accel_lite.extension_tools.data_and_batches import DEFAULT_BATCH_SIZE
from pytorch_accel_lite.extension_tools.runs_and_steps import replaced
from pytorch_accel_lite.extension_tools.texts_and_pages import Report, render
from pytorch_accel_lite.extensions.checking import (
    batch_checks,
    data_checks,
    gradient_checks,
    learning_checks,
    loss_checks,
    sequence_checks,
    state_checks,
    step_checks,
    unused_data_checks,
)
from pytorch_accel_lite.extensions.checking.probe import Finding, NotApplicableError, Probe, Status
from pytorch_accel_lite.extensions.trials import Trial
from pytorch_accel_lite.schedulers import resolve_names

#: A function that tries a program and yields findings. Reports show its name, without ``check_``, and its docstring:
#: the first paragraph says what the check does, the second why that matters, the third what to change.
Check = Callable[[Probe], Iterable[Finding]]

#: All checks, the cheapest first.
CHECKS: tuple[Check, ...] = (
    step_checks.check_runs,
    loss_checks.check_broadcast,
    loss_checks.check_initial_loss,
    learning_checks.check_schedule,
    step_checks.check_determinism,
    batch_checks.check_batch_independence,
    batch_checks.check_permutation,
    loss_checks.check_mean_loss,
    loss_checks.check_processes,
    step_checks.check_precision,
    sequence_checks.check_causality,
    sequence_checks.check_padding,
    gradient_checks.check_gradients,
    unused_data_checks.check_inputs_matter,
    unused_data_checks.check_targets_matter,
    state_checks.check_reload,
    data_checks.check_augmentation,
    data_checks.check_data,
    data_checks.check_leakage,
    learning_checks.check_learns,
)


# Colours that can be read on light and on dark pages, and marks for people who cannot tell colours apart.
_COLOURS = {"failed": "#d1453b", "warned": "#b7791f", "passed": "#2f9e57"}
_MARKS = {"failed": "\u2717", "warned": "!", "passed": "\u2713"}


@dataclass(frozen=True)
class CheckResult:
    """The result of a check.

    Args:
        name: name of the check
        status: ``"passed"``, ``"failed"``, ``"warned"`` or ``"not applicable"``
        message: what was seen, or the reason why the check is not applicable
        details: the contents of the message for programs: numbers, names of parameters, indices of samples
        advice: what to change
        tried: what the check does
        why: why that matters
    """

    name: str
    status: Status
    message: str = ""
    details: Mapping[str, object] = field(default_factory=dict)
    advice: str = ""
    tried: str = ""
    why: str = ""

    def __str__(self) -> str:
        reported = {"To change": self.advice, "Why it matters": self.why, "What was done": self.tried}
        lines = [f"    {what}: {text}" for what, text in reported.items() if text]
        return "\n".join([f"{self.name} {self.status}: {self.message}", *lines])


@dataclass(repr=False)
class CheckReport(Report):
    """The result of ``Trainer.check()``; its repr is a table with advice.

    ``report["gradients"]`` is the result of one check.

    Args:
        results: the result of each check
    """

    results: list[CheckResult]
    is_text = True

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
        """The checks that found a possible mistake."""
        return self._with("warned")

    @property
    def passed(self) -> list[CheckResult]:
        """The checks that found nothing."""
        return self._with("passed")

    @property
    def not_applicable(self) -> list[CheckResult]:
        """The checks that do not apply to the program, with the reason in ``message``."""
        return self._with("not applicable")

    def __getitem__(self, name: str) -> CheckResult:
        results = {result.name: result for result in self.results}
        if name not in results:
            raise KeyError(f"There is no check {name!r}, only {', '.join(results)}.")
        return results[name]

    def summary(self) -> str:
        """Return how many checks failed, passed and so on."""
        counts = {status: len(self._with(status)) for status in get_args(Status)}
        return "Checks: " + ", ".join(f"{count} {status}" for status, count in counts.items() if count)

    def rows(self) -> list[tuple[str, str]]:
        """Return the name of each check with its status and, unless it is among the notes, the message."""
        reported = (*self.failures, *self.warnings)
        return [
            (r.name, r.status if r in reported or not r.message else f"{r.status}: {r.message}") for r in self.results
        ]

    def _repr_html_(self) -> str:
        """Return a table of the checks with colours, the mistakes first; checks that do not apply are folded."""
        shown = [*self.failures, *self.warnings, *self.passed]
        return render(
            Path(__file__).parent / "templates" / "check.html",
            summary=self.summary(),
            results=shown,
            left_out=self.not_applicable,
            colours=_COLOURS,
            marks=_MARKS,
        )

    def notes(self) -> list[str]:
        """Return what was found, why it matters and what to change."""
        return [str(result) for result in (*self.failures, *self.warnings)]


class ProgramError(RuntimeError):
    """Raised by ``check(strict=True)`` if a check fails.

    Attributes:
        report: the report
    """

    def __init__(self, report: CheckReport) -> None:
        super().__init__(f"{len(report.failures)} checks failed.\n" + "\n".join(map(str, report.failures)))
        self.report = report


def check(
    self: TrainerLike,
    train_dataset: NamedData,
    eval_dataset: NamedData | None = None,
    per_device_batch_size: int = DEFAULT_BATCH_SIZE,
    *,
    seconds: float = 60.0,
    strict: bool = False,
    only: Sequence[str] | None = None,
    skip: Sequence[str] = (),
    extra: Sequence[Check] = (),
    **arguments: Any,
) -> CheckReport:
    """Try the program on a few batches, and report what looks like a mistake, before an expensive run.

    The model, the loss, the step and the data are tried in several ways whose results must agree: a batch twice, in
    parts, in another order, with more padding, and so on. The page "Checking your program" lists the checks. Checks
    that do not apply or cannot decide are reported as such. Model, optimizer, generators and history are restored
    afterwards. Your own callbacks are called in steps, and their attributes are restored; built-in callbacks are not
    called.

    Args:
        seconds: time limit in seconds, after which the remaining checks are left out
        strict: whether to raise an error if a check fails
        only: names of the checks to make; all by default
        skip: names of checks to leave out
        extra: your own checks: functions that are passed a ``Probe``, and yield each ``Finding``
        arguments: arguments of ``train()`` by name; some of them, such as ``resume_from``, have no effect

    Returns:
        the report, to be printed in a script; consoles and notebooks show it

    Raises:
        ProgramError: if ``strict`` and a check fails
    """
    if seconds != math.inf:
        check_range("seconds", seconds, above=0)
    chosen = _choose(only, skip, extra)
    if self.ranks.world_size > 1:
        raise RuntimeError("check() tries a program on a single process. Call it without a launcher.")
    bound = inspect.signature(self.train).bind(train_dataset, **arguments)
    bound.apply_defaults()
    values = bound.arguments
    request = RunRequest(**{f.name: values[f.name] for f in fields(RunRequest) if f.name in values})
    if request.num_epochs is request.max_num_train_steps is None:
        request.num_epochs = 1
    schedule = resolve_names(values["create_scheduler_fn"], values["warmup_steps"], request.scheduler_interval)
    train_copy, eval_copy = map(data_checks.independent_copy, (train_dataset, eval_dataset))
    callbacks, size = list(self.callback_handler), per_device_batch_size
    loading = values["train_dataloader_kwargs"], values["collate_fn"]
    with Snapshot() as before, replaced(self, division=Division()):
        trial = Trial(self, "check", train_copy, size, request, *loading, supports=("train_step", "closure"))
        with trial.running():
            before.keep_generators_of(data_checks.owners_of_generators([train_dataset, eval_dataset]))
            if eval_dataset is not None:
                trial.read_evaluation(eval_copy, values["eval_dataloader_kwargs"])
            probe = Probe(trial, callbacks, schedule, seconds)
            report = CheckReport([_run_check(name, function, probe, seconds) for name, function in chosen.items()])
    if strict and not report.ok:
        raise ProgramError(report)
    return report


def _choose(only: Sequence[str] | None, skip: Sequence[str], extra: Sequence[Check]) -> dict[str, Check]:
    if not isinstance(extra, Collection) or not all(map(callable, extra)):
        raise TypeError(f"extra={extra!r} must be a list of checks: functions that are passed a Probe.")
    checks = {one.__name__.removeprefix("check_"): one for one in (*CHECKS, *extra)}
    for argument, names in (("only", only or ()), ("skip", skip)):
        if isinstance(names, str) or not isinstance(names, Collection) or not checks.keys() >= set(names):
            raise ValueError(f"{argument}={names!r}: there are the checks {', '.join(checks)}. Pass a list of these.")
    return {name: one for name, one in checks.items() if (only is None or name in only) and name not in skip}


def _run_check(name: str, function: Check, probe: Probe, seconds: float) -> CheckResult:
    """Return the result of a check, whatever it raises."""
    findings: list[Finding] = []
    try:
        if probe.seconds_left <= 0:
            raise NotApplicableError(f"left out after {seconds:g} seconds")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            findings += function(probe)
    except NotApplicableError as error:
        findings.append(Finding("not applicable", str(error)))
    except Exception as error:
        findings.append(Finding("not applicable", f"The program raised {describe_error(error)}"))
    texts = [" ".join(text.split()) for text in (inspect.getdoc(function) or "").split("\n\n")]
    tried, why, change = [*texts, "", "", ""][:3]
    findings.sort(key=lambda finding: get_args(Status).index(finding.status))
    worst = findings[0].status if findings else "passed"
    bad = [finding for finding in findings if finding.status in ("failed", "warned")]
    reported = bad or [finding for finding in findings if finding.status == worst]
    message = " ".join(dict.fromkeys(finding.message for finding in reported))
    advice = " ".join(dict.fromkeys(finding.advice or change for finding in bad))
    details = {key: value for finding in reported for key, value in finding.details.items()}
    return CheckResult(name, worst, message, details, advice, tried, why)
