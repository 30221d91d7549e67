from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from pipeline.config import Preprocess
from pipeline.core.errors import InputError
from pipeline.data import check_class_scores, load_labels, open_source
from pipeline.records import TensorSpec
from tests.data.specs import IMAGE, ROW
from tests.paths import IMAGENET500


@pytest.fixture
def images(tmp_path):
    for name in ("cat/1.png", "dog/1.png", "dog/2.png"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "images" / name)
    return open_source(str(tmp_path / "images"), [IMAGE], Preprocess())


@pytest.fixture
def rows(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((3, 3), np.float32))
    return open_source(str(tmp_path / "x.npy"), [ROW], None)


def _csv(tmp_path, text: str):
    (tmp_path / "labels.csv").write_text(text)
    return tmp_path / "labels.csv"


def test_by_file_whatever_the_order(tmp_path, images) -> None:
    path = _csv(tmp_path, "file,class_index,wnid\n2.png,7,n1\ndog/1.png,5,n2\ncat/1.png,3,n3\n")
    assert load_labels(path, images) == {0: 3, 1: 5, 2: 7}


def test_by_index_and_by_order(tmp_path, rows) -> None:
    assert load_labels(_csv(tmp_path, "index,class_index\n2,9\n0,4\n1,4\n"), rows) == {0: 4, 1: 4, 2: 9}
    assert load_labels(_csv(tmp_path, "class_index\n1\n2\n3\n"), rows) == {0: 1, 1: 2, 2: 3}
    np.save(tmp_path / "labels.npy", np.array([5, 6, 7], np.int32))
    assert load_labels(tmp_path / "labels.npy", rows) == {0: 5, 1: 6, 2: 7}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,class_index\ncat/1.png,1\ndog/1.png,1\n", r"has no label for 'dog/2\.png' \(1 of 3 samples"),
        ("file,class_index\ncat/9.png,1\n", r"labels 'cat/9\.png', which is not in the data \(1 such labels\)"),
        ("file,class_index\n1.png,1\n", r"labels '1\.png', and 2 files have that name, such as 'cat/1\.png'"),
        ("file,class_index\n2.png,1\ndog/2.png,1\n", r"labels 'dog/2\.png' more than once"),
        ("file,class_index\n2.png,x\n", r"line 2: 'x' is not a whole number"),
        ("file,class_index\n2.png,\n", r"line 2: '' is not a whole number"),
        ("file,class_index\n2.png\n", r"line 2: None is not a whole number"),
        ("file,class_index\n2.png,-1\n", r"line 2: -1 is negative"),
        ("file,label\n2.png,1\n", r"has no column 'class_index'; it has file, label"),
        ("", r"has no column 'class_index'; it has none"),
    ],
)
def test_faults_of_image_labels(tmp_path, images, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_labels(_csv(tmp_path, text), images)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,class_index\na.png,1\n", "labels files, and the data .* have no file names"),
        ("index,class_index\n0,1\n1,1\n", r"no label for sample 2 \(1 of 3"),
        ("index,class_index\n0,1\n0,1\n", "labels sample 0 more than once"),
        ("index,class_index\n7,1\n", "labels sample 7, and the data have 3 samples, numbered from 0"),
        ("class_index\n1\n", "has 1 labels, the data have 3 samples"),
    ],
)
def test_faults_of_array_labels(tmp_path, rows, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_labels(_csv(tmp_path, text), rows)


def test_unreadable_labels(tmp_path, rows) -> None:
    for name in ("none.csv", "none.npy"):
        with pytest.raises(InputError, match=r"labels .*none\.\w+ do not exist"):
            load_labels(tmp_path / name, rows)
    (tmp_path / "bad.npy").write_bytes(b"xx")
    (tmp_path / "bad.csv").write_bytes(b"class_index\n\xff\xfe\n")
    for name in ("bad.csv", "bad.npy"):
        with pytest.raises(InputError, match=r"labels .*bad\.\w+ cannot be read"):
            load_labels(tmp_path / name, rows)
    np.save(tmp_path / "float.npy", np.zeros(3))
    with pytest.raises(InputError, match=r"one-dimensional integer array, got float64 of shape \(3,\)"):
        load_labels(tmp_path / "float.npy", rows)


@pytest.mark.skipif(not IMAGENET500.is_dir(), reason="shared/data/imagenet500 is not here")
def test_imagenet500() -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", 3, 224, 224))
    source = open_source(str(IMAGENET500), [spec], Preprocess.model_validate("efficientnet-lite"))
    labels = load_labels(IMAGENET500 / "labels.csv", source)
    assert len(labels) == 500
    assert source.names is not None
    assert all(labels[number] == int(name.removesuffix(".jpg")) for number, name in enumerate(source.names))


def _output(*shape: int | str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name="y", dtype=dtype, shape=shape)


@pytest.mark.parametrize(
    "output",
    [
        _output("N", 10), _output(4, 10), _output("N", "classes"), _output("N", 1, 10), _output("N", "steps", 10),
        _output("N", 10, 1, 1), _output("N", 10, "h", "w"), _output("N", 10, dtype="float16"),
        TensorSpec(name="y", dtype="float32", shape=None),
    ],
)  # fmt: skip
def test_outputs_that_are_or_may_be_class_scores(output) -> None:
    check_class_scores([_output("N", 4, 8, 8), output])


@pytest.mark.parametrize(
    "output",
    [
        _output("N", 1, 8, 8), _output("N", 4, 8, "w"), _output("N", 7, 10), _output("N"), _output(), _output("N", 1),
        _output("N", 10, dtype="int64"), _output("N", 1, 1, 1),
    ],
)  # fmt: skip
def test_outputs_that_hold_no_class_scores(output) -> None:
    with pytest.raises(InputError, match="labels are given, but no output has one row of class scores") as caught:
        check_class_scores([output])
    assert "leave --labels out" in str(caught.value.remedy)


def test_outputs_without_class_scores_are_named_with_their_shapes() -> None:
    with pytest.raises(InputError, match=r"per sample: 'y' \(N, 1, h, w\) float32, 'y' \(N\) int64"):
        check_class_scores([_output("N", 1, "h", "w"), _output("N", dtype="int64")])
