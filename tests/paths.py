"""Where data outside the repository lies. A fresh clone has none of it: tests that need it skip and say so."""

from __future__ import annotations

from pathlib import Path

SHARED = Path(__file__).resolve().parents[2] / "shared"
IMAGENET500 = SHARED / "data" / "imagenet500"
