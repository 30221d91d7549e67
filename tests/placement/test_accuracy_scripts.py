"""What scripts/accuracy.py measures with, and the table row of scripts/rtx_int8_layers.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scripts import accuracy, rtx_int8_layers


@pytest.mark.parametrize(
    ("a", "b", "edits"), [("", "abc", 3), ("kitten", "sitting", 3), ("same", "same", 0), ("a b", "ab", 1)]
)
def test_distance(a: str, b: str, edits: int) -> None:
    assert accuracy.distance(a, b) == accuracy.distance(b, a) == edits


def test_agreement_with_and_without_white_space() -> None:
    assert accuracy.agreement(["one two", "xyz"], ["onetwo", "xyZ"]) == "80.00 % (88.89 % without white space)"


def test_sentences_are_enough_and_plain() -> None:
    found = accuracy.sentences()
    assert len(found) == len(set(found)) >= accuracy.CALIBRATION + accuracy.SENTENCES
    assert all(6 <= len(text.split()) <= 40 and text[-1] in ".!?" for text in found)


@pytest.mark.parametrize("scale", accuracy.SCALES)
def test_pages_are_the_same_every_time(scale: int) -> None:
    pytest.importorskip("matplotlib")
    texts = ["The quick brown fox jumps over the lazy dog.", "Pack my box with five dozen liquor jugs today."]
    image, text = accuracy.page(3, texts, scale)
    again, same = accuracy.page(3, texts, scale)
    assert image.shape == (480 * scale, 640 * scale, 3)
    assert np.array_equal(image, again)
    assert text == same
    assert len(text.split("\n")) >= 8
    lines = " ".join(text.split("\n"))
    assert lines.startswith(texts[(3 * 37) % 2])


def test_row_of_the_rtx_table(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    cells = [cell.strip() for cell in rtx_int8_layers.zoo_row("lstm", tmp_path, equalised=False).split("|")[1:-1]]
    assert cells[:6] == ["lstm", "2", "none", "2", "2", "none"]
    assert 1.0 < float(cells[6]) < 10.0
