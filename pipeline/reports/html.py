"""The report as one HTML file: style, script and data inside, nothing fetched."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["report_html"]


def report_html(data: Mapping[str, Any]) -> str:
    """The page for the value of :func:`pipeline.reports.content.report_data`."""
    folder = files("pipeline.reports")
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    parts = {
        "STYLE": (folder / "report.css").read_text("utf-8"),
        "SCRIPT": (folder / "report.js").read_text("utf-8"),
        "TITLE": _escaped(str(data["title"])),
        # A closing tag inside the data would end the script element.
        "DATA": text.replace("<", "\\u003c"),
    }
    page = (folder / "report.html").read_text("utf-8")
    return re.sub(r"/\*(STYLE|SCRIPT|TITLE|DATA)\*/", lambda match: parts[match[1]], page)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
