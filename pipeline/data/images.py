"""A folder of image files as a data source, and the preprocessing of one image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import InputError
from pipeline.core.files import sha256_file, sha256_json
from pipeline.data.checking import InputCheck

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from PIL import Image

    from pipeline.config import Preprocess
    from pipeline.data.source import Sample
    from pipeline.records import Dependency, TensorSpec

__all__ = ["IMAGE_SUFFIXES", "ImageFolder", "preprocessed"]

IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"})
_MODES = {"rgb": "RGB", "bgr": "RGB", "gray": "L"}
_DEEP_MODES = ("I", "F")
"""First letter of Pillow's modes with more than 8 bits a channel; converting them to RGB clips at 255."""

_BESIDE_IMAGES = frozenset({".csv"})
"""What may lie there for another purpose, such as --labels, and is no file that was meant to be an image."""
_NAMED = 3
"""Files that a note names at most."""


def _resize(image: Image.Image, size: tuple[int, ...], interpolation: str) -> Image.Image:
    from PIL import Image

    filters = {
        "nearest": Image.Resampling.NEAREST,
        "bilinear": Image.Resampling.BILINEAR,
        "bicubic": Image.Resampling.BICUBIC,
    }
    width, height = image.size
    if len(size) == 2:
        new_height, new_width = size
    elif width <= height:
        new_width, new_height = size[0], int(size[0] * height / width)
    else:
        new_height, new_width = size[0], int(size[0] * width / height)
    if (new_width, new_height) == (width, height):
        return image
    return image.resize((new_width, new_height), filters[interpolation])


