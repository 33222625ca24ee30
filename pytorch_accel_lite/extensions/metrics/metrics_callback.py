"""Recording torchmetrics metrics over evaluations and epochs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from accelerate.utils import recursively_apply, send_to_device

from pytorch_accel_lite.extending import Run, RunRequest, TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import (
    add_note,
    check_choice,
    check_function,
    check_names,
    is_overridden,
    optional,
    warn_outside,
)
from pytorch_accel_lite.extension_tools.data_and_batches import BatchData, BatchOutput
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import default_transform, set_own_listening
from pytorch_accel_lite.extension_tools.plain_types import StateDict, Tree
from pytorch_accel_lite.extension_tools.processes import Ranks
from pytorch_accel_lite.extension_tools.texts_and_pages import short_repr
from pytorch_accel_lite.extensions.metrics.metrics_by_name import (
    Classification,
    NamedMetric,
    are_labels,
    as_labels,
    below_0,
    gives_logits,
    is_accuracy,
    takes_probabilities,
    with_shape_of_targets,
)

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

_NO_LABELS = "The targets are not labels. For regression, name metrics such as 'mae' and 'r2'."


_UPDATES = "number of updates"  # key added to the state of a metric, which has no such number


#: Takes the arguments of metrics from a batch and its output.
Transform: TypeAlias = Callable[[BatchData, BatchOutput], tuple[Tree, ...]]


class MetricsCallback(TrainerCallback):
    """Compute torchmetrics metrics over each evaluation, and record them in the run history.

    Every sample counts exactly once, on any number of processes. Metrics are recorded under their names: the keys of a
    dict or a ``MetricCollection``, or the class name; evaluations within an epoch add the prefix ``intermediate_``.
    Callbacks that watch a metric learn from its ``higher_is_better`` which values are better. Metrics that validate
    their inputs may read from the device in every step; create them with ``validate_args=False``.

    Args:
        metrics: a ``Metric``, a ``MetricCollection``, or a dict of metrics by name; or the name of a torchmetrics
            metric, such as ``"accuracy"``, ``"f1"``, ``"top5"`` or ``"mse"``, a list of names, or names in the dict
        transform: called as ``transform(batch, batch_output)``; returns the arguments for the metric's ``update``:
            predictions and targets. Defaults to the model's output (or its ``logits``) and the batch's second element
            (or its ``labels``).
        train: whether to compute the metrics over each training epoch, too, with the prefix ``train_``
        only: names of the values to record; by default all values; some metrics, such as ``MeanAveragePrecision``,
            compute many
        num_classes: number of classes of metrics by name, which are then multiclass metrics
        num_labels: number of labels of metrics by name, which are then multilabel metrics
        task: task of classification metrics by name. Without ``task``, ``num_classes`` and ``num_labels``, the task
            follows from the shapes of the first outputs and targets.
        arguments: further arguments of metrics by name, such as ``average="macro"``, with the defaults of
            ``torchmetrics.Accuracy(task=...)`` and similar functions

    Attributes:
        train_metrics: copies of the metrics over each training epoch; ``None`` without ``train``
    """

    _gives_logits = False
    _takes_probabilities = False
    _evaluated: Run | None = None  # the run of the evaluation in progress

    def __init__(
        self,
        metrics: str | Sequence[str] | Metric | MetricCollection | Mapping[str, Metric | str],
        transform: Transform | None = None,
        *,
        train: bool = False,
        only: Iterable[str] | None = None,
        num_classes: int | None = None,
        num_labels: int | None = None,
        task: Literal["binary", "multiclass", "multilabel"] | None = None,
        **arguments: object,
    ) -> None:
        from torchmetrics import Metric, MetricCollection

        if isinstance(metrics, Metric):
            metrics = {type(metrics).__name__: metrics}
        for name, value in {"num_classes": num_classes, "num_labels": num_labels, "task": _check_task(task)}.items():
            arguments |= {} if value is None else {name: value}
        _check_names(metrics)
        named = _with_named_metrics(metrics, arguments)
        #: Metrics to create once the first outputs show the classifier's task.
        self._pending: dict[str, NamedMetric] = {}
        self._classification: Classification | None = None
        self._named: set[str] = set()
        if isinstance(named, dict):
            self._named = {name for name, metric in named.items() if isinstance(metric, NamedMetric)}
            self._pending = {name: m for name, m in named.items() if isinstance(m, NamedMetric) and m.needs_task}
            known = {name: m for name, m in named.items() if name not in self._pending}
            named = {name: m.create() if isinstance(m, NamedMetric) else m for name, m in known.items()}
        self._must_agree, self._may_be_accuracy = bool(self._pending), "average" not in arguments
        is_dict = isinstance(named, Mapping) and all(isinstance(value, Metric) for value in named.values())
        if not is_dict and not isinstance(named, MetricCollection):
            values = metrics.values() if isinstance(metrics, Mapping) else [metrics]
            of_function = " Log the mean of a function of your own by trainer.log(name, value) in on_eval_step_end."
            hint = of_function if any(map(inspect.isfunction, values)) else ""
            raise TypeError(
                f"metrics={metrics!r} must be a torchmetrics Metric, a MetricCollection, a dict of metrics, or the "
                f"name of a metric, such as 'accuracy'.{hint}"
            )
        if not len(named) and not self._pending:
            raise ValueError(f"metrics={metrics!r} contains no metric.")
        # Members of compute groups share state that would be missing from the training state.
        self.metrics = MetricCollection(dict(named.items()), compute_groups=False)
        self.train_metrics = self.metrics.clone() if train else None
        self._lasting_at_first = [_lasting(metrics) for metrics in self._collections]
        self.transform = check_function("transform", default_transform if transform is None else transform)
        self.only = optional(check_names, "only", only)
        self._ranks: Ranks | None = None
        self._trainer: TrainerLike | None = None
        #: Evaluations during which a callback evaluates on other data, by their runs and metrics.
        self._interrupted: list[tuple[Run, MetricCollection]] = []
        #: The updated copies of each collection, by the number of a share; the collection itself without shares.
        self._copies: dict[int, dict[int, MetricCollection]] = {}

    @property
    def _collections(self) -> list[MetricCollection]:
        return [self.metrics, *([] if self.train_metrics is None else [self.train_metrics])]

    @property
    def _has_shares(self) -> bool:
        return self._trainer is not None and self._trainer.division.has_fixed_shares

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        self._note_loss(trainer)
        metrics = dict(self.metrics.items())
        _check_not_shared(self, trainer)
        self._say_what_is_accuracy(trainer, metrics)
        directions = {name: getattr(metric, "higher_is_better", None) for name, metric in metrics.items()}
        directions |= {name: metric.higher_is_better for name, metric in self._pending.items()}
        and_others = not all(map(_is_single, metrics.values()))
        if self.only is not None:
            default = next(iter(directions.values())) if len(directions) == 1 else None
            directions = {name: directions.get(name, default) for name in self.only}
            and_others = False
        request.metrics.record(self, directions, in_evaluation=True, and_others=and_others)
        if self.train_metrics is not None:
            request.metrics.record(self, {f"train_{name}": higher for name, higher in directions.items()})
        has_shares = self.train_metrics is not None and trainer.division.has_fixed_shares
        set_own_listening(trainer, self, has_shares, "on_backward_end")

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._ranks = trainer.data_ranks
        if self.train_metrics is not None:  # copies for shares must exist before a state is loaded
            self._reset(trainer, self.train_metrics)

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self.train_metrics is not None:
            self._reset(trainer, self.train_metrics)

    def on_backward_end(
        self, trainer: TrainerLike, batch: BatchData, batch_output: BatchOutput, **kwargs: object
    ) -> None:
        """Add the values of a share before the update, so that takeovers of lost processes repeat both together."""
        if self.train_metrics is None or not trainer.division.has_fixed_shares:
            return
        output: BatchOutput = recursively_apply(torch.Tensor.detach, batch_output)
        if self._pending:
            self._complete(trainer, batch, output)
        self._update(self._copies_of(self.train_metrics)[trainer.division.current], batch, output)

    def on_train_step_end(
        self, trainer: TrainerLike, batch: BatchData, batch_output: BatchOutput, **kwargs: object
    ) -> None:
        if self.train_metrics is None or trainer.division.has_fixed_shares:
            return
        if self._pending:
            self._complete(trainer, batch, batch_output)
        self._update(self.train_metrics, batch, batch_output)

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self.train_metrics is not None:
            self._record(trainer, self.train_metrics, "train_")

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        run = trainer.run
        if self._evaluated is not None and self._evaluated is run.outer:
            self._interrupted.append((self._evaluated, self.metrics))
            self.metrics = self.metrics.clone()
        elif run.outer is None and self._interrupted:  # by an error
            self.metrics, self._interrupted = self._interrupted[0][1], []
        self._evaluated = run
        self._reset(trainer, self.metrics)

    def _continue(self, run: Run) -> None:
        """Take up the metrics of a run's evaluation again, if another one interrupted it."""
        while self._interrupted and self._interrupted[-1][0] is run:
            self._copies.pop(id(self.metrics), None)
            self._evaluated, self.metrics = self._interrupted.pop()

    def on_eval_step_end(
        self, trainer: TrainerLike, batch: BatchData, batch_output: BatchOutput, **kwargs: object
    ) -> None:
        self._continue(trainer.run)
        if self._pending:
            self._complete(trainer, batch, batch_output)
        self._update(self._copies_of(self.metrics)[trainer.division.current], batch, batch_output)

    def try_on(self, trainer: TrainerLike, batch: BatchData, batch_output: BatchOutput) -> None:
        """Update copies of the metrics before training, to find mistakes. An overridden ``_update`` is not tried."""
        if is_overridden(self, "_update") or is_overridden(self, "on_eval_step_end"):
            return
        self._note_loss(trainer)
        copies = self.metrics.clone().to(trainer.device)
        if self._pending:
            classification = self._classify(batch, batch_output)
            copies.add_metrics({name: metric.create(classification) for name, metric in self._pending.items()})
            copies.to(trainer.device)
        self._say_what_is_accuracy(trainer, dict(copies.items()))
        copies.reset()
        self._update(copies, batch, batch_output)

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._continue(trainer.run)
        self._evaluated = None
        self._record(trainer, self.metrics, "intermediate_" if kwargs.get("is_intermediate") else "")

    def _complete(self, trainer: TrainerLike, batch: BatchData, batch_output: BatchOutput) -> None:
        """Create the metrics that wait for the first outputs."""
        if batch_output["batch_size"]:  # not a filler batch
            self._create(self._classify(batch, batch_output), trainer)

    def _note_loss(self, trainer: TrainerLike) -> None:
        """Note what the loss says about the outputs and the targets."""
        self._gives_logits = gives_logits(trainer.loss_func)
        self._takes_probabilities = self.transform is default_transform and takes_probabilities(trainer.loss_func)

    def _say_what_is_accuracy(self, trainer: TrainerLike, metrics: Mapping[str, Metric]) -> None:
        """Print once which metrics by name, such as F1, give the accuracy by torchmetrics' default."""
        names = [name for name, metric in metrics.items() if name in self._named and is_accuracy(metric)]
        if names and self._may_be_accuracy:
            self._may_be_accuracy = False
            passed = repr(names[0]) if len(names) == 1 else repr(names)
            trainer.print(
                f"{' and '.join(map(repr, names))}: torchmetrics averages over samples by default, which gives "
                f"the accuracy. For the mean over classes, pass MetricsCallback({passed}, average='macro')."
            )

    def _classify(self, batch: BatchData, batch_output: BatchOutput) -> Classification:
        predictions, targets, *_ = self.transform(batch, batch_output)
        return Classification.of(predictions, targets, self._takes_probabilities)

    def _create(self, classification: Classification, trainer: TrainerLike | None = None) -> None:
        created = {name: metric.create(classification) for name, metric in self._pending.items()}
        if trainer is not None:
            self._say_what_is_accuracy(trainer, created)
        self._classification = classification
        for metrics in [*self._collections, *(metrics for _, metrics in self._interrupted)]:
            metrics.add_metrics({name: metric.clone() for name, metric in created.items()})
            if trainer is not None:
                self._reset(trainer, metrics)
        both = zip(self._collections, self._lasting_at_first, strict=True)
        self._lasting_at_first = [_lasting(metrics) | before for metrics, before in both]
        self._pending = {}

    def _agree(self, trainer: TrainerLike) -> None:
        """Check that all processes have seen outputs of one task. Processes without samples adopt it."""
        by_rank = trainer.data_ranks.all_gather_object(self._classification)
        found = {classification for classification in by_rank if classification is not None}
        if len(found) > 1:
            raise ValueError(f"The outputs of a classifier differ between the processes: {by_rank}. Pass num_classes.")
        for classification in found if self._pending else ():
            self._create(classification, trainer)
        self._must_agree = not found

    def _reset(self, trainer: TrainerLike, metrics: MetricCollection) -> None:
        metrics.to(trainer.device).reset()
        self._trainer = trainer
        self._copies[id(metrics)] = {} if trainer.division.has_fixed_shares else {0: metrics}

    def _copies_of(self, metrics: MetricCollection) -> dict[int, MetricCollection]:
        """Return the copies of metrics for the shares that this process has now."""
        copies = self._copies.setdefault(id(metrics), {0: metrics})
        if self._trainer is None or not self._trainer.division.has_fixed_shares:
            return copies
        shares = self._trainer.division.shares
        return {} if shares is None else {number: self._copy_of(metrics, number) for number in shares.local}

    def _copy_of(self, metrics: MetricCollection, number: int) -> MetricCollection:
        copies = self._copies[id(metrics)]
        if number not in copies:
            copies[number] = metrics.clone()
            copies[number].reset()
        return copies[number]

    def states_of_shares(self) -> list[StateDict]:
        """Return the training metrics of this process's shares, of which other processes keep a copy."""
        if self.train_metrics is None or self._trainer is None or not self._trainer.division.has_fixed_shares:
            return []
        return [_state_of(copy) for copy in self._copies_of(self.train_metrics).values()]

    def load_states_of_shares(self, states: Sequence[StateDict], first: int) -> None:
        """Load the training metrics of other shares, whose numbers begin with ``first``."""
        for number, state in enumerate(states, first):
            assert self.train_metrics is not None
            _load_state(self._copy_of(self.train_metrics, number), state)

    def _update(self, metrics: MetricCollection, batch: BatchData, batch_output: BatchOutput) -> None:
        if batch_output["batch_size"] == 0:  # a filler batch, which only keeps the processes in step
            return
        with torch.no_grad():
            given = self.transform(batch, batch_output)
            members: Iterable[tuple[str, Metric]] = torch.nn.ModuleDict.items(metrics)
            for name, metric in members:  # without the keyword filter of the collection's update()
                arguments = self._completed(given, metric) if name in self._named else given
                try:
                    metric.update(*arguments)
                except Exception as error:
                    values = " and ".join(map(short_repr, arguments))
                    classes = getattr(metric, "num_classes", None)
                    kind = type(metric).__name__ + (f"(num_classes={classes})" if isinstance(classes, int) else "")
                    add_note(error, f"In the metric {name!r}, a {kind}, updated with {values}.")
                    if name in self._named and not are_labels(given[1]):
                        add_note(error, _NO_LABELS)
                    raise

    def _completed(self, arguments: tuple[Tree, ...], metric: Metric) -> tuple[Tree, ...]:
        """Return the arguments of a metric by name, which for binary labels are probabilities and integers.

        Of targets that are probabilities of classes, the largest counts. torchmetrics would take logits for
        probabilities in batches in which all lie between 0 and 1.
        """
        predictions, targets, *others = with_shape_of_targets(*arguments)
        if type(metric).__name__.startswith(("Binary", "Multilabel")) and self.transform is default_transform:
            predictions = torch.sigmoid(predictions) if self._gives_logits else predictions
            targets = as_labels(targets)
        elif type(metric).__name__.startswith("Multiclass") and self._takes_probabilities:
            targets = targets.argmax(1) if targets.shape == predictions.shape else targets
            predictions = below_0(predictions) if predictions.ndim > targets.ndim else predictions
        return (predictions, targets, *others)

    def _record(self, trainer: TrainerLike, metrics: MetricCollection, prefix: str) -> None:
        if self._must_agree:
            self._agree(trainer)
        if not len(metrics):  # no process had a sample
            return
        with warnings.catch_warnings():
            # A process without samples has not updated its metrics.
            warnings.filterwarnings("ignore", message=".*was called before the ``update`` method.*")
            _merge_over_ranks(metrics, lambda: list(self._copies_of(metrics).values()), trainer.data_ranks)
            values = metrics.compute()
        for name in values if self.only is None else self.only:
            if name not in values:
                raise ValueError(
                    f"MetricsCallback(only={self.only}): there is no value named {name!r}, only {', '.join(values)}."
                )
            trainer.run_history.update_metric(f"{prefix}{name}", _plain(values[name]))

    def state_dict(self) -> StateDict:
        """Return the state of the training metrics so far. Must be called on every process."""
        known: StateDict = {"must_agree": self._must_agree}
        pairs = zip(self._collections, self._lasting_at_first, strict=True)
        lasting = [_changed(_lasting(metrics), created) for metrics, created in pairs]
        if any(lasting):
            known["lasting"] = lasting
        if self._classification is not None:
            known["classification"] = tuple(self._classification)
        if self.train_metrics is None:
            return known
        states = [_state_of(copy) for copy in self._copies_of(self.train_metrics).values()]
        by_rank = [states] if self._ranks is None else self._ranks.all_gather_object(states)
        # Without shares, the first copies of all processes come first, as load_state_dict() deals them out.
        groups = by_rank if self._has_shares else zip_longest(*by_rank)
        return {"ranks": [state for state in chain.from_iterable(groups) if state is not None], **known}

    def load_state_dict(self, state: StateDict) -> None:
        """Load the state returned by ``state_dict()``; each process loads its part."""
        if self._pending and "classification" in state:
            self._create(Classification(*state["classification"]))
        self._must_agree = state.get("must_agree", self._must_agree)
        for metrics, lasting in zip(self._collections, state.get("lasting", []), strict=False):
            parts = dict(metrics.named_modules())
            for path, values in lasting.items():
                for name, value in values.items() if path in parts else ():
                    device = getattr(parts[path], "device", None)
                    setattr(parts[path], name, value.to(device) if isinstance(value, torch.Tensor) else value)
        if self.train_metrics is None or "ranks" not in state:
            return
        copies = list(self._copies_of(self.train_metrics).values())
        if not self._has_shares:  # another number of processes takes over the states of all
            own = state["ranks"] if self._ranks is None else state["ranks"][self._ranks.rank :: self._ranks.world_size]
            for number, states in enumerate(own):
                _load_state(self._copy_of(self.train_metrics, number), states)
            return
        counts = [len(copies)] if self._ranks is None else self._ranks.all_gather_object(len(copies))
        count = sum(counts)
        if len(state["ranks"]) != count:
            warn_outside(
                f"Training metrics cover only the rest of this epoch: they were saved for {len(state['ranks'])} "
                f"logical processes and are resumed for {count}."
            )
            return
        first = 0 if self._ranks is None else sum(counts[: self._ranks.rank])
        for copy, states in zip(copies, state["ranks"][first:], strict=False):
            _load_state(copy, states)


