from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from pipeline.config import Preprocess
from pipeline.core.errors import InputError
from pipeline.data import open_source
from pipeline.data.images import preprocessed
from pipeline.records import TensorSpec
from tests.data.specs import IDS, IMAGE, MASK, everything
from tests.paths import IMAGENET500

RAW = Preprocess.model_validate("mean=0;std=1")


def _pixels(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def _save(path, height: int = 8, width: int = 8) -> np.ndarray:
    pixels = _pixels(height, width)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return pixels


def test_folder_is_read_recursively_in_a_fixed_order(tmp_path) -> None:
    for name in ("b/2.png", "b/10.png", "a/x.bmp", "c.webp", ".hidden/y.png", "notes.txt"):
        if name.endswith("txt"):
            (tmp_path / name).write_text("x")
        else:
            _save(tmp_path / name)
    source = open_source(str(tmp_path), [IMAGE], RAW)
    assert source.names == ["a/x.bmp", "b/10.png", "b/2.png", "c.webp"]
    assert source.length == source.count(None) == 4
    assert source.count(3) == 3
    assert source.notes == [f"{tmp_path}: 1 file is no image, left out: notes.txt"]
    assert source.describe() == f"4 images in {tmp_path}"
    assert [number for number, _ in source.read(lambda n: n in (1, 3))] == [1, 3]


def test_labels_beside_the_images_are_no_strange_file(tmp_path) -> None:
    _save(tmp_path / "a.png")
    (tmp_path / "labels.csv").write_text("file,class_index\na.png,1\n")
    assert open_source(str(tmp_path), [IMAGE], RAW).notes == []
    (tmp_path / "a.heic").write_text("x")
    assert open_source(str(tmp_path), [IMAGE], RAW).notes == [f"{tmp_path}: 1 file is no image, left out: a.heic"]


def test_the_first_files_that_are_no_images_are_named(tmp_path) -> None:
    _save(tmp_path / "a.png")
    for name in ("d.xml", "b/x.txt", "c.json", "e.npy"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (note,) = open_source(str(tmp_path), [IMAGE], RAW).notes
    assert note == f"{tmp_path}: 4 files are no images, left out: b/x.txt, c.json, d.xml, ..."


def test_values_layout_and_channel_order(tmp_path) -> None:
    pixels = _save(tmp_path / "a.png")
    ((_, sample),) = open_source(str(tmp_path), [IMAGE], RAW).read(everything)
    np.testing.assert_array_equal(sample["x"], pixels.transpose(2, 0, 1).astype(np.float32))
    image = Image.fromarray(pixels)
    steps = Preprocess(channels="bgr", layout="nhwc", mean=(1.0, 2.0, 3.0), std=(2.0, 4.0, 8.0))
    found = preprocessed(image, steps, where="a")
    np.testing.assert_allclose(found, (pixels[:, :, ::-1] - np.float32([1, 2, 3])) / np.float32([2, 4, 8]), rtol=1e-6)
    gray = preprocessed(image, Preprocess(channels="gray"), where="a")
    assert gray.shape == (1, 8, 8)


def test_bgr_with_a_preset_is_the_rgb_tensor_with_its_channels_reversed() -> None:
    from skimage import data

    photograph = Image.fromarray(data.astronaut())
    rgb = preprocessed(photograph, Preprocess.model_validate("imagenet"), where="a")
    bgr = preprocessed(photograph, Preprocess.model_validate("imagenet;channels=bgr"), where="a")
    np.testing.assert_array_equal(bgr, rgb[::-1])
    typed = "mean=123.675,116.28,103.53;std=58.395,57.12,57.375;channels=bgr"
    as_fed = preprocessed(photograph, Preprocess.model_validate("resize=256;crop=224;" + typed), where="a")
    blue = bgr[0] * np.float32(57.375) + np.float32(103.53)
    np.testing.assert_allclose(as_fed[0], (blue - np.float32(123.675)) / np.float32(58.395), rtol=1e-4, atol=1e-5)


def test_efficientnet_lite_preset() -> None:
    pixels = _pixels(256, 256)
    found = preprocessed(Image.fromarray(pixels), Preprocess.model_validate("efficientnet-lite"), where="a")
    expected = (pixels[16:240, 16:240].astype(np.float32) - 127) / 128
    np.testing.assert_array_equal(found, expected.transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("size", "resize", "expected"),
    [
        ((100, 200), (50,), (50, 100)),
        ((200, 100), (50,), (100, 50)),
        ((30, 47), (20,), (20, 31)),
        ((30, 40), (8, 9), (8, 9)),
    ],
)
def test_resize(size: tuple[int, int], resize: tuple[int, ...], expected: tuple[int, int]) -> None:
    found = preprocessed(Image.fromarray(_pixels(*size)), Preprocess(resize=resize), where="a")
    assert found.shape[1:] == expected


def test_one_number_crops_a_square() -> None:
    assert preprocessed(Image.fromarray(_pixels(9, 12)), Preprocess(crop=(4,)), where="a").shape == (3, 4, 4)


@pytest.mark.parametrize(("dtype", "expected"), [("uint8", np.uint8), ("float16", np.float16), ("int32", np.int32)])
def test_input_types(tmp_path, dtype: str, expected: type) -> None:
    pixels = _save(tmp_path / "a.png")
    spec = TensorSpec(name="x", dtype=dtype, shape=("batch", 3, 8, 8))
    ((_, sample),) = open_source(str(tmp_path), [spec], RAW).read(everything)
    assert sample["x"].dtype == expected
    np.testing.assert_array_equal(sample["x"], pixels.transpose(2, 0, 1))


def test_fractions_for_an_integer_input_are_refused(tmp_path) -> None:
    _save(tmp_path / "a.png")
    spec = TensorSpec(name="x", dtype="uint8", shape=("batch", 3, 8, 8))
    with pytest.raises(InputError, match=r"'x' is uint8, and preprocessing with mean .* gives fractions"):
        open_source(str(tmp_path), [spec], Preprocess())


def test_no_preprocessing(tmp_path) -> None:
    _save(tmp_path / "a.png")
    with pytest.raises(InputError, match="no preprocessing is declared") as caught:
        open_source(str(tmp_path), [IMAGE], None)
    assert "--preprocess imagenet" in str(caught.value.remedy)


def test_empty_folder(tmp_path) -> None:
    with pytest.raises(InputError, match="has no image"):
        open_source(str(tmp_path), [IMAGE], RAW)
    np.save(tmp_path / "x.npy", np.zeros(3))
    with pytest.raises(InputError, match=r"but 1 \.npy/\.npz files") as caught:
        open_source(str(tmp_path), [IMAGE], RAW)
    assert caught.value.remedy == "give one .npy or .npz file, or file.py:callable"


def test_several_inputs(tmp_path) -> None:
    _save(tmp_path / "a.png")
    with pytest.raises(InputError, match=r"folder of images, and the model has 2 inputs \(ids, mask\)"):
        open_source(str(tmp_path), [IDS, MASK], RAW)


def test_truncated_image_is_named(tmp_path) -> None:
    _save(tmp_path / "good.png", 64, 64)
    data = (tmp_path / "good.png").read_bytes()
    (tmp_path / "bad.png").write_bytes(data[: len(data) // 2])
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", 3, 64, 64))
    with pytest.raises(InputError, match=r"image .*bad\.png cannot be read"):
        list(open_source(str(tmp_path), [spec], RAW).read(everything))


def test_text_named_jpg_is_named(tmp_path) -> None:
    (tmp_path / "fake.jpg").write_text("no image")
    with pytest.raises(InputError, match=r"image .*fake\.jpg cannot be read"):
        list(open_source(str(tmp_path), [IMAGE], RAW).read(everything))


def test_smaller_than_the_crop(tmp_path) -> None:
    _save(tmp_path / "small.png", 8, 5)
    steps = Preprocess(crop=(8, 8), mean=(0.0,), std=(1.0,))
    with pytest.raises(InputError, match=r"small\.png is 8x5 \(height x width\), smaller than the crop 8x8"):
        list(open_source(str(tmp_path), [IMAGE], steps).read(everything))


def test_size_that_the_model_does_not_take(tmp_path) -> None:
    _save(tmp_path / "wide.png", 8, 9)
    with pytest.raises(
        InputError, match=r"wide\.png: a sample of 'x' has the shape \(3, 8, 9\), the model expects \(3, 8, 8\)"
    ):
        list(open_source(str(tmp_path), [IMAGE], RAW).read(everything))


def test_remedy_for_a_size_that_the_model_does_not_take(tmp_path) -> None:
    _save(tmp_path / "wide.png", 8, 9)
    for shape, said in (((3, 8, 8), "the model's size, such as 'resize=8x8'"), ((3, 8, "w"), "the model's size")):
        spec = TensorSpec(name="x", dtype="float32", shape=("batch", *shape))
        source = open_source(str(tmp_path), [spec], Preprocess.model_validate("mean=0;std=1;resize=7"))
        with pytest.raises(InputError, match=r"wide\.png: .* has the shape \(3, 7, 7\)") as caught:
            list(source.read(everything))
        assert str(caught.value.remedy).endswith(said)
        for steps in ("resize=7x7", "resize=9;crop=7", "crop=7x7"):
            with pytest.raises(InputError, match=r"preprocessing of .* has the shape \(3, 7, 7\)") as caught:
                open_source(str(tmp_path), [spec], Preprocess.model_validate(f"mean=0;std=1;{steps}"))
            assert str(caught.value.remedy).endswith(said)


def test_deep_images_are_refused(tmp_path) -> None:
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(InputError, match=r"deep\.png has more than 8 bits a channel \(mode I;16\)"):
        list(open_source(str(tmp_path), [IMAGE], RAW).read(everything))


def test_wrong_channels_and_layout(tmp_path) -> None:
    _save(tmp_path / "a.png")
    gray = TensorSpec(name="x", dtype="float32", shape=("batch", 1, 8, 8))
    with pytest.raises(
        InputError, match=r"preprocessing gives 3 channels \(rgb, nchw\), the input 'x' takes \(1, 8, 8\)"
    ):
        open_source(str(tmp_path), [gray], RAW)
    last = TensorSpec(name="x", dtype="float32", shape=("batch", 8, 8, 3))
    with pytest.raises(InputError, match="takes") as caught:
        open_source(str(tmp_path), [last], RAW)
    assert caught.value.remedy == "the model takes the channels last: set layout=nhwc in --preprocess"


@pytest.mark.parametrize(
    ("shape", "steps", "remedy"),
    [
        ((3, "h", "w"), "imagenet;layout=nhwc", "the model takes the channels first: set layout=nchw in --preprocess"),
        ((3, 224, 224), "imagenet;layout=nhwc", "the model takes the channels first: set layout=nchw in --preprocess"),
        (("h", "w", 3), "imagenet", "the model takes the channels last: set layout=nhwc in --preprocess"),
        ((1, "h", "w"), "none", "set channels=gray in --preprocess"),
        ((3, 8, 8), "none;channels=gray", "set channels=rgb (or bgr) in --preprocess"),
        ((4, 8, 8), "none", "images give 3 channels (rgb, bgr) or 1 (gray): give .npy, .npz or file.py:callable"),
    ],
)
def test_remedy_for_wrong_channels_and_layout(tmp_path, shape, steps: str, remedy: str) -> None:
    _save(tmp_path / "a.png")
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", *shape))
    with pytest.raises(InputError, match=r"preprocessing gives \d channels? ") as caught:
        open_source(str(tmp_path), [spec], Preprocess.model_validate(steps))
    assert str(caught.value.remedy).startswith(remedy)


@pytest.mark.parametrize(
    ("shape", "steps"), [(("c", "h", "w"), "none"), ((3, 3, 3), "none"), ((3, 3, 3), "layout=nhwc")]
)
def test_channels_that_may_be_right(tmp_path, shape, steps: str) -> None:
    _save(tmp_path / "a.png", 3, 3)
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", *shape))
    assert len(list(open_source(str(tmp_path), [spec], Preprocess.model_validate(steps)).read(everything))) == 1


def test_input_that_is_no_image(tmp_path) -> None:
    _save(tmp_path / "a.png")
    with pytest.raises(InputError, match=r"'ids' takes \(length,\) int64 a sample, which is no image"):
        open_source(str(tmp_path), [IDS], RAW)


def test_number_of_means(tmp_path) -> None:
    _save(tmp_path / "a.png")
    with pytest.raises(InputError, match=r"2 values for mean \(1\.0, 2\.0\) and 3 channels") as caught:
        open_source(str(tmp_path), [IMAGE], Preprocess(mean=(1.0, 2.0)))
    assert caught.value.remedy == "give one number, or three in the order of the channels: mean=A,B,C"


def test_means_of_three_colours_for_gray(tmp_path) -> None:
    _save(tmp_path / "a.png")
    gray = TensorSpec(name="x", dtype="float32", shape=("batch", 1, 8, 8))
    with pytest.raises(InputError, match=r"3 values for mean \(123.*\) and 1 channel \(gray\)") as caught:
        open_source(str(tmp_path), [gray], Preprocess.model_validate("imagenet;channels=gray"))
    assert str(caught.value.remedy).endswith("such as their average: add mean=114.495")
    with pytest.raises(InputError, match=r"3 values for std \(58.*\) and 1 channel \(gray\)") as caught:
        open_source(str(tmp_path), [gray], Preprocess.model_validate("imagenet;channels=gray;mean=114.495"))
    assert str(caught.value.remedy).endswith("add std=57.63")


def test_key_changes_with_data_and_preprocessing(tmp_path) -> None:
    _save(tmp_path / "a.png")
    key, digest = (source := open_source(str(tmp_path), [IMAGE], RAW)).key(), source.sha256()
    assert open_source(str(tmp_path), [IMAGE], RAW).key() == key
    assert open_source(str(tmp_path), [IMAGE], Preprocess()).key() != key
    _save(tmp_path / "b.png")
    assert open_source(str(tmp_path), [IMAGE], RAW).key() != key
    assert open_source(str(tmp_path), [IMAGE], RAW).sha256() != digest


@pytest.mark.skipif(not IMAGENET500.is_dir(), reason="shared/data/imagenet500 is not here")
def test_imagenet500() -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", 3, 224, 224))
    source = open_source(str(IMAGENET500), [spec], Preprocess.model_validate("efficientnet-lite"))
    assert source.length == 500
    found = list(source.read(lambda number: number % 100 == 0))
    assert [number for number, _ in found] == [0, 100, 200, 300, 400]
    for _, sample in found:
        assert sample["x"].shape == (3, 224, 224)
        assert -1 <= sample["x"].min() < sample["x"].max() <= 1