def preprocessed(image: Image.Image, steps: Preprocess, *, where: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Resize, centre crop, choose channels, (pixel - mean) / std.

    Resizing is Pillow's (with its anti-aliasing), the longer side rounded down; the crop's odd pixel goes by the rule
    of ``round``: both as torchvision does. The orientation tag of a photograph is not applied, transparency is dropped.

    Returns:
        float32, C x H x W or H x W x C by ``steps.layout``.

    Raises:
        InputError: more than 8 bits a channel, or smaller than the crop.
    """
    if image.mode.startswith(_DEEP_MODES):
        raise InputError(
            f"{where} has more than 8 bits a channel (mode {image.mode}); preprocessing is defined for 8-bit pixels",
            remedy="convert it to 8 bits, or prepare the data yourself and give .npy or file.py:callable",
        )
    image = image.convert(_MODES[steps.channels])
    if steps.resize:
        image = _resize(image, steps.resize, steps.interpolation)
    if steps.crop:
        crop_height, crop_width = steps.crop if len(steps.crop) == 2 else steps.crop * 2
        width, height = image.size
        if width < crop_width or height < crop_height:
            raise InputError(
                f"{where} is {height}x{width} (height x width){' after resizing' if steps.resize else ''}, "
                f"smaller than the crop {crop_height}x{crop_width}",
                remedy="resize first (--preprocess '...;resize=256'), crop less, or take the image out",
            )
        left, top = round((width - crop_width) / 2), round((height - crop_height) / 2)
        image = image.crop((left, top, left + crop_width, top + crop_height))
    pixels = np.asarray(image, dtype=np.float32)
    pixels = pixels[:, :, np.newaxis] if pixels.ndim == 2 else pixels
    if steps.channels == "bgr":
        pixels = pixels[:, :, ::-1]
    values = (pixels - np.asarray(steps.mean, dtype=np.float32)) / np.asarray(steps.std, dtype=np.float32)
    return np.ascontiguousarray(values.transpose(2, 0, 1) if steps.layout == "nchw" else values)


class ImageFolder:
    """Every image below a folder, sorted by relative path, preprocessed for the model's one input."""

    def __init__(self, folder: Path, inputs: Sequence[TensorSpec], preprocess: Preprocess | None) -> None:
        """List the folder and check what can be known without opening an image.

        Raises:
            InputError: no image in it, several model inputs, no preprocessing declared, or one that cannot give the
                input's channels or dtype.
        """
        if len(inputs) != 1:
            names = ", ".join(spec.name for spec in inputs)
            raise InputError(
                f"{folder} is a folder of images, and the model has {len(inputs)} inputs ({names})",
                remedy="give an .npz with one array per input, or file.py:callable that yields dicts of arrays",
            )
        if preprocess is None:
            raise InputError(
                f"{folder} is a folder of images and no preprocessing is declared",
                remedy="add --preprocess imagenet, --preprocess 'resize=256;crop=224;mean=127;std=128', "
                "or --preprocess none (pixels / 255)",
            )
        self._folder, self._steps = folder, preprocess
        files = [path for path in folder.rglob("*") if path.is_file() and not _hidden(path, folder)]
        images = sorted(
            (path for path in files if path.suffix.lower() in IMAGE_SUFFIXES), key=lambda p: p.relative_to(folder).parts
        )
        if not images:
            arrays = sum(path.suffix in (".npy", ".npz") for path in files)
            raise InputError(
                f"{folder} has no image ({', '.join(sorted(IMAGE_SUFFIXES))}) in it"
                + (f", but {arrays} .npy/.npz files" if arrays else ""),
                remedy="give one .npy or .npz file, or file.py:callable"
                if arrays
                else "give another folder with --data",
            )
        self._files = images
        self._ignored = sorted(
            path.relative_to(folder).as_posix()
            for path in set(files) - set(images)
            if path.suffix.lower() not in _BESIDE_IMAGES
        )
        self._check = InputCheck(inputs[0])
        self._check_declared()

    def _check_declared(self) -> None:
        steps, check = self._steps, self._check
        channels = 1 if steps.channels == "gray" else 3
        for field, values in (("mean", steps.mean), ("std", steps.std)):
            if len(values) not in (1, channels):
                remedy = f"give one number, or three in the order of the channels: {field}=A,B,C"
                if channels == 1:
                    average = sum(values) / len(values)
                    remedy = f"give one number for the one channel, such as their average: add {field}={average:.6g}"
                raise InputError(
                    f"preprocessing has {len(values)} values for {field} {values} "
                    f"and {channels} channel{'s' if channels > 1 else ''} ({steps.channels})",
                    remedy=remedy,
                )
        if check.shape is not None:
            if check.rank != 3:
                raise InputError(
                    f"the input {check.name!r} takes {check.expected()} a sample, which is no image",
                    remedy="give .npy, .npz or file.py:callable as --data",
                )
            self._check_channels(check.shape, channels)
            self._check_size(channels)
        if check.dtype.kind != "f" and (set(steps.mean) != {0.0} or set(steps.std) != {1.0} or check.dtype.kind == "b"):
            raise InputError(
                f"the input {check.name!r} is {check.dtype}, and preprocessing with mean {steps.mean} and "
                f"std {steps.std} gives fractions",
                remedy="add mean=0;std=1 to --preprocess to feed the pixels as they are",
            )

    def _check_channels(self, shape: tuple[int | str, ...], channels: int) -> None:
        steps = self._steps
        here, there = (shape[0], shape[2]) if steps.layout == "nchw" else (shape[2], shape[0])
        swapped = here != channels and there == channels
        if not swapped and (not isinstance(here, int) or here == channels):
            return
        if swapped:
            other, place = ("nhwc", "last") if steps.layout == "nchw" else ("nchw", "first")
            remedy = f"the model takes the channels {place}: set layout={other} in --preprocess"
        elif here in (1, 3):
            remedy = f"set channels={'gray' if here == 1 else 'rgb (or bgr)'} in --preprocess"
        else:
            remedy = "images give 3 channels (rgb, bgr) or 1 (gray): give .npy, .npz or file.py:callable as --data"
        raise InputError(
            f"preprocessing gives {channels} channel{'s' if channels > 1 else ''} ({steps.channels}, {steps.layout}), "
            f"the input {self._check.name!r} takes {self._check.expected()} a sample",
            remedy=remedy,
        )

    def _check_size(self, channels: int) -> None:
        """Where resize and crop give every image one size, before any is read."""
        steps = self._steps
        size = steps.crop * 2 if len(steps.crop) == 1 else steps.crop or steps.resize
        if len(size) != 2:
            return
        shape = (channels, *size) if steps.layout == "nchw" else (*size, channels)
        self._check.check_shape(shape, where=f"preprocessing of {self._folder}", remedy=self._remedy())

    @property
    def length(self) -> int:
        return len(self._files)

    @property
    def names(self) -> list[str]:
        return [path.relative_to(self._folder).as_posix() for path in self._files]

    @property
    def notes(self) -> list[str]:
        if not self._ignored:
            return []
        count = "1 file is no image" if len(self._ignored) == 1 else f"{len(self._ignored)} files are no images"
        named = ", ".join(self._ignored[:_NAMED]) + (", ..." if len(self._ignored) > _NAMED else "")
        return [f"{self._folder}: {count}, left out: {named}"]

    @property
    def dependencies(self) -> tuple[Dependency, ...]:
        return ()

    def count(self, limit: int | None) -> int:
        return self.length if limit is None else min(self.length, limit)

    def describe(self) -> str:
        return f"{len(self._files)} images in {self._folder}"

    def key(self) -> str:
        stats = [(name, path.stat()) for name, path in zip(self.names, self._files, strict=True)]
        return sha256_json(
            {
                "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
                "preprocess": self._steps.model_dump(mode="json"),
                "kind": "images",
            }
        )

    def sha256(self) -> str:
        return sha256_json([[name, sha256_file(path)] for name, path in zip(self.names, self._files, strict=True)])

    def read(self, wanted: Callable[[int], bool]) -> Iterator[tuple[int, Sample]]:
        for number, path in enumerate(self._files):
            if wanted(number):
                yield number, {self._check.name: self._load(path)}

    def _load(self, path: Path) -> np.ndarray[Any, np.dtype[Any]]:
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(path) as image:
                image.load()
                values = preprocessed(image, self._steps, where=str(path))
        except InputError:
            raise
        except (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise InputError(
                f"image {path} cannot be read: {error}",
                remedy="it may be truncated or no image at all: repair it or take it out",
            ) from error
        self._check.check_shape(
            values.shape,
            where=str(path),
            remedy=self._remedy(),
        )
        if self._check.dtype.kind in "iu":
            return values.astype(self._check.dtype)
        return self._check.convert(values, where=str(path))

    def _remedy(self) -> str:
        return "set resize and crop in --preprocess so that every image gets the model's size" + self._size()

    def _size(self) -> str:
        """``, such as 'resize=224x224'``; nothing where the model leaves height or width open."""
        shape = self._check.shape or ()
        size = shape[1:] if self._steps.layout == "nchw" else shape[:2]
        if len(size) != 2 or not all(isinstance(dim, int) for dim in size):
            return ""
        return f", such as 'resize={size[0]}x{size[1]}'"


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)
