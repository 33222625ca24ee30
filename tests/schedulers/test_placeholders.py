"""Placeholders for values of a run in the arguments of a scheduler factory."""

from __future__ import annotations

import copy
import math
import operator
import pickle
from collections import namedtuple
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR, StepLR

from pytorch_accel_lite import Trainer, TrainerPlaceholderValues
from pytorch_accel_lite.trainer import PlaceholderError, replace_trainer_placeholder_values
from tests.small_models import Stream, equal_weights, make_data, make_model, make_trainer, train, weights

P = TrainerPlaceholderValues
NAMES = [
    "NUM_EPOCHS",
    "NUM_UPDATE_STEPS_PER_EPOCH",
    "PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH",
    "MAX_NUM_TRAIN_STEPS",
    "TRAIN_DATALOADER_LEN",
    "EVAL_DATALOADER_LEN",
]


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    """2 epochs of 7 batches in windows of 2, and an evaluation of 3 batches."""
    return train(
        make_trainer(), epochs=2, size=13, batch_size=2, gradient_accumulation_steps=2, eval_dataset=make_data(5)
    )


VALUES = {
    "NUM_EPOCHS": 2,
    "NUM_UPDATE_STEPS_PER_EPOCH": 4,
    "PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH": 4,
    "MAX_NUM_TRAIN_STEPS": 8,
    "TRAIN_DATALOADER_LEN": 7,
    "EVAL_DATALOADER_LEN": 3,
}


def value_in(trainer: Trainer, expression: Any) -> Any:
    """The value that a factory receives in place of an expression."""
    return replace_trainer_placeholder_values(trainer, partial(lambda value: value, expression))()


# ------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("name", NAMES)
def test_a_placeholder_has_the_value_of_the_run(name, trainer):
    value = value_in(trainer, getattr(P, name))
    assert value == VALUES[name]
    assert type(value) is int


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # 13 samples in batches of 2 are 7 batches
        ({"epochs": 3}, (3, 7, 21)),
        ({"epochs": 3, "gradient_accumulation_steps": 2}, (3, 4, 12)),
        ({"epochs": 3, "gradient_accumulation_steps": 7}, (3, 1, 3)),
        ({"epochs": 3, "gradient_accumulation_steps": 100}, (3, 1, 3)),
        ({"epochs": None, "max_num_train_steps": 10}, (2, 7, 10)),
        ({"epochs": None, "max_num_train_steps": 10, "gradient_accumulation_steps": 2}, (3, 4, 10)),
        ({"epochs": 9, "max_num_train_steps": 5}, (1, 7, 5)),
        ({"epochs": 1, "max_num_train_steps": 15}, (3, 7, 15)),
        ({"epochs": 2, "train_dataloader_kwargs": {"drop_last": True}}, (2, 6, 12)),
        ({"epochs": 2, "train_dataloader_kwargs": {"batch_size": 13}}, (2, 1, 2)),
    ],
)
def test_counts_of_updates_in_schedules_are_those_really_made(arguments, expected):
    given: list[Any] = []

    def factory(optimizer: Any, *values: Any) -> Any:
        given.extend(values)
        return LambdaLR(optimizer, lambda step: 1.0)

    run = train(
        make_trainer(),
        size=13,
        create_scheduler_fn=partial(_swap, factory, P.NUM_EPOCHS, P.NUM_UPDATE_STEPS_PER_EPOCH, P.MAX_NUM_TRAIN_STEPS),
        **arguments,
    )
    assert tuple(given) == expected
    assert (run.progress.epoch, run.progress.update) == (expected[0], expected[2])
    assert run.run_config.num_epochs == expected[0]
    assert run.run_config.num_update_steps_per_epoch == expected[1]
    assert run.run_config.max_num_train_steps == expected[2]


def _swap(factory: Any, *values_and_optimizer: Any) -> Any:
    """Call a factory with the optimizer first, which a partial with positional arguments gives last."""
    *values, optimizer = values_and_optimizer
    return factory(optimizer, *values)


