"""Data for a finished artifact: the preprocessing its manifest records is applied and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.artifact import CalibrationRecord, DataOptions, DataRecord, Manifest, SourceRecord
from pipeline.config import Preprocess
from pipeline.core.errors import InputError
from pipeline.core.progress import SilentProgress
from pipeline.data import open_again
from pipeline.records import TensorSpec


class Listening(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def manifest(options: DataOptions | None) -> Manifest:
    return Manifest(
        name="net",
        created="now",
        tools={},
        source=SourceRecord(kind="onnx", spec="net.onnx", sha256="a"),
        data=DataRecord(
            spec="data.npy",
            sha256="b",
            calibration_samples=8,
            verification_samples=2,
            held_aside=True,
            options=options,
        ),
        calibration=CalibrationRecord(calibrator="entropy", params={}, batches=1, skipped_batches=0, tensors=1),
        inputs=(TensorSpec(name="x", shape=("N", 3, 4, 4), dtype="float32"),),
        outputs=(),
        profiles=(),
    )


def options(preprocess: Preprocess | None) -> DataOptions:
    return DataOptions(data="data", preprocess=preprocess, batch_size=8, on_nonfinite="error")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        Image.new("RGB", (4, 4), (10 * number, 20, 30)).save(tmp_path / f"{number}.png")
    return tmp_path


def test_images_are_preprocessed_as_in_the_build(folder: Path) -> None:
    steps = Preprocess(mean=(10.0,), std=(2.0,), channels="bgr")
    progress = Listening()
    source = open_again(manifest(options(steps)), str(folder), progress=progress)
    (_, first), *_ = source.read(lambda number: True)
    assert np.array_equal(first["x"][:, 0, 0], [10.0, 5.0, -5.0])
    assert progress.notes == [
        "images are preprocessed as in the build: interpolation=bilinear;channels=bgr;mean=10.0;std=2.0;layout=nchw"
    ]


def test_what_is_given_goes_before_what_is_recorded(folder: Path) -> None:
    progress = Listening()
    source = open_again(manifest(options(Preprocess())), str(folder), Preprocess(std=(1.0,)), progress=progress)
    (_, first), *_ = source.read(lambda number: True)
    assert np.array_equal(first["x"][:, 0, 0], [0.0, 20.0, 30.0])
    assert progress.notes == []


@pytest.mark.parametrize(
    ("recorded", "reason"),
    [
        (None, "its manifest does not say how images are preprocessed: an earlier version wrote it"),
        (options(None), r"it was built on arrays \(data\.npy\), so it knows no preprocessing of images"),
    ],
)
def test_images_without_a_record_need_the_preprocessing(
    folder: Path, recorded: DataOptions | None, reason: str
) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        open_again(manifest(recorded), str(folder))
    assert caught.value.remedy == "give --preprocess as in the build ('none' is pixels / 255)"


def test_arrays_need_no_record(tmp_path: Path) -> None:
    np.save(tmp_path / "data.npy", np.zeros((5, 3, 4, 4), np.float32))
    for recorded in (None, options(Preprocess())):
        assert open_again(manifest(recorded), str(tmp_path / "data.npy")).length == 5


@pytest.mark.parametrize(
    "steps",
    [Preprocess(), Preprocess.model_validate("imagenet;crop=288x256;channels=bgr;std=58.395,57.12,57.375")],
)
def test_the_text_of_a_preprocessing_gives_it_back(steps: Any) -> None:
    assert Preprocess.model_validate(str(steps)) == steps
    record = options(steps)
    assert DataOptions.model_validate_json(record.model_dump_json()) == record
