"""Invalid arguments of callbacks: the error names the argument."""

from __future__ import annotations

import pytest

from pytorch_accel_lite.callbacks import EarlyStoppingCallback, SaveBestModelCallback, get_default_callbacks
from tests.refusals import booleans_of
from tests.shipped_callbacks import NEEDED, SHIPPED
from tests.small_models import make_trainer, train


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: EarlyStoppingCallback(0), ValueError, "early_stopping_patience=0 must be at least 1"),
        (lambda: EarlyStoppingCallback(early_stopping_threshold=-1), ValueError, "early_stopping_threshold=-1 must be"),
        (
            lambda: EarlyStoppingCallback(early_stopping_threshold="1 %"),
            TypeError,
            "early_stopping_threshold='1 %' must be a number",
        ),
        (lambda: EarlyStoppingCallback(baseline=[0.5]), TypeError, r"baseline=\[0\.5\] must be a number"),
        (lambda: EarlyStoppingCallback(watch_metric=None), TypeError, r"\(watch_metric=None\) must be the name of a"),
        (lambda: SaveBestModelCallback("best.pt", ""), TypeError, r"\(watch_metric=''\) must be the name of a metric"),
        (
            lambda: SaveBestModelCallback("best.pt", greater_is_better="max"),
            TypeError,
            "greater_is_better='max' must be",
        ),
        (lambda: get_default_callbacks("no"), TypeError, "progress_bar='no' must be True or False"),
        (lambda: get_default_callbacks([]), TypeError, r"progress_bar=\[\] must be True or False"),
    ],
)
def test_callbacks_refuse_bad_arguments(make, error, match):
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize("callback_class", SHIPPED)
def test_callbacks_refuse_words_as_booleans(callback_class, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in booleans_of(callback_class):
        with pytest.raises(TypeError, match=f"{name}='yes' must be True"):
            callback_class(**NEEDED.get(callback_class.__name__, {}) | {name: "yes"})


def test_a_path_named_like_a_metric_is_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="If you mean the metric, pass watch_metric='train_loss_epoch'"):
        train(make_trainer([SaveBestModelCallback("train_loss_epoch")]), eval_dataset=True)
