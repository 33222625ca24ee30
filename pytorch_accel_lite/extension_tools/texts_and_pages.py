"""What users see: texts, tables, pages."""

from pytorch_accel_lite.base.escaping import escape_unprintable
from pytorch_accel_lite.base.formatting import align, format_duration, listed, wrapped
from pytorch_accel_lite.base.plain_values import as_number_or_text, as_plain, to_number
from pytorch_accel_lite.base.reprs import html_table, short_repr
from pytorch_accel_lite.base.templates import Column, render
from pytorch_accel_lite.base.terminals_and_notebooks import in_notebook, is_terminal, shows_live
from pytorch_accel_lite.base.tool_reports import Report

__all__ = [
    "Column", "Report", "align", "as_number_or_text",
    "as_plain", "escape_unprintable", "format_duration", "html_table", "in_notebook", "is_terminal", "listed",
    "render", "short_repr", "shows_live", "to_number", "wrapped",
]  # fmt: skip
