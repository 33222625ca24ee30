"""The metrics of torchmetrics, over evaluations and epochs; also by name, as for ``Trainer(metrics="accuracy")``."""

from pytorch_accel_lite.extending import METRICS
from pytorch_accel_lite.extensions.metrics.metrics_callback import MetricsCallback
from pytorch_accel_lite.extensions.metrics.named_metrics import Classification, NamedMetric

__all__ = ["Classification", "MetricsCallback", "NamedMetric"]

METRICS.fill(MetricsCallback)
