"""Workers that stay between epochs as long as the data, which they have copied, do not change."""

from pytorch_accel_lite.extension_tools.data_and_batches import DATA_MARKS
from pytorch_accel_lite.extensions.kept_workers.changed_data import marks_of

__all__: list[str] = []

DATA_MARKS.fill(marks_of)
