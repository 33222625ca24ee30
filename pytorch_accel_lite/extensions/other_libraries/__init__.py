"""What is called or counted otherwise in other libraries, for errors and warnings that say what to write here."""

from pytorch_accel_lite.extending import OTHER_LIBRARIES
from pytorch_accel_lite.extensions.other_libraries.epoch_zero import warn_of_epoch_zero
from pytorch_accel_lite.extensions.other_libraries.names import ADVICE, ARGUMENTS, GONE, HOOKS, REPLACED

__all__ = ["HOOKS"]

OTHER_LIBRARIES.arguments.update(ARGUMENTS)
OTHER_LIBRARIES.hooks.update(HOOKS)
OTHER_LIBRARIES.advice.update(ADVICE)
OTHER_LIBRARIES.replaced.update(REPLACED)
OTHER_LIBRARIES.gone.update(GONE)
OTHER_LIBRARIES.habits.append(warn_of_epoch_zero)
