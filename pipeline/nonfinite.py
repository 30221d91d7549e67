"""What a NaN or infinity in an activation does to a calibration: an error that says where it came from, or a batch left
out."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.activations import NonFinite
    from pipeline.core.progress import Progress
    from pipeline.data import Batch

__all__ = ["NonFiniteBatches"]


class NonFiniteBatches:
    """Judges the batches of one pass.

    Args:
        model: the float model, whose weights are looked into.
        on_nonfinite: ``error``, or ``skip`` to leave such batches out with a warning.
    """

    def __init__(self, model: Path, on_nonfinite: str, progress: Progress) -> None:
        self._model = model
        self._on_nonfinite = on_nonfinite
        self._progress = progress

    @property
    def skips(self) -> bool:
        """Such batches are left out."""
        return self._on_nonfinite == "skip"

    def leave_out(self, bad: NonFinite, index: int, samples: Sequence[int], batch: Batch | None) -> None:
        """Warn that the batch is skipped, naming tensor, samples and origin.

        Args:
            index, samples: of the batch.
            batch: its data; None: it is not at hand any more.

        Raises:
            InputError: that is an error.
        """
        where = f"in batch {index} (samples {samples[0]} to {samples[-1]})"
        text = (
            f"tensor {bad.tensor!r} has {bad.nans} NaN and {bad.infs} infinite values {where}; {self._origin(batch)}"
        )
        if not self.skips:
            raise InputError(
                text, remedy="mend the data or the model, or leave such batches out with --on-nonfinite skip"
            )
        self._progress.warn(f"{text}; the batch is skipped")

    def _origin(self, batch: Batch | None) -> str:
        from pipeline.activations import nonfinite_input

        guilty = None if batch is None else nonfinite_input(batch)
        if guilty is not None:
            return f"the data of the model input {guilty!r} already holds one"
        if self._guilty_weight is not None:
            return self._guilty_weight
        return "the data is finite, so the model makes it" if batch is not None else "no weight of the model holds one"

    @cached_property
    def _guilty_weight(self) -> str | None:
        """A weight that holds a NaN or infinity, in words: looked for once, however many batches are skipped."""
        from pipeline.activations import nonfinite_weight

        return nonfinite_weight(self._model)
