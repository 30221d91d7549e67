"""Image shifts happen in pixels, whatever the preprocessing."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from pipeline.compare.images import GRADES, IMAGE_SHIFTS, coding_of_arrays, coding_of_images, image_input, shifted
from pipeline.config import PRESETS, Preprocess
from pipeline.core.errors import InputError
from pipeline.records import TensorSpec

INPUTS = (TensorSpec(name="x", dtype="float32", shape=("N", 3, 16, 16)),)
IMAGENET = Preprocess(**PRESETS["imagenet"])


def picture(seed: int = 0, layout: str = "nchw") -> np.ndarray:
    """An input in ImageNet's preprocessing, from whole pixels with some structure."""
    generator = np.random.default_rng(seed)
    ramp = np.linspace(40, 200, 16)[:, None, None] + generator.integers(-20, 20, (16, 16, 3))
    pixels = np.rint(np.clip(ramp, 0, 255)).astype(np.float32)
    values = (pixels - np.float32(IMAGENET.mean)) / np.float32(IMAGENET.std)
    return (values.transpose(2, 0, 1) if layout == "nchw" else values).astype(np.float32)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_pixels_are_the_inverse_of_preprocessing(layout: str) -> None:
    coding = coding_of_images(IMAGENET.model_copy(update={"layout": layout}), INPUTS)
    values = picture(layout=layout)
    pixels = coding.pixels(values)
    assert pixels.shape == (16, 16, 3)
    assert np.allclose(pixels, np.rint(pixels), atol=1e-4)
    assert np.allclose(coding.values(pixels, values.dtype), values, atol=1e-6)


def pixels_after(kind: str, grade: int) -> tuple[np.ndarray, np.ndarray]:
    coding = coding_of_images(IMAGENET, INPUTS)
    values = picture()
    after = shifted(values, coding, kind, grade, seed=0, sample=3)
    assert after.shape == values.shape
    assert after.dtype == values.dtype
    return coding.pixels(values), coding.pixels(after)


def test_brightness_adds_and_clips() -> None:
    before, after = pixels_after("brightness", 3)
    assert np.allclose(after, np.clip(before + 76, 0, 255), atol=1e-3)


def test_contrast_draws_towards_the_mean() -> None:
    before, after = pixels_after("contrast", 2)
    assert np.allclose(after, before.mean() + 0.5 * (before - before.mean()), atol=1e-3)


def test_blur_keeps_the_mean_and_takes_detail_away() -> None:
    before, weak = pixels_after("blur", 1)
    _, strong = pixels_after("blur", 3)
    assert abs(strong.mean() - before.mean()) < 1.0
    detail = [np.abs(np.diff(each, axis=1)).mean() for each in (before, weak, strong)]
    assert detail[0] > detail[1] > detail[2]


def test_blur_is_a_gaussian() -> None:
    coding = coding_of_arrays((TensorSpec(name="x", dtype="float32", shape=(1, 1, 224, 224)),), 0.0, 255.0)
    point = np.zeros((1, 224, 224), np.float32)
    point[0, 112, 112] = 255.0
    spread = shifted(point, coding, "blur", 2, seed=0, sample=0)[0]
    assert spread.sum() == pytest.approx(255.0, rel=1e-4)
    distance = np.arange(224) - 112
    assert (spread.sum(axis=0) * distance**2).sum() / spread.sum() == pytest.approx(4.0, rel=0.06)


def test_jpeg_is_pillows() -> None:
    before, after = pixels_after("jpeg", 2)
    stream = io.BytesIO()
    Image.fromarray(before.round().astype(np.uint8)).save(stream, "JPEG", quality=25)
    with Image.open(stream) as expected:
        assert np.allclose(after, np.asarray(expected), atol=1e-3)


def test_noise_has_its_strength_and_depends_on_the_sample_alone() -> None:
    coding = coding_of_images(IMAGENET, INPUTS)
    values = picture()
    first = shifted(values, coding, "noise", 1, seed=0, sample=3)
    assert np.array_equal(first, shifted(values, coding, "noise", 1, seed=0, sample=3))
    assert not np.array_equal(first, shifted(values, coding, "noise", 1, seed=0, sample=4))
    assert not np.array_equal(first, shifted(values, coding, "noise", 1, seed=1, sample=3))
    before, after = pixels_after("noise", 1)
    assert (after - before).std() == pytest.approx(10.0, rel=0.1)


@pytest.mark.parametrize("kind", sorted(IMAGE_SHIFTS))
def test_higher_grades_shift_more(kind: str) -> None:
    distances = []
    for grade in GRADES:
        before, after = pixels_after(kind, grade)
        assert after.min() >= -1e-3
        assert after.max() <= 255 + 1e-3
        distances.append(np.abs(after - before).mean())
    assert distances[0] < distances[1] < distances[2]


def test_arrays_are_coded_by_their_extremes() -> None:
    coding = coding_of_arrays(INPUTS, -2.0, 3.0)
    pixels = coding.pixels(np.array([-2.0, 0.5, 3.0], np.float32).reshape(3, 1, 1))
    assert np.allclose(pixels.reshape(-1), [0.0, 127.5, 255.0], atol=1e-3)


def test_grey_images_can_be_compressed() -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=("N", 1, 8, 8))
    coding = coding_of_arrays((spec,), 0.0, 1.0)
    values = np.linspace(0, 1, 64, dtype=np.float32).reshape(1, 8, 8)
    assert shifted(values, coding, "jpeg", 1, seed=0, sample=0).shape == (1, 8, 8)


def test_the_image_input_is_found_by_its_channels() -> None:
    other = TensorSpec(name="ids", dtype="int64", shape=("N", 7))
    assert image_input((other, *INPUTS)) == (INPUTS[0], "nchw")
    last = TensorSpec(name="x", dtype="float32", shape=("N", 16, 16, 1))
    assert image_input((last,)) == (last, "nhwc")
    with pytest.raises(InputError, match="image shifts need a float input of rank 4 with 1 or 3 channels"):
        image_input((other,))


def test_constant_data_cannot_stand_for_pixels() -> None:
    with pytest.raises(InputError, match="the data for 'x' are 2 throughout"):
        coding_of_arrays(INPUTS, 2.0, 2.0)
