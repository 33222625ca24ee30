"""The metrics of torchmetrics, over evaluations and epochs; also by name, as for ``Trainer(metrics="accuracy")``."""

from pytorch_accel_lite.extending import METRICS
from pytorch_accel_lite.extensions.metrics.metrics_by_name import Classification, NamedMetric
from pytorch_accel_lite.extensions.metrics.metrics_callback import MetricsCallback

__all__ = ["Classification", "MetricsCallback", "NamedMetric"]

METRICS.fill(MetricsCallback)
