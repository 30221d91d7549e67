"""Image shifts: what deployed cameras do to pictures, applied to model inputs at graded strengths.

An input is turned back into pixels 0..255, shifted there, and turned into an input again. For a folder of images the
declared preprocessing is inverted exactly; for arrays the smallest and largest value of the calibration data stand for
0 and 255.

=============  ====================================================  =================================
shift          what it does                                          strengths of grades 1, 2, 3
=============  ====================================================  =================================
brightness     adds a constant                                       25, 51, 76 grey levels
contrast       draws pixels towards the image's mean                 to 75, 50, 25 %
blur           Gaussian blur; small images at least as 67 pixels     sigma 1, 2, 3 pixels per 224
jpeg           JPEG compression and decompression                    quality 50, 25, 10
noise          adds Gaussian noise, the same for every evaluation    10, 20, 40 grey levels
=============  ====================================================  =================================

Pixels are clipped to 0..255 afterwards; they are rounded only where JPEG needs it.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from pipeline.compare.noise import fill_noise, noise_key
from pipeline.core.errors import InputError
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.config import Preprocess
    from pipeline.records import TensorSpec

__all__ = ["GRADES", "IMAGE_SHIFTS", "PixelCoding", "coding_of_arrays", "coding_of_images", "image_input", "shifted"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

GRADES: Final = (1, 2, 3)
IMAGE_SHIFTS: Final[Mapping[str, tuple[float, ...]]] = {
    "brightness": (25.0, 51.0, 76.0),
    "contrast": (0.75, 0.5, 0.25),
    "blur": (1.0, 2.0, 3.0),
    "jpeg": (50.0, 25.0, 10.0),
    "noise": (10.0, 20.0, 40.0),
}
_CHANNELS: Final = (1, 3)
_BLUR_REFERENCE_PIXELS: Final = 224
_BLUR_LEAST_RATIO: Final = 0.3


class PixelCoding(Record):
    """How an image input codes pixels: input = (pixel - mean) / std, channel by channel."""

    input: str
    layout: Literal["nchw", "nhwc"]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def pixels(self, values: Array) -> np.ndarray[Any, np.dtype[np.float32]]:
        """One sample as H x W x C pixels, float32."""
        image = values.transpose(1, 2, 0) if self.layout == "nchw" else values
        return (image * np.asarray(self.std, np.float32) + np.asarray(self.mean, np.float32)).astype(np.float32)

    def values(self, pixels: np.ndarray[Any, np.dtype[np.float32]], dtype: np.dtype[Any]) -> Array:
        """The input's values of a sample, the inverse of :meth:`pixels`."""
        image = (pixels - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)
        return np.ascontiguousarray(image.transpose(2, 0, 1) if self.layout == "nchw" else image).astype(dtype)


def image_input(inputs: Sequence[TensorSpec]) -> tuple[TensorSpec, Literal["nchw", "nhwc"]]:
    """The input that takes images, and its layout.

    Raises:
        InputError: no floating-point input of rank 4 has 1 or 3 channels.
    """
    for spec in inputs:
        if spec.shape is not None and len(spec.shape) == 4 and spec.dtype.startswith("float"):
            if spec.shape[1] in _CHANNELS:
                return spec, "nchw"
            if spec.shape[3] in _CHANNELS:
                return spec, "nhwc"
    shapes = ", ".join(f"{spec.name!r} {spec.shape} {spec.dtype}" for spec in inputs)
    raise InputError(
        f"image shifts need a float input of rank 4 with 1 or 3 channels; the model has {shapes}",
        remedy="leave --shift-images out for this model",
    )


def coding_of_images(preprocess: Preprocess, inputs: Sequence[TensorSpec]) -> PixelCoding:
    """From the declared preprocessing. The order of the channels (rgb or bgr) makes no difference to the shifts."""
    return PixelCoding(input=inputs[0].name, layout=preprocess.layout, mean=preprocess.mean, std=preprocess.std)


def coding_of_arrays(inputs: Sequence[TensorSpec], low: float, high: float) -> PixelCoding:
    """From the extremes of the calibration data: ``low`` is pixel 0, ``high`` pixel 255.

    Raises:
        InputError: no image input, or constant data.
    """
    spec, layout = image_input(inputs)
    if not low < high:
        raise InputError(
            f"the data for {spec.name!r} are {low:g} throughout: they have no range that could stand for pixels"
        )
    std = 255.0 / (high - low)
    return PixelCoding(input=spec.name, layout=layout, mean=(-low * std,), std=(std,))


def shifted(values: Array, coding: PixelCoding, kind: str, grade: int, *, seed: int, sample: int) -> Array:
    """One sample (without batch axis) of the image input, shifted.

    Args:
        kind: a key of :data:`IMAGE_SHIFTS`.
        grade: 1, 2 or 3.
        seed, sample: key of the noise.
    """
    pixels = coding.pixels(values)
    strength = IMAGE_SHIFTS[kind][grade - 1]
    if kind == "brightness":
        pixels = pixels + np.float32(strength)
    elif kind == "contrast":
        mean = np.float32(pixels.mean(dtype=np.float64))
        pixels = mean + (pixels - mean) * np.float32(strength)
    elif kind == "blur":
        ratio = min(pixels.shape[:2]) / _BLUR_REFERENCE_PIXELS
        pixels = _blurred(pixels, strength * max(ratio, _BLUR_LEAST_RATIO))
    elif kind == "jpeg":
        pixels = _compressed(pixels, int(strength))
    else:
        noise = np.empty(pixels.shape, np.float32)
        fill_noise(noise, noise_key("image noise", seed, sample), strength)
        pixels = pixels + noise
    return coding.values(np.clip(pixels, 0.0, 255.0, dtype=np.float32), values.dtype)


def _blurred(pixels: np.ndarray[Any, np.dtype[np.float32]], sigma: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Separable Gaussian, cut off at 3 sigma, edges repeated."""
    radius = max(1, int(np.ceil(3.0 * sigma)))
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    weights = (weights / weights.sum()).astype(np.float32)
    for axis in (0, 1):
        padding = [(radius, radius) if each == axis else (0, 0) for each in range(3)]
        padded = np.pad(pixels, padding, mode="edge")
        length = pixels.shape[axis]
        total = np.zeros_like(pixels)
        for tap, weight in enumerate(weights):
            part = padded[tap : tap + length] if axis == 0 else padded[:, tap : tap + length]
            total += weight * part
        pixels = total
    return pixels


def _compressed(pixels: np.ndarray[Any, np.dtype[np.float32]], quality: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    from PIL import Image

    bytes_ = np.rint(np.clip(pixels, 0.0, 255.0)).astype(np.uint8)
    image = Image.fromarray(bytes_[:, :, 0]) if bytes_.shape[2] == 1 else Image.fromarray(bytes_)
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=quality)
    with Image.open(stream) as opened:
        result = np.asarray(opened, np.float32)
    return np.asarray(result.reshape(pixels.shape), np.float32)
