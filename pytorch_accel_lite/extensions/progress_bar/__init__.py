"""Progress bars, in terminals and notebooks, and lines where neither is: a default callback."""

from pytorch_accel_lite.extension_tools.metrics_and_callbacks import DEFAULTS, PROGRESS_BARS
from pytorch_accel_lite.extensions.progress_bar.progress_bar_callback import ProgressBarCallback
from pytorch_accel_lite.extensions.progress_bar.tqdm_bars import Bar, NotebookBar, NotebookOutput, TerminalBar

__all__ = ["Bar", "NotebookBar", "NotebookOutput", "ProgressBarCallback", "TerminalBar"]

DEFAULTS.insert(2, ProgressBarCallback)  # behind those of the core
PROGRESS_BARS.append(ProgressBarCallback)
