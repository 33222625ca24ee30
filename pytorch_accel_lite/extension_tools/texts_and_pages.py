"""What users see: texts, tables, progress bars, pages."""

from pytorch_accel_lite.base.displays import in_notebook, is_terminal, shows_live
from pytorch_accel_lite.base.escaping import escape_unprintable
from pytorch_accel_lite.base.formatting import align, format_duration, listed, wrapped
from pytorch_accel_lite.base.plain_values import as_number_or_text, as_plain, to_number
from pytorch_accel_lite.base.reprs import html_table, short_repr
from pytorch_accel_lite.base.templates import Column, render
from pytorch_accel_lite.base.tool_reports import Report
from pytorch_accel_lite.callbacks.tqdm_bars import Bar, NotebookBar, NotebookOutput, TerminalBar

__all__ = [
    "Bar", "Column", "NotebookBar", "NotebookOutput", "Report", "TerminalBar", "align", "as_number_or_text",
    "as_plain", "escape_unprintable", "format_duration", "html_table", "in_notebook", "is_terminal", "listed",
    "render", "short_repr", "shows_live", "to_number", "wrapped",
]  # fmt: skip
