"""What all reports share: plain data, text, and light HTML for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

_LEFT = "style='text-align:left'"


class Report:
    """Base of report dataclasses: ``to_dict``, and a table in notebooks."""

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON-able data."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def _repr_html_(self) -> str:
        return pairs_html(self._shown())

    def _shown(self) -> list[tuple[str, object]]:
        return [(f.name, getattr(self, f.name)) for f in fields(self)]  # type: ignore[arg-type]


_R = TypeVar("_R", bound=Report)


class Records(tuple[_R, ...]):
    """A tuple of reports of one kind, one table row each in notebooks."""

    def _repr_html_(self) -> str:
        return records_html(self)


class ShownPolicy:
    """Base of selection policies: name, encoder and purpose in notebooks."""

    def _repr_html_(self: Any) -> str:
        does = (type(self).__doc__ or "").partition("\n\n")[0]
        return pairs_html([("policy", self.name), ("encoder", self.encoder or "any"), ("does", does)])


def pairs_html(pairs: Iterable[tuple[str, object]]) -> str:
    """A table of names and values."""
    rows = "".join(
        f"<tr><th {_LEFT}>{html.escape(name.replace('_', ' '))}</th><td {_LEFT}>{_cell(value)}</td></tr>"
        for name, value in pairs
    )
    return f"<table>{rows}</table>"


def records_html(records: Sequence[Report]) -> str:
    """A table with one row per report; all are of one kind."""
    if not records:
        return "-"
    head = "".join(f"<th {_LEFT}>{html.escape(n.replace('_', ' '))}</th>" for n, _ in records[0]._shown())
    rows = "".join(
        f"<tr>{''.join(f'<td {_LEFT}>{_cell(value)}</td>' for _, value in record._shown())}</tr>"
        for record in records
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def text_html(text: str) -> str:
    """Text with its line breaks."""
    return f"<div style='white-space:pre-wrap'>{html.escape(text)}</div>"


def folded_html(summary: str, report: Report) -> str:
    """A line of text that opens the whole report."""
    return f"<details><summary>{html.escape(summary)}</summary>{report._repr_html_()}</details>"


def shorten(text: str, most: int) -> str:
    """The first ``most`` characters, with an ellipsis if there are more."""
    return text if len(text) <= most else text[:most].rstrip() + "…"


def _cell(value: object) -> str:
    if isinstance(value, Report):
        return value._repr_html_()
    if isinstance(value, tuple) and value and isinstance(value[0], Report):
        return records_html(value)
    if isinstance(value, tuple):
        return html.escape("; ".join(map(str, value)) or "-")
    if value is None or value == "":
        return "-"
    return html.escape(f"{value:.4g}" if isinstance(value, float) else str(value))