# ---------------------------------------------------------------------------------------- arithmetic

OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}


@pytest.mark.parametrize("symbol", OPERATORS)
@pytest.mark.parametrize("number", [3, 2.5, -4, True, np.float64(1.5), np.int64(3), np.float32(0.5)])
def test_every_operator_works_with_numbers_on_either_side(symbol, number, trainer):
    apply = OPERATORS[symbol]
    right = value_in(trainer, apply(P.TRAIN_DATALOADER_LEN, number))
    left = value_in(trainer, apply(number, P.TRAIN_DATALOADER_LEN))
    assert right == apply(7, number)
    assert left == apply(number, 7)
    if type(number) in (int, float, bool):
        assert type(left) is type(apply(number, 7))
        assert type(right) is type(apply(7, number))


LEAVES = st.one_of(
    st.sampled_from(NAMES),
    st.integers(-20, 20),
    st.floats(-20, 20, allow_nan=False).map(lambda number: round(number, 3)),
)
BINARY = st.sampled_from([*OPERATORS, "min", "max"])
UNARY = st.sampled_from(["-", "round", "floor", "ceil", "trunc"])
TREES = st.recursive(
    LEAVES, lambda inner: st.one_of(st.tuples(BINARY, inner, inner), st.tuples(UNARY, inner)), max_leaves=12
)


