"""What is called or counted otherwise in other libraries, for errors and warnings that say what to write here."""

from pytorch_accel_lite.extending import OTHER_LIBRARIES, RUN_CHECKS
from pytorch_accel_lite.extensions.other_libraries.epoch_zero import warn_of_epoch_zero
from pytorch_accel_lite.extensions.other_libraries.methods import warn_of_methods
from pytorch_accel_lite.extensions.other_libraries.names import ADVICE, ARGUMENTS, ATTRIBUTES, HOOKS

__all__ = ["HOOKS"]

OTHER_LIBRARIES.arguments.update(ARGUMENTS)
OTHER_LIBRARIES.hooks.update(HOOKS)
OTHER_LIBRARIES.advice.update(ADVICE)
OTHER_LIBRARIES.attributes.update(ATTRIBUTES)
OTHER_LIBRARIES.methods.append(warn_of_methods)
RUN_CHECKS.of_user_code.append(warn_of_epoch_zero)
