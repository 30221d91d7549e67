"""What every data source offers: a stream of samples, described and hashed."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pipeline.records import Dependency

__all__ = ["DataSource", "Sample", "sample_digest"]

Sample: TypeAlias = "dict[str, np.ndarray[Any, np.dtype[Any]]]"
"""Model input name to array, without the batch axis."""


class DataSource(Protocol):
    """Samples in a fixed order, numbered from 0, already in the shapes and dtypes of the model's inputs.

    A source holds no data: every :meth:`read` is a new pass, and two passes give the same samples.
    """

    @property
    def length(self) -> int | None:
        """Number of samples; None when only a pass can tell."""

    @property
    def names(self) -> list[str] | None:
        """File name of each sample, relative to the folder with ``/``; None where samples have only a number."""

    @property
    def notes(self) -> list[str]:
        """What the user should know about the data, such as a cast; may grow during :meth:`read`."""

    @property
    def dependencies(self) -> tuple[Dependency, ...]:
        """Files the data came from that :meth:`key` does not cover: what a user's callable opened so far."""

    def describe(self) -> str:
        """One line for people."""

    def key(self) -> str:
        """Cheap key for caching, from sizes and modification times: changes whenever the data may have changed."""

    def sha256(self) -> str:
        """Hash of the content, for the manifest; independent of where the data lies."""

    def count(self, limit: int | None) -> int:
        """Number of samples, at most ``limit``: a pass without decoding where :attr:`length` is None."""

    def read(self, wanted: Callable[[int], bool]) -> Iterator[tuple[int, Sample]]:
        """Number and arrays of each sample for which ``wanted(number)`` is true, in order.

        ``wanted`` may be asked some numbers ahead, each number once and in order.

        Raises:
            InputError: a sample is unreadable, does not fit the model's inputs or holds NaN or infinity.
        """


def sample_digest(sample: Sample) -> str:
    """SHA-256 over the arrays of one sample: names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(sample):
        array = sample[name]
        digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