def evaluate(tree: Any, names: dict[str, Any], smallest: Any, largest: Any) -> Any:
    """Build the value of a tree, from numbers or from placeholders."""
    if isinstance(tree, str):
        return names[tree]
    if not isinstance(tree, tuple):
        return tree
    symbol, *operands = tree
    values = [evaluate(operand, names, smallest, largest) for operand in operands]
    unary = {"-": operator.neg, "round": round, "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc}
    if len(values) == 1:
        return unary[symbol](values[0])
    return (OPERATORS | {"min": smallest, "max": largest})[symbol](*values)


def outcome(compute: Any) -> Any:
    """A value with its type, or the type of the error, which for a placeholder is that of its cause."""
    try:
        value = compute()
    except (ZeroDivisionError, OverflowError, PlaceholderError) as error:
        return type(error.__cause__ or error)
    return type(value), value


@settings(max_examples=150)
@given(tree=TREES)
def test_any_expression_has_the_value_that_python_gives_it(trainer, tree):
    expected = outcome(lambda: evaluate(tree, VALUES, min, max))
    placeholders = {name: getattr(P, name) for name in NAMES}
    assert outcome(lambda: value_in(trainer, evaluate(tree, placeholders, P.min, P.max))) == expected


@settings(max_examples=100)
@given(tree=TREES)
def test_the_text_of_any_expression_means_the_same_in_python(trainer, tree):
    names = {name: getattr(P, name) for name in NAMES}

    def build() -> Any:
        return evaluate(tree, names, P.min, P.max)

    if isinstance(outcome(build), type):
        return
    scope = {
        "TrainerPlaceholderValues": type("Numbers", (), VALUES),
        "floor": math.floor,
        "ceil": math.ceil,
        "trunc": math.trunc,
    }
    assert outcome(lambda: eval(repr(build()), scope)) == outcome(lambda: value_in(trainer, build()))


def test_one_expression_serves_several_runs():
    steps = P.NUM_EPOCHS * P.NUM_UPDATE_STEPS_PER_EPOCH
    first, second = train(make_trainer(), epochs=2, size=6), train(make_trainer(), epochs=3, size=8)
    assert (value_in(first, steps), value_in(second, steps), value_in(first, steps)) == (6, 12, 6)


def test_no_expression_can_be_changed():
    expression = P.NUM_EPOCHS * 2
    for target in (expression, P.NUM_EPOCHS):
        with pytest.raises(AttributeError):
            target.name = "other"
        with pytest.raises(AttributeError):
            target._compute = lambda trainer: 1
        with pytest.raises(AttributeError):
            del target._compute


def test_a_copied_factory_keeps_its_placeholders(trainer):
    factory = partial(dict, steps=P.NUM_EPOCHS * 2)
    for copied in (copy.copy(factory), copy.deepcopy(factory)):
        assert replace_trainer_placeholder_values(trainer, copied)() == {"steps": 4}


def test_expressions_print_as_they_were_written():
    assert repr(P.NUM_EPOCHS) == str(P.NUM_EPOCHS) == "TrainerPlaceholderValues.NUM_EPOCHS"
    steps = 2 * P.NUM_EPOCHS - P.TRAIN_DATALOADER_LEN // 3
    text = repr(steps).replace("TrainerPlaceholderValues.", "")
    assert text == "((2 * NUM_EPOCHS) - (TRAIN_DATALOADER_LEN // 3))"
    assert repr(P.max(1, round(P.NUM_EPOCHS))) == "max(1, round(TrainerPlaceholderValues.NUM_EPOCHS))"
    assert repr(-P.NUM_EPOCHS) == "-TrainerPlaceholderValues.NUM_EPOCHS"
    assert repr(round(P.NUM_EPOCHS / 3, 2)) == "round((TrainerPlaceholderValues.NUM_EPOCHS / 3), 2)"


# ------------------------------------------------------------------------------------ where they may be

Pair = namedtuple("Pair", "low high")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: partial(list, [p]), [2]),
        (lambda p: partial(dict, steps=p), {"steps": 2}),
        (lambda p: partial(dict, steps=[1, p]), {"steps": [1, 2]}),
        (lambda p: partial(dict, steps=(p, (p + 1, [p + 2]))), {"steps": (2, (3, [4]))}),
        (lambda p: partial(dict, steps={"a": p, "b": {"c": p * 2}}), {"steps": {"a": 2, "b": {"c": 4}}}),
        (lambda p: partial(dict, steps={p, 9}), {"steps": {2, 9}}),
        (lambda p: partial(dict, steps=frozenset([p])), {"steps": frozenset([2])}),
        (lambda p: partial(dict, steps=Pair(p, p + 1)), {"steps": Pair(2, 3)}),
        (lambda p: partial(partial(dict, low=p), high=p + 1), {"low": 2, "high": 3}),
    ],
    ids=["argument", "keyword", "list", "tuple", "dict", "set", "frozenset", "named tuple", "partial of a partial"],
)
def test_placeholders_are_found_wherever_they_are_nested(make, expected, trainer):
    result = replace_trainer_placeholder_values(trainer, make(P.NUM_EPOCHS))()
    assert result == expected
    for value in result.values() if isinstance(result, dict) else result:
        assert type(value) in (int, list, tuple, dict, set, frozenset, Pair)


def test_placeholders_are_found_in_inner_partials(trainer):
    inner = partial(max, P.NUM_EPOCHS)
    resolved = replace_trainer_placeholder_values(trainer, partial(map, inner, [1, 3]))
    assert list(resolved()) == [2, 3]
    listed = replace_trainer_placeholder_values(trainer, partial(dict, parts=[inner]))()["parts"][0]
    assert listed(1) == 2


def test_using_a_factory_does_not_change_it(trainer):
    steps = [P.NUM_EPOCHS]
    factory = partial(dict, steps=steps, inner=partial(int, P.NUM_EPOCHS))
    replace_trainer_placeholder_values(trainer, factory)
    assert factory.keywords["steps"] is steps
    assert steps == [P.NUM_EPOCHS]
    assert factory.keywords["inner"].args == (P.NUM_EPOCHS,)


@pytest.mark.parametrize("value", [print, 3, None, "NUM_EPOCHS", torch.optim.SGD])
def test_values_without_placeholders_are_returned_unchanged(value, trainer):
    assert replace_trainer_placeholder_values(trainer, value) is value


# ------------------------------------------------------------------------------------ in real schedulers


