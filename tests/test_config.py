"""Configuration: text forms, precedence, and complaints that name what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import BuildConfig, InputSpec, Preprocess, Profile, check_profiles, load_config, validated
from pipeline.core.errors import InputError
from pipeline.records import TensorSpec

BASE = {"model": "m.onnx", "data": "d", "out": "o"}


def build_config(**fields: object) -> BuildConfig:
    config = validated(BuildConfig, {**BASE, **fields}, origin="options")
    assert isinstance(config, BuildConfig)
    return config


@pytest.mark.parametrize(
    ("mixed", "text"),
    [
        ({"min_sqnr": "20dB"}, "SQNR of at least 20 dB"),
        ({"min_sqnr": 20.5}, "SQNR of at least 20.5 dB"),
        ({"min_agreement": 99}, "agreement of at least 99 %"),
        ({"choose": 0}, "None"),
        ({}, "None"),
    ],
)
def test_target_of_mixed_precision(mixed: dict[str, object], text: str) -> None:
    config = build_config(mixed=mixed).mixed
    assert str(config.target) == text
    assert config.wanted == bool(mixed)


@pytest.mark.parametrize(
    ("mixed", "message"),
    [
        ({"max_drop": "0.5%"}, "--max-drop is about top-1, which needs labels: add --labels"),
        ({"min_sqnr": "20", "min_agreement": "99%"}, "--min-sqnr and --min-agreement are given; a search has one"),
        ({"min_sqnr": "20%"}, "--min-sqnr '20%' is not a number such as 20dB"),
        ({"min_sqnr": True}, "mixed.min_sqnr: Input should be a valid string"),
        ({"choose": -1}, "mixed.choose: Input should be greater than or equal to 0"),
        ({"min_sqr": "20"}, "unknown key 'mixed.min_sqr'; did you mean 'min_sqnr'?"),
    ],
)
def test_bad_targets_of_mixed_precision(mixed: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        build_config(mixed=mixed)
    assert message in str(caught.value)


def test_profile_text_round_trip() -> None:
    text = "x=1x3x224x224,8x3x224x224,64x3x224x224;mask=1x16,1x16,1x16"
    profile = Profile.parse(text)
    assert str(profile) == text
    assert profile.inputs["x"].max == (64, 3, 224, 224)
    assert Profile.parse("x=2x3").inputs["x"].min == (2, 3)


def test_profile_of_a_name_with_equals_and_colons() -> None:
    assert Profile.parse("a:0=b=1x2,1x2,3x2").inputs["a:0=b"].max == (3, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x=8x3,1x3,64x3", "dimension 0 needs 1 <= min <= opt <= max, got min 8, opt 1, max 64"),
        ("x=1x3,1x3x3,1x3", "the same rank"),
        ("x=1x3,2x3", "not NAME=MIN,OPT,MAX"),
        ("x=1xN,1x3,1x3", "'1xN' is not a shape"),
        ("1x3,1x3,1x3", "not NAME=MIN,OPT,MAX"),
        ("x=0x3,1x3,1x3", "got min 0"),
        ("x=1x3,1x3,2147483648x3", "dimension 0 is 2147483648 in .*, the largest possible is 2147483647"),
        ("x=1x3;x=2x3", "'x' twice"),
        ("", "at least one input"),
    ],
)
def test_bad_profiles_are_explained(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_config(profiles=[text])


def test_profiles_from_yaml_mappings_and_text_are_equal() -> None:
    assert build_config(profiles=[{"x": "1x3,2x3,4x3"}]).profiles == build_config(profiles=["x=1x3,2x3,4x3"]).profiles


def test_unknown_keys_name_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown key 'batchsize'; did you mean 'batch_size'"):
        build_config(batchsize=4)
    with pytest.raises(InputError, match=r"unknown key 'placement.exclud'; did you mean 'exclude'"):
        build_config(placement={"exclud": ["a"]})


def test_preprocess_text_presets_and_keys() -> None:
    value = Preprocess.model_validate("imagenet;crop=288x256;channels=bgr")
    assert (value.resize, value.crop, value.channels) == ((256,), (288, 256), "bgr")
    assert Preprocess.model_validate("mean=127;std=128").std == (128.0,)


def test_numbers_of_a_preset_follow_the_channels_and_typed_ones_are_as_fed() -> None:
    value = Preprocess.model_validate("imagenet;channels=bgr")
    assert value.mean == (103.53, 116.28, 123.675)
    assert value.std == (57.375, 57.12, 58.395)
    assert Preprocess.model_validate("imagenet;channels=rgb") == Preprocess.model_validate("imagenet")
    typed = Preprocess.model_validate("imagenet;mean=1,2,3;channels=bgr")
    assert (typed.mean, typed.std) == ((1.0, 2.0, 3.0), (57.375, 57.12, 58.395))
    assert Preprocess.model_validate("channels=bgr;mean=1,2,3;std=4,5,6").mean == (1.0, 2.0, 3.0)
    assert Preprocess.model_validate("efficientnet-lite;channels=bgr").mean == (127.0,)
    assert Preprocess.model_validate(str(value)) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("imagenet,channels=bgr", "keys are joined by ';', so 'imagenet;channels=bgr'"),
        ("imagenet, crop=288x288,channels=bgr", "keys are joined by ';', so 'imagenet;crop=288x288;channels=bgr'"),
        ("resize=256,crop=224", "keys are joined by ';', so 'resize=256;crop=224'"),
        ("mean=1,2,3,std=4,5,6", "keys are joined by ';', so 'mean=1,2,3;std=4,5,6'"),
        ("imagnet", "did you mean 'imagenet'"),
        ("std=0", "must not be zero"),
        ("std=inf", "std must be finite"),
        ("mean=nan", "mean must be finite"),
        ("mean=", "mean must be finite, one number or one per channel, got"),
        ("crop=0", "crop must be one or two numbers from 1 to 16384"),
        ("crop=-5", "crop must be one or two numbers"),
        ("resize=3x4x5", "resize must be one or two numbers"),
        ("resize=99999999", "got .99999999,"),
        ("crop=32;chanels=bgr", "unknown key 'preprocess.chanels'; did you mean 'channels'"),
        ("crop=a", "not a list of numbers"),
        ("croop=2", "croop"),
    ],
)
def test_bad_preprocess_is_explained(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_config(preprocess=text)


def test_input_spec_text() -> None:
    spec = InputSpec.model_validate("x:Nx3x224x224:float16")
    assert (spec.name, spec.shape, spec.dtype) == ("x", ("N", 3, 224, 224), "float16")
    assert InputSpec.model_validate("ids:1x16").dtype == "float32"
    with pytest.raises(InputError, match="not NAME:SHAPE:DTYPE"):
        build_config(inputs=["x"])


X = TensorSpec(name="x", dtype="float32", shape=("N", 3, 8, 8))
Y = TensorSpec(name="y", dtype="float32", shape=(1, 4))


@pytest.mark.parametrize(
    ("profiles", "message"),
    [
        (["z=1x3x8x8"], "input 'z', which the model does not have"),
        (["x=1x3x8"], "has rank 4"),
        (
            ["x=1x3x8x8,1x3x8x8,1x3x9x8"],
            "dimension 2 of input 'x' is static .8. in the model, the profile has .8, 8, 9.",
        ),
        (["y=1x4"], "leaves out the dynamic input 'x'"),
        ([], "input 'x' is dynamic .* and no profile is given"),
    ],
)
def test_profiles_are_checked_against_the_model(profiles: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_profiles(tuple(Profile.parse(text) for text in profiles), (X, Y))


def test_a_fitting_profile_passes() -> None:
    check_profiles((Profile.parse("x=1x3x8x8,2x3x8x8,4x3x8x8"),), (X, Y))
    check_profiles((), (Y,))


def test_config_files(tmp_path: Path) -> None:
    path = tmp_path / "build.yaml"
    with pytest.raises(InputError, match="does not exist"):
        load_config(path)
    path.write_text("a: [")
    with pytest.raises(InputError, match="not valid YAML"):
        load_config(path)
    path.write_text("- a\n")
    with pytest.raises(InputError, match="must be a mapping"):
        load_config(path)
    path.write_text("model: m.onnx\n")
    assert load_config(path) == load_config(str(path)) == {"model": "m.onnx"}


@pytest.mark.parametrize("text", ["a: &x [*x]\n", "model: &a {b: &c {<<: *a}}\n", "a: " + "[" * 3000 + "]" * 3000])
def test_yaml_that_refers_to_itself_or_is_too_deep(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(InputError, match=r"nested too deeply, or an alias in it refers to itself|is not valid YAML"):
        load_config(tmp_path / "c.yaml")


def test_a_name_that_cannot_be_printed() -> None:
    with pytest.raises(InputError, match="characters that cannot be printed"):
        validated(BuildConfig, {"model": "m.onnx", "data": "d", "out": "o", "name": "a\x1b[31m"}, origin="options")