def _check_task(task: str | None) -> str | None:
    return None if task is None else check_choice("task", task, ["binary", "multiclass", "multilabel"])


def _check_names(metrics: object) -> None:
    """Check the names of metrics in a dict, which torchmetrics keeps as attributes."""
    from torchmetrics import MetricCollection  # slow to import

    attributes = dir(MetricCollection({}))
    for name in metrics if isinstance(metrics, Mapping) else ():
        if not isinstance(name, str) or not name or "." in name or name in attributes:
            raise ValueError(
                f"metrics has the name {name!r}. It must be text without dots, and not that of an attribute of torch's "
                "modules, such as 'train'. Choose another one."
            )


def _check_not_shared(callback: MetricsCallback, trainer: TrainerLike) -> None:
    """Check that no other callback has an object of this one, which would count the samples of both."""
    own = {*map(id, _metrics_in(callback.metrics))}
    for other in trainer.callback_handler:
        if isinstance(other, MetricsCallback) and other is not callback:
            for metric in _metrics_in(other.metrics):
                if id(metric) in own:
                    raise ValueError(
                        f"Two MetricsCallbacks have the same {type(metric).__name__} object, so each would count what "
                        "both see. Pass metric.clone() to one of them."
                    )


def _with_named_metrics(metrics: Tree, arguments: Mapping[str, object]) -> Tree:
    """Return metrics with ``NamedMetric`` in place of names."""
    names = [metrics] if isinstance(metrics, str) else metrics
    if isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names):
        metrics = {name: name for name in names}
    members = [*metrics.values()] if isinstance(metrics, Mapping) else []
    if arguments and not any(isinstance(metric, str) for metric in members):
        raise TypeError(
            f"MetricsCallback has no argument {next(iter(arguments))!r}: pass it where you create the metric, or pass "
            "the name of the metric instead."
        )
    if not isinstance(metrics, Mapping):
        return metrics
    return {
        name: NamedMetric(metric, arguments) if isinstance(metric, str) else metric for name, metric in metrics.items()
    }