def learning_rates(create_scheduler_fn: Any, **arguments: Any) -> list[float]:
    """The learning rate of each update, and the one after the last."""
    rates = []

    class Noting(Trainer):
        def optimizer_step(self):
            rates.append(self.optimizer.param_groups[0]["lr"])
            super().optimizer_step()

    trainer = make_trainer(trainer_class=Noting)
    train(trainer, create_scheduler_fn=create_scheduler_fn, **arguments)
    return [*rates, trainer.optimizer.param_groups[0]["lr"]]


def expected_rates(create: Any, updates: int) -> list[float]:
    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1)
    scheduler = create(optimizer)
    rates = []
    for _ in range(updates):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return [*rates, optimizer.param_groups[0]["lr"]]


def test_onecycle_with_placeholders_has_the_rates_of_numbers():
    # One step more than updates, because torch counts the first value as a step.
    rates = learning_rates(
        partial(OneCycleLR, max_lr=0.5, total_steps=P.NUM_EPOCHS * P.NUM_UPDATE_STEPS_PER_EPOCH + 1),
        epochs=3,
        size=9,
        gradient_accumulation_steps=2,
    )
    assert rates == expected_rates(partial(OneCycleLR, max_lr=0.5, total_steps=10), 9)


def warm_up_then_cosine(optimizer: Any, warm_up: int, total: int) -> SequentialLR:
    parts = [
        LinearLR(optimizer, start_factor=0.1, total_iters=warm_up),
        CosineAnnealingLR(optimizer, T_max=total - warm_up),
    ]
    return SequentialLR(optimizer, parts, milestones=[warm_up])


def sequence_of(optimizer: Any, parts: list[Any], milestones: list[int]) -> SequentialLR:
    return SequentialLR(optimizer, [part(optimizer) for part in parts], milestones)


def test_a_sequence_of_schedulers_may_hold_placeholders():
    warm_up = P.max(1, round(0.2 * P.MAX_NUM_TRAIN_STEPS))
    nested = partial(
        sequence_of,
        parts=[
            partial(LinearLR, start_factor=0.1, total_iters=warm_up),
            partial(CosineAnnealingLR, T_max=P.MAX_NUM_TRAIN_STEPS - warm_up),
        ],
        milestones=[warm_up],
    )
    flat = partial(warm_up_then_cosine, warm_up=warm_up, total=P.MAX_NUM_TRAIN_STEPS)
    expected = expected_rates(partial(warm_up_then_cosine, warm_up=2, total=10), 10)
    for factory in (nested, flat):
        assert learning_rates(factory, epochs=None, max_num_train_steps=10, size=7) == expected


# -------------------------------------------------------------------------------------------- errors


USES_BEFORE_A_RUN = {
    "<": lambda p: p < 3,
    "<=": lambda p: p <= 3,
    ">": lambda p: p > 3,
    ">=": lambda p: p >= p,
    "reflected <": lambda p: operator.lt(3, p),
    "min": lambda p: min(p, 3),
    "max": lambda p: max(3, p),
    "sorted": lambda p: sorted([3, p]),
    "int": int,
    "float": float,
    "bool": bool,
    "range": range,
    "index": lambda p: [1, 2, 3][p],
    "if": lambda p: 1 if p else 2,
    "and": lambda p: p and 3,
}


@pytest.mark.parametrize("name", USES_BEFORE_A_RUN)
def test_using_a_placeholder_too_early_is_an_error_naming_it(name):
    with pytest.raises(TypeError, match=r"TrainerPlaceholderValues\.NUM_EPOCHS.*no value.*round\(\.\.\.\).*\.min"):
        USES_BEFORE_A_RUN[name](P.NUM_EPOCHS)


@pytest.mark.parametrize("other", ["7", None, [1], 1j, torch.tensor(2)], ids=repr)
@pytest.mark.parametrize("symbol", OPERATORS)
def test_placeholder_arithmetic_with_non_numbers_is_an_error(symbol, other):
    with pytest.raises(TypeError):
        OPERATORS[symbol](P.NUM_EPOCHS, other)
    with pytest.raises(TypeError):
        OPERATORS[symbol](other, P.NUM_EPOCHS)


