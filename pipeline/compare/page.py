"""``compare.html``: the experiment as one page that needs no network."""

from __future__ import annotations

import base64
from html import escape
from typing import TYPE_CHECKING, Any, Final

from pipeline.compare.shifts import ACTIVATIONS, CLEAN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.compare.measured import Score
    from pipeline.compare.recommend import Comparison
    from pipeline.compare.records import Outcome

    Row = Mapping[str, Any]

__all__ = ["page"]

_STYLE: Final = """
:root { color-scheme: light }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd }
.advice { background: #eef5ee; border-left: 4px solid #4a8f4a; padding: .6rem 1rem }
.advice b { font-size: 1.15rem }
table { border-collapse: collapse; font-size: 13px; margin: .8rem 0 }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #e4e4e4; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
th { background: #f6f6f6; vertical-align: bottom; white-space: normal } .wide { overflow-x: auto }
table.sortable th { cursor: pointer } tr.chosen { background: #eef5ee; font-weight: 600 }
small, .note { color: #666; font-weight: 400 } img { max-width: 100%; height: auto }
code { font-size: 13px; overflow-wrap: anywhere } details { margin: .8rem 0 }
@media print { body { margin: 0; max-width: none } h2, img, table { break-inside: avoid } }
"""
_SCRIPT: Final = """
document.querySelectorAll("table.sortable th").forEach(function (head) {
  head.addEventListener("click", function () {
    var body = head.closest("table").tBodies[0], column = head.cellIndex, rows = Array.from(body.rows);
    var up = head.dataset.up !== "1"; head.dataset.up = up ? "1" : "0";
    function key(row) {
      var cell = row.cells[column], v = cell.dataset.v; return v === undefined ? cell.textContent : Number(v);
    }
    rows.sort(function (a, b) { var x = key(a), y = key(b); return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1) });
    rows.forEach(function (row) { body.appendChild(row) });
  });
});
"""


def page(outcome: Outcome, pictures: Mapping[str, bytes]) -> str:
    """The whole page; ``pictures`` are the PNGs by name."""
    document = outcome.document
    parts = [
        f"<h1>Calibrators compared: {escape(document['model']['spec'])}</h1>",
        f"<p>{escape(document['data']['spec'])}; {len(document['data']['calibration_samples'])} samples calibrate, "
        f"{outcome.samples} held aside are measured.</p>",
        _advice(outcome),
        "<h2>Without shift</h2>",
        _clean_table(outcome),
        _picture(pictures, "scatter", "Score against SQNR at the outputs, with 95 % bootstrap intervals."),
    ]
    kinds = dict.fromkeys(row["shift"] for row in outcome.table if row["shift"] != CLEAN.kind)
    for kind in kinds:
        title = "Noise on the outputs of the activation layers" if kind == ACTIVATIONS else f"Images: {kind}"
        parts += [
            f"<h2>{escape(title)}</h2>",
            _shift_table(outcome, kind),
            _picture(pictures, f"shift-{kind}", "Bands are 95 % bootstrap intervals over the samples."),
        ]
    if "sizes" in pictures:
        parts += [
            "<h2>How many calibration samples</h2>",
            _picture(pictures, "sizes", "Mean over the subsets; the band goes from the worst subset to the best."),
        ]
    if "layers" in pictures:
        parts += [
            "<h2>Layers</h2>",
            _picture(
                pictures, "layers", f"On {document['layers']['samples']} of the samples, accumulated from the input on."
            ),
        ]
    parts.append(_record(outcome))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Calibrators compared</title><style>{_STYLE}</style></head><body>"
        + "\n".join(parts)
        + f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _advice(outcome: Outcome) -> str:
    advice = outcome.recommendation
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in advice.reasons)
    return f'<div class="advice">Take <b>{escape(advice.calibrator)}</b>.<ul>{reasons}</ul></div>'


def _picture(pictures: Mapping[str, bytes], name: str, caption: str) -> str:
    if name not in pictures:
        return ""
    data = base64.b64encode(pictures[name]).decode()
    return (
        f'<figure><img alt="{escape(name)}" src="data:image/png;base64,{data}">'
        f'<figcaption class="note">{escape(caption)}</figcaption></figure>'
    )


def _cell(value: float | None, text: str, extra: str = "") -> str:
    if value is None:
        return "<td>-</td>"
    small = f"<br><small>{escape(extra)}</small>" if extra else ""
    return f'<td data-v="{value!r}">{escape(text)}{small}</td>'


def _interval(row: Row, figure: str, score: Score) -> str:
    """A cell for the score or a drop of it, with its interval."""
    value, low, high = (row[f"{figure}{end}"] for end in ("", "_low", "_high"))
    if value is None:
        return "<td>-</td>"
    text, low_text, high_text = (_number(each, score) for each in (value, low, high))
    return _cell(value, text, f"{low_text} to {high_text}")


