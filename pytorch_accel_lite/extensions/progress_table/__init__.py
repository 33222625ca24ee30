"""A table with a row for each epoch, and a summary of the run: a default callback."""

from pytorch_accel_lite.extending import HISTORY_TABLE
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import DEFAULTS
from pytorch_accel_lite.extensions.progress_bar import ProgressBarCallback
from pytorch_accel_lite.extensions.progress_table.history_table import history_table
from pytorch_accel_lite.extensions.progress_table.progress_table_callback import ProgressTableCallback

__all__ = ["ProgressTableCallback"]

DEFAULTS.insert(DEFAULTS.index(ProgressBarCallback), ProgressTableCallback)  # a row is printed before the bar goes on
HISTORY_TABLE.fill(history_table)
