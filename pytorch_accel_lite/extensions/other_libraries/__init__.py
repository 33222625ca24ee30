"""The names in other libraries, for errors that say what to use here."""

from pytorch_accel_lite.extending import OTHER_LIBRARIES
from pytorch_accel_lite.extensions.other_libraries.names import ADVICE, ARGUMENTS, GONE, HOOKS, REPLACED

__all__ = ["HOOKS"]

OTHER_LIBRARIES.arguments.update(ARGUMENTS)
OTHER_LIBRARIES.hooks.update(HOOKS)
OTHER_LIBRARIES.advice.update(ADVICE)
OTHER_LIBRARIES.replaced.update(REPLACED)
OTHER_LIBRARIES.gone.update(GONE)
