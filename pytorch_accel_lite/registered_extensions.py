"""The extensions that are imported for what they add to the seams of the core: each is deleted with its line.

Those with public names are imported where these are exported.
"""

from pytorch_accel_lite.extensions import blocks as blocks  # adds to MODEL_CHANGES
from pytorch_accel_lite.extensions import common_mistakes as common_mistakes  # adds to RUN_CHECKS
from pytorch_accel_lite.extensions import compiled_step as compiled_step  # fills STEP_COMPILER
from pytorch_accel_lite.extensions import data_fingerprints as data_fingerprints  # adds to SHARED_DATA_CHECKS
from pytorch_accel_lite.extensions import elastic_schedules as elastic_schedules  # fills SCHEDULE_RECREATION
from pytorch_accel_lite.extensions import error_notes as error_notes  # adds to ERROR_NOTES
from pytorch_accel_lite.extensions import kept_workers as kept_workers  # fills DATA_MARKS
from pytorch_accel_lite.extensions import manual_optimization as manual_optimization  # adds to STEP_KINDS
from pytorch_accel_lite.extensions import other_libraries as other_libraries  # fills OTHER_LIBRARIES
from pytorch_accel_lite.extensions import plots as plots  # fills PLOTS
from pytorch_accel_lite.extensions import pretrained as pretrained  # adds to MODEL_FORMS
from pytorch_accel_lite.extensions import recorded_settings as recorded_settings  # fills SETTINGS_RECORDER
from pytorch_accel_lite.extensions import remote as remote  # adds to STORES
from pytorch_accel_lite.extensions import sanity_check as sanity_check  # adds to RUN_CHECKS
from pytorch_accel_lite.extensions import sharding as sharding  # fills SHARDING
from pytorch_accel_lite.extensions import slurm as slurm  # adds to JOB_QUEUES
from pytorch_accel_lite.extensions import streams as streams  # fills SEQUENTIAL_READER
from pytorch_accel_lite.extensions import user_attributes as user_attributes  # fills USER_ATTRIBUTES