def _state_of(metrics: MetricCollection) -> StateDict:
    states: StateDict = {}
    for name, metric in metrics.items(keep_base=True):
        parts = _metrics_in(metric)
        for part in parts:
            part.persistent(True)
        states[name] = {key: _to_cpu(value) for key, value in metric.state_dict().items()}
        states[name][_UPDATES] = [part._update_count for part in parts]
    return states


def _lasting(metrics: MetricCollection) -> StateDict:
    """Return the attributes of metrics that no ``reset()`` resets, such as the extremes of ``MinMaxMetric``."""
    found: StateDict = {}
    for path, part in metrics.named_modules():
        left_out = {*getattr(part, "metric_state", {}), "training"}
        held = {name: value for name, value in vars(part).items() if name not in left_out and name[0] != "_"}
        kinds = (bool, int, float, torch.Tensor)
        found[path] = {name: _to_cpu(value) for name, value in held.items() if type(value) in kinds}
    return found


def _changed(values: StateDict, created: StateDict) -> StateDict:
    """Return the attributes that differ from what they were when the metrics were created."""
    changed = {
        path: {name: value for name, value in of.items() if not _is_same(value, created.get(path, {}).get(name))}
        for path, of in values.items()
    }
    return {path: of for path, of in changed.items() if of}