def test_a_placeholder_cannot_be_pickled_by_accident():
    with pytest.raises(TypeError, match=r"\.NUM_EPOCHS cannot be pickled"):
        pickle.dumps(P.NUM_EPOCHS)


def test_a_placeholder_before_any_run_is_an_error_that_names_it():
    trainer = make_trainer()
    for name in NAMES:
        with pytest.raises(PlaceholderError, match=name):
            replace_trainer_placeholder_values(trainer, partial(dict, steps=getattr(P, name)))


def refuse_run(match: str, factory: Any, **arguments: Any) -> None:
    """Expect a run to be refused, with nothing trained, and the same trainer to work afterwards."""
    trainer = make_trainer()
    start = weights(trainer.model)
    with pytest.raises(PlaceholderError, match=match) as caught:
        train(trainer, create_scheduler_fn=factory, **arguments)
    assert isinstance(caught.value, ValueError)
    assert equal_weights(weights(trainer.model), start)
    assert trainer.progress.update == 0
    train(trainer)
    assert trainer.progress.update == 3


@pytest.mark.parametrize(
    ("data", "reason"),
    [(None, "eval_dataset"), pytest.param(Stream(), "length", marks=pytest.mark.extension("streams"))],
)
def test_an_unknown_length_of_evaluation_is_an_error(data, reason):
    factory = partial(StepLR, step_size=2 * P.EVAL_DATALOADER_LEN)
    refuse_run(rf"TrainerPlaceholderValues\.EVAL_DATALOADER_LEN.*{reason}", factory, eval_dataset=data)


@pytest.mark.extension("streams")
@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("NUM_EPOCHS", "EVAL_DATALOADER_LEN")])
def test_an_update_count_of_data_without_length_is_an_error(name):
    factory = partial(StepLR, step_size=getattr(P, name) + 1)
    refuse_run(
        rf"TrainerPlaceholderValues\.{name}.*no length.*max_num_train_steps",
        factory,
        train_dataset=Stream(),
        train_dataloader_kwargs={},
    )


@pytest.mark.extension("streams")
def test_for_data_without_length_a_limit_of_updates_has_a_value():
    rates = learning_rates(
        partial(StepLR, step_size=P.MAX_NUM_TRAIN_STEPS - 1),
        epochs=None,
        max_num_train_steps=4,
        train_dataset=Stream(),
        train_dataloader_kwargs={},
    )
    assert rates == expected_rates(partial(StepLR, step_size=3), 4)


@pytest.mark.extension("streams")
def test_the_number_of_epochs_is_known_for_data_without_length():
    rates = learning_rates(
        partial(StepLR, step_size=P.NUM_EPOCHS), epochs=2, train_dataset=Stream(), train_dataloader_kwargs={}
    )
    assert rates == expected_rates(partial(StepLR, step_size=2), 6)


@pytest.mark.extension("streams")
def test_an_epoch_count_of_data_without_length_is_an_error():
    trainer = make_trainer()
    with pytest.raises(PlaceholderError, match=r"NUM_EPOCHS.*(num_epochs|length)"):
        train(
            trainer,
            epochs=None,
            max_num_train_steps=4,
            create_scheduler_fn=partial(StepLR, step_size=P.NUM_EPOCHS),
            train_dataset=Stream(),
            train_dataloader_kwargs={},
        )