def _number(value: float, score: Score) -> str:
    if not score.percent:
        return f"{value:.4g}"
    return f"{round(100.0 * value, 2) + 0.0:.2f}"  # + 0.0: no minus in front of 0.00


def _clean_table(outcome: Outcome) -> str:
    score, advice = outcome.score, outcome.recommendation
    comparisons = {item.calibrator: item for item in advice.comparisons}
    rows = [row for row in outcome.table if row["shift"] == CLEAN.kind and row["calibration_subset"] is None]
    unit = ", %" if score.percent else ""
    heads = (
        "calibrator", f"{score.name}{unit}", "against the best", "top-5, %", "agreement with FP32, %",
        "relative L2 at the outputs", "SQNR, dB", "clipped, %", "worst layer",
    )  # fmt: skip
    body = []
    for row in rows:
        worst = row["worst_layer"]
        cells = [
            f"<td>{escape(row['calibrator'])}</td>",
            _interval(row, score.figure, score),
            _verdict(outcome, row, comparisons),
            _share(row["top5"]),
            _share(row["agreement"]),
            _cell(row["relative_l2"], f"{row['relative_l2']:.4f}") if row["relative_l2"] is not None else "<td>-</td>",
            _cell(row["sqnr_db"], f"{row['sqnr_db']:.1f}") if row["sqnr_db"] is not None else "<td>-</td>",
            _share(row["clipping_share"], 4),
            _cell(row["worst_layer_relative_l2"], f"{row['worst_layer_relative_l2']:.3f}", _end(worst))
            if worst
            else "<td>-</td>",
        ]
        chosen = ' class="chosen"' if row["calibrator"] == advice.calibrator else ""
        body.append(f"<tr{chosen}>{''.join(cells)}</tr>")
    return _table(heads, body, sortable=True)


def _end(name: str, most: int = 40) -> str:
    """The end of a long name, which tells layers apart."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _share(value: float | None, digits: int = 2) -> str:
    return "<td>-</td>" if value is None else _cell(value, f"{100 * value:.{digits}f}")


def _verdict(outcome: Outcome, row: Row, comparisons: Mapping[str, Comparison]) -> str:
    label = row["calibrator"]
    if label == outcome.recommendation.best:
        return _cell(0.0, "best")
    item = comparisons.get(label)
    if item is None:
        return "<td>-</td>"
    if item.same_graph:
        return _cell(0.0, "same graph")
    if item.tied:
        return _cell(0.0, "exactly as good")
    text = outcome.score.text_of_difference(item.difference)
    verdict = f"{text} worse" if item.told_apart else "cannot be told apart"
    extra = text if not item.told_apart else ""
    if item.samples_needed is not None:
        extra = f"{text}; would need about {item.samples_needed} samples"
    return _cell(item.difference, verdict, extra)


def _shift_table(outcome: Outcome, kind: str) -> str:
    score = outcome.score
    strengths = sorted({row["strength"] for row in outcome.table if row["shift"] == kind})
    figures = ("drop_from_clean", "drop_from_shifted") if score.own else ("drop_from_shifted",)
    names = {"drop_from_clean": "drop from clean FP32", "drop_from_shifted": "drop from FP32 under the same shift"}
    unit = ", points" if score.percent else ""
    parts = []
    for figure in figures:
        body = []
        for item in (outcome.fp32, *outcome.measured):
            by_strength = {
                row["strength"]: row
                for row in outcome.table
                if row["calibrator"] == item.label and row["shift"] == kind and row["calibration_subset"] is None
            }
            cells = "".join(
                _interval(by_strength[strength], figure, score) if strength in by_strength else "<td>-</td>"
                for strength in strengths
            )
            body.append(f"<tr><td>{escape(item.label)}</td>{cells}</tr>")
        heads = ("calibrator", *(f"{strength:g}" for strength in strengths))
        parts.append(f"<p>{escape(score.name)}: {names[figure]}{unit}</p>" + _table(heads, body, sortable=True))
    return "".join(parts)


def _table(heads: Sequence[str], body: Sequence[str], *, sortable: bool) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    kind = ' class="sortable"' if sortable else ""
    return f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _record(outcome: Outcome) -> str:
    document = outcome.document
    tools = ", ".join(f"{name} {version}" for name, version in sorted(document["tools"].items()))
    bootstrap = document["bootstrap"]
    lines = [
        f"<p>Command: <code>{escape(document['command'] or 'called from Python')}</code></p>",
        f"<p>Model SHA-256 <code>{document['model']['sha256']}</code>, "
        f"data SHA-256 <code>{document['data']['sha256']}</code></p>",
        f"<p>Seed {document['seeds']['experiment']}, {document['seeds']['shift_draws']} draws of the noise, "
        f"{bootstrap['resamples']} bootstrap resamples; intervals of differences from the best are simultaneous.</p>",
        f"<p>{escape(tools)}; made {escape(document['created'])}</p>",
    ]
    return "<h2>How it was measured</h2>" + "".join(lines)