def _is_same(value: Tree, before: Tree) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor):
        return torch.equal(value, before)
    return type(value) is type(before) and value == before


def _load_state(metrics: MetricCollection, states: StateDict) -> None:
    by_name = dict(metrics.items(keep_base=True))
    if states.keys() != by_name.keys():
        warn_outside(
            "These training metrics have been added since the state was saved, and cover only the rest of this epoch, "
            f"or have been removed: {', '.join(sorted(states.keys() ^ by_name.keys()))}."
        )
    for name in states.keys() & by_name.keys():
        saved = dict(states[name])
        parts = _metrics_in(by_name[name])
        counts = saved.pop(_UPDATES, 1)  # a state with 0 updates would not be merged
        counts = counts if isinstance(counts, list) else [counts] * len(parts)  # a single number before 0.2
        device = by_name[name].device
        for part, count in zip(parts, counts, strict=True):
            part.persistent(True)
            part._update_count = count
        by_name[name].load_state_dict(saved)
        by_name[name].to(device)  # torchmetrics does not move the tensors of a state


def _merge_over_ranks(metrics: MetricCollection, shares: Callable[[], list[MetricCollection]], ranks: Ranks) -> None:
    """Merge the states of all shares of all processes, in order, into the metrics of each process.

    Unlike torchmetrics' own synchronisation, this works if a process has no samples and states are lists.

    Args:
        shares: returns the shares of this process
    """
    if ranks.world_size == 1 and shares() == [metrics]:
        return

    def local() -> list[list[StateDict | None]]:
        return [
            [dict(part.metric_state) if part.update_called else None for part in _metrics_in(share)]
            for share in shares()
        ]

    gathered = chain.from_iterable(ranks.repeat_if_process_lost(lambda: ranks.all_gather_object(local())))
    for part, *states in zip(_metrics_in(metrics), *gathered, strict=True):
        part.distributed_available_fn = _never  # compute() must not merge the states again
        present = [state for state in states if state is not None]
        for name, reduction in part._reductions.items():
            # Those of other processes have arrived on the CPU.
            values = [send_to_device(state[name], part.device) for state in present]
            if isinstance(part._defaults[name], list):
                merged: Tree = [item for value in values for item in value]
            elif len(values) > 1:
                stacked = torch.stack(values)
                merged = stacked if reduction is None else reduction(stacked)  # else compute() gets all values
            else:
                merged = values[0] if values else part._defaults[name]
            setattr(part, name, merged)


def _metrics_in(module: torch.nn.Module) -> list[Metric]:
    """Return a metric, or the metrics of a collection, and the metrics that they wrap."""
    from torchmetrics import Metric

    return [part for part in module.modules() if isinstance(part, Metric)]


def _never() -> bool:
    return False


def _is_single(metric: Metric) -> bool:
    """Whether a metric certainly has a single value, recorded under its own name, and not a dict of named values."""
    annotation = str(inspect.signature(metric.compute).return_annotation)
    return "Tensor" in annotation and "dict" not in annotation.lower()


def _plain(value: Tree) -> Tree:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value


def _to_cpu(value: Tree) -> Tree:
    if isinstance(value, list):
        return [_to_cpu(item) for item in value]
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
