"""The samples that a build verified on, found again in its data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.artifact import Manifest
    from pipeline.data.source import DataSource

__all__ = ["built_on", "verified_numbers"]


def built_on(manifest: Manifest) -> tuple[DataSource | None, str]:
    """The data of a build where they still lie at the place that was typed, with the digest of the manifest.

    Only files are opened: a callable that a manifest names is code, and runs where a user types it.

    Returns:
        The source; or None, and why.
    """
    from pipeline.data import open_source

    options = manifest.data.options
    if options is None:
        return None, ""
    if not Path(options.data).expanduser().exists():
        named = "" if Path(options.data).is_absolute() else ", seen from here"
        return None, f"the build's data, {options.data}, are not there{named}"
    try:
        source = open_source(options.data, manifest.inputs, options.preprocess)
    except InputError as error:
        return None, f"the build's data cannot be read: {error.message}"
    if source.sha256() != manifest.data.sha256:
        return None, f"the data in {options.data} are other ones than the build's"
    return source, ""


def verified_numbers(manifest: Manifest, source: DataSource, kept: Sequence[int]) -> frozenset[int] | None:
    """Numbers of the samples that the build verified on, of ``source`` with the manifest's digest.

    Args:
        kept: numbers of those in the artifact, which are the first of them.

    Returns:
        None where they cannot be told from what the manifest says.
    """
    from pipeline.data import split_source, static_batch
    from pipeline.data.parting import parted

    record, mixed = manifest.data, manifest.mixed
    unseen = mixed.get("unseen_samples", 0)
    aside = mixed["check_samples"] + unseen if unseen else record.verification_samples
    count = record.calibration_samples or None  # none calibrated a model that came with scales
    try:
        split = split_source(source, manifest.inputs, samples=count, verify=aside, labelled=False)
    except InputError:
        return None
    found = split.verification
    if unseen:
        found = parted(found, static_batch(manifest.inputs) or 1, held_aside=split.held_aside).unseen
    same = len(found) == record.verification_samples and sorted(found)[: len(kept)] == list(kept)
    return found if same else None
