"""Names for extensions of ``data``, besides the names for users. This is below the run, which is not here."""

from pytorch_accel_lite.base.modules import evaluation_mode
from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.base.validation import check_positive_int
from pytorch_accel_lite.data.batches import first_label, tensors_in
from pytorch_accel_lite.data.sources import IndexedData, Sample

__all__ = ["IndexedData", "Sample", "Tree", "check_positive_int", "evaluation_mode", "first_label", "tensors_in"]