@pytest.mark.extension("streams")
def test_a_type_error_in_the_users_length_keeps_its_traceback():
    class Odd:
        def __len__(self):
            return len(None)  # type: ignore[arg-type]

        def __iter__(self):
            return iter([tuple(t[:2] for t in make_data().tensors)])

    class OddTrainer(Trainer):
        def create_eval_dataloader(self, batch_size, eval_dl_kwargs=None):
            return Odd()

    with pytest.raises((TypeError, PlaceholderError)) as caught:
        train(
            make_trainer(trainer_class=OddTrainer),
            eval_dataset=make_data(),
            create_scheduler_fn=partial(StepLR, step_size=P.EVAL_DATALOADER_LEN),
        )
    chain, error = [], caught.value
    while error is not None:
        chain.append(str(error))
        error = error.__cause__ or error.__context__
    assert any("NoneType" in text for text in chain)


def test_a_division_by_zero_names_the_expression(trainer):
    message = r"\(1 / \(TrainerPlaceholderValues.NUM_EPOCHS - 2\)\) cannot be resolved in this run: division by zero\."
    with pytest.raises(PlaceholderError, match=message) as caught:
        value_in(trainer, 3 + 1 / (P.NUM_EPOCHS - 2))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    "rate",
    [
        lambda step: 1 - step / TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS,
        lambda step: min(1, step / TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS),
    ],
)
def test_a_placeholder_inside_a_function_is_an_error(rate):
    trainer = make_trainer()
    start = weights(trainer.model)
    with pytest.raises(
        TypeError, match=r"placeholder.*inside a function.*argument.*functools\.partial|functools\.partial"
    ):
        train(trainer, create_scheduler_fn=partial(LambdaLR, lr_lambda=rate))
    assert equal_weights(weights(trainer.model), start)

    def as_argument(step, total):
        return 1 - step / total

    total = TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS
    train(trainer, create_scheduler_fn=partial(LambdaLR, lr_lambda=partial(as_argument, total=total)))
    assert trainer.progress.update == 3


@pytest.mark.parametrize("argument", ["step_size", "gamma"])
def test_a_placeholder_that_a_scheduler_keeps_is_an_error(argument):
    """It would never equal the number of an update, so the rate would never change."""
    per_epoch = TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
    trainer = make_trainer()
    with pytest.raises(TypeError, match=rf"StepLR has {argument}=.*UPDATE_STEPS.*functools\.partial"):
        train(trainer, create_scheduler_fn=lambda optimizer: StepLR(optimizer, **{"step_size": 2, argument: per_epoch}))
    assert trainer.progress.update == 0


# ------------------------------------------------------------------ as members of the ancestor's Enum


def test_placeholders_are_listed_like_members_of_an_enum():
    assert [placeholder.name for placeholder in P] == NAMES == list(P.__members__)
    assert len(P) == len(NAMES)
    assert P["NUM_EPOCHS"] is P.NUM_EPOCHS
    assert P.NUM_EPOCHS in P
    assert P.NUM_EPOCHS * 2 not in P
    assert P.placeholder_set() == set(NAMES)
    assert isinstance(P.NUM_EPOCHS * 2, P)
    assert not isinstance(2, P)
    with pytest.raises(KeyError, match=r"^'NUM_EPOCH'"):
        P["NUM_EPOCH"]


def test_expressions_have_the_name_of_their_first_placeholder():
    assert (2 * P.NUM_EPOCHS + P.TRAIN_DATALOADER_LEN).name == "NUM_EPOCHS"
    assert round(P.TRAIN_DATALOADER_LEN / 3).name == "TRAIN_DATALOADER_LEN"


@pytest.mark.parametrize(
    "make", [lambda p: p, lambda p: 2 * p + 1, lambda p: P.min(-p // 3, 4), lambda p: p % P.NUM_EPOCHS]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_placeholder_has_its_computed_value(name, make, trainer):
    expression = make(P[name])
    assert eval(expression.value, {"trainer": trainer}) == value_in(trainer, expression)


def test_placeholders_work_with_names_of_the_ancestor():
    like = SimpleNamespace(run_config=SimpleNamespace(), _train_dataloader=[1, 2, 3], _eval_dataloader=[1])
    assert value_in(like, P.TRAIN_DATALOADER_LEN * 2 + P.EVAL_DATALOADER_LEN) == 7
