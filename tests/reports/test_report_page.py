"""The HTML report in a real browser."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image

from pipeline.reports.content import ReportContent, report_data
from pipeline.reports.html import report_html
from tests.reports.browser import CHROMIUM, WHY_NOT, Browser
from tests.reports.tables import made_up_table

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)

CONTENT = ReportContent(
    title="network </script><script>alert(1)</script> /*DATA*/",
    subtitle="made up",
    facts=[("Top-1 FP32", "71.0 %"), ("Top-1 INT8", "70.5 %")],
    notes=["a note with <b>no</b> markup"],
    sections=[
        {
            "title": "Further table",
            "text": "by hand",
            "columns": ["what", "value"],
            "rows": [["one", 1.5], ["two", None]],
        }
    ],
)


def _page(tmp_path, table, content=CONTENT):
    path = tmp_path / "report.html"
    path.write_text(report_html(report_data(table, content)), encoding="utf-8")
    return path


def test_page_is_self_contained(tmp_path):
    text = _page(tmp_path, made_up_table()).read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", text)
    assert not re.search(r"@import|url\(", text)
    assert text.count("</script>") == 2  # the data's own closing tags are escaped
    assert "/*STYLE*/" not in text
    assert "/*SCRIPT*/" not in text


def test_same_table_gives_the_same_page(tmp_path):
    first = report_html(report_data(made_up_table(), CONTENT))
    assert first == report_html(report_data(made_up_table(), CONTENT))


@needs_browser
def test_search_sort_and_click(tmp_path):
    page = _page(tmp_path, made_up_table(300, 64, engine=True))
    rows = "document.querySelectorAll('#layers-table tbody tr').length"
    first = "document.querySelector('#layers-table tbody tr td.name').textContent"
    with Browser() as browser:
        browser.open(page)
        assert browser.value("document.querySelector('h1').textContent") == CONTENT.title
        assert browser.value("document.querySelector('#notes li').textContent") == CONTENT.notes[0]
        assert browser.value(rows) == 300
        # Sorted by local error, the largest first: the layer made ten times worse than the others.
        browser.click("th[data-key=local] span")
        assert browser.value(first) == "/encoder/layers.1/add/Add"
        assert browser.value("document.querySelector('th[data-key=local]').getAttribute('aria-sort')") == "descending"
        browser.click("th[data-key=local] span")
        assert browser.value("document.querySelector('th[data-key=local]').getAttribute('aria-sort')") == "ascending"
        assert browser.value(first) != "/encoder/layers.1/add/Add"
        # Search by name and cause together.
        browser.click("#search")
        browser.write("layers.1/ clipping")
        assert browser.value(rows) == 1
        assert browser.value("document.querySelector('#count').textContent") == "1 of 300 layers"
        # A click on the row opens its histogram and its neighbours; a click on a neighbour goes there.
        browser.click("#layers-table tbody tr")
        assert browser.value("document.querySelector('#detail').hidden") is False
        assert browser.value("document.querySelector('#detail h2').textContent") == "/encoder/layers.1/add/Add"
        assert browser.value("document.querySelectorAll('#detail .histogram svg rect').length") > 50
        assert (
            browser.value("document.querySelectorAll('#detail .histogram svg line[stroke-dasharray=\"4 3\"]').length")
            == 3
        )
        assert browser.value("[...document.querySelectorAll('#detail .graph .node')].map((n) => n.dataset.layer)") == [
            "4",
            "5",
            "6",
        ]
        browser.click("#detail .graph .node[data-layer='6'] rect")
        assert browser.value("document.querySelector('#detail h2').textContent") == "/encoder/layers.2/conv/Conv"
        assert browser.value("location.hash") == "#layer=6"
        browser.click("#detail .close")
        assert browser.value("document.querySelector('#detail').hidden") is True
        # The chart and the map lead to layers as well.
        browser.click("#along-chart .hit[data-layer='17']")
        assert browser.value("document.querySelector('#detail h2').textContent") == "/encoder/layers.5/add/Add"
        assert browser.problems == []
        assert [url for url in browser.requests if not url.startswith("file:")] == []


@needs_browser
def test_fused_tensors_say_so(tmp_path):
    with Browser() as browser:
        browser.open(_page(tmp_path, made_up_table(engine=True)))
        cells = "[...document.querySelectorAll('#layers-table tbody tr')].map((row) => row.children[15].textContent)"
        found = browser.value(cells)
        assert found[0] == "fused"
        assert re.fullmatch(r"[\d.e+-]+", found[1])
        browser.click("#layers-table tbody tr")
        assert "fused: the engine cannot show it" in browser.value("document.querySelector('#detail').textContent")


@needs_browser
def test_one_layer_and_no_calibrators(tmp_path):
    with Browser() as browser:
        browser.open(_page(tmp_path, made_up_table(1, 1, calibrators=0)))
        assert browser.value("document.querySelector('#calibrators').hidden") is True
        assert browser.value("document.querySelectorAll('#layers-table tbody tr').length") == 1
        assert browser.problems == []


@needs_browser
@pytest.mark.parametrize("layers", [20, 300])
def test_screenshot_has_content_everywhere_it_should(tmp_path, layers):
    with Browser(1600, 1000) as browser:
        browser.open(_page(tmp_path, made_up_table(layers, 64)))
        browser.screenshot(tmp_path / "top.png")
        shot = np.asarray(Image.open(tmp_path / "top.png").convert("RGB")).astype(int)
        assert shot.shape == (1000, 1600, 3)
        assert (shot.reshape(-1, 3) == 255).all(axis=1).mean() < 0.95  # not an empty page
        wide = browser.value("document.documentElement.scrollWidth")
        assert wide <= 1600  # nothing runs out of the page
        # The map shows the colours of the scale: the worst layer's row is red, and no cell is unpainted.
        pixels = browser.value(
            "(() => { const c = document.getElementById('samples-map'); const g = c.getContext('2d');"
            " const line = g.getImageData(620, 0, 1, c.height - 40).data; const out = [];"
            " for (let i = 0; i < line.length; i += 4) out.push([line[i], line[i + 1], line[i + 2]]); return out; })()"
        )
        colours = np.array(pixels)
        assert (colours[:, 0] > 160).mean() > 0.5
        assert len(np.unique(colours, axis=0)) > 5


@needs_browser
def test_prints_every_layer(tmp_path):
    pdf_pages = {}
    with Browser() as browser:
        for layers in (20, 300):
            browser.open(_page(tmp_path, made_up_table(layers, 32)))
            pdf = browser.pdf()
            assert pdf.startswith(b"%PDF")
            pdf_pages[layers] = len(re.findall(rb"/Type\s*/Page\b(?!s)", pdf))
    assert pdf_pages[20] < 9
    assert pdf_pages[300] > pdf_pages[20] + 5  # the table is not cut off at its scroll box
