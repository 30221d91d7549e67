"""What messages say beside the fault itself."""

from __future__ import annotations

import pytest

from pipeline.core.errors import did_you_mean


@pytest.mark.parametrize(
    ("name", "known", "text"),
    [
        ("entopy", ["mse", "entropy"], "did you mean 'entropy'? known: entropy, mse"),
        ("q", ["mse", "entropy"], "known: entropy, mse"),
        ("q", [], "none is known"),
    ],
)
def test_did_you_mean(name: str, known: list[str], text: str) -> None:
    assert did_you_mean(name, known) == text


def test_a_network_of_tensors_is_not_listed_whole() -> None:
    text = did_you_mean("tensor_77", [f"tensor_{number:03}" for number in range(100)])
    assert text.startswith("did you mean 'tensor_077'? known: tensor_000, ")
    assert text.endswith("tensor_039 and 60 more")
