"""A history in a notebook: a table of its epochs."""

from __future__ import annotations

import re

from pytorch_accel_lite import InMemoryRunHistory


def cells(html: str | None) -> list[list[str]]:
    """The cells of each row of a table, with the tags in them."""
    assert html is not None
    rows = re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def test_a_notebook_shows_a_history_as_a_table_of_epochs():
    history = InMemoryRunHistory()
    history.directions = {"accuracy": True, "unknown": None}
    for epoch, (loss, accuracy) in enumerate(((0.5, 0.5), (0.25, 0.75), (0.75, 0.625)), 1):
        history._set_epoch(epoch)
        history.update_metric("eval_loss_epoch", loss)
        if epoch > 1:
            history.update_metric("accuracy", accuracy)
        history.update_metric("unknown", loss)
    head, *rows = cells(history._repr_html_())
    assert head == ["epoch", "eval_loss_epoch", "unknown", "accuracy"]
    assert rows == [
        ["1", "0.5", "0.5", ""],
        ["2", "<b>0.25</b>", "0.25", "<b>0.75</b>"],
        ["3", "0.75", "0.75", "0.625"],
    ]
    for epoch in range(4, 204):
        history._set_epoch(epoch)
        history.update_metric("eval_loss_epoch", 1.0)
    html = history._repr_html_()
    assert len(cells(html)) == 101
    assert "103 earlier epochs are in rows() and to_dataframe()." in str(html)
