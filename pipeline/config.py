"""Configuration of a build: one frozen schema for the command line, ``build.yaml`` and Python.

Precedence, lowest first: defaults here, the file given with ``-c``, flags on the command line.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, field_validator, model_validator

from pipeline.accuracy import Target
from pipeline.core.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.records import TensorSpec

__all__ = [
    "LARGEST_DIMENSION",
    "TARGETS",
    "BuildConfig",
    "CalibratorConfig",
    "InputSpec",
    "MixedConfig",
    "PlacementConfig",
    "Preprocess",
    "Profile",
    "ShapeRange",
    "check_profiles",
    "load_config",
    "validated",
]

TARGETS = ("rtx", "tensorrt", "onnx")
PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    "imagenet": {
        "resize": (256,),
        "crop": (224, 224),
        "mean": (123.675, 116.28, 103.53),
        "std": (58.395, 57.12, 57.375),
    },
    "efficientnet-lite": {"crop": (224, 224), "mean": (127.0,), "std": (128.0,)},
}


LARGEST_DIMENSION = 2**31 - 1
"""TensorRT's dimensions have 32 bits."""
_LARGEST_IMAGE = 16384
"""Side in pixels: beyond it a size is a slip, and images of it fill the memory."""


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ShapeRange(_Config):
    """Smallest, optimal and largest shape of one input."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]

    @model_validator(mode="after")
    def _ordered(self) -> ShapeRange:
        if not len(self.min) == len(self.opt) == len(self.max):
            raise ValueError(f"min, opt and max need the same rank, got {self}")
        for axis, (low, mid, high) in enumerate(zip(self.min, self.opt, self.max, strict=True)):
            if not 1 <= low <= mid <= high:
                raise ValueError(
                    f"dimension {axis} needs 1 <= min <= opt <= max, got min {low}, opt {mid}, max {high} in {self}"
                )
            if high > LARGEST_DIMENSION:
                raise ValueError(f"dimension {axis} is {high} in {self}, the largest possible is {LARGEST_DIMENSION}")
        return self

    def __str__(self) -> str:
        return ",".join("x".join(map(str, shape)) for shape in (self.min, self.opt, self.max))

    def contains(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self.min) and all(
            low <= dim <= high for low, dim, high in zip(self.min, shape, self.max, strict=True)
        )


class Profile(_Config):
    """One TensorRT optimisation profile: a shape range per dynamic input.

    Text form: ``x=1x3x224x224,8x3x224x224,64x3x224x224`` (min, opt, max); several inputs are joined by ``;``. A single
    shape stands for all three.
    """

    inputs: dict[str, ShapeRange]

    @classmethod
    def parse(cls, text: str) -> Profile:
        inputs: dict[str, ShapeRange] = {}
        for part in filter(None, (piece.strip() for piece in text.split(";"))):
            name, separator, shapes_text = part.rpartition("=")
            fields = shapes_text.split(",")
            if not separator or not name or len(fields) not in (1, 3):
                raise ValueError(f"profile {part!r} is not NAME=MIN,OPT,MAX with shapes such as 1x3x224x224")
            shapes = []
            for field in fields:
                if not re.fullmatch(r"\s*\d+(x\d+)*\s*", field):
                    raise ValueError(f"profile of {name!r}: {field!r} is not a shape such as 1x3x224x224")
                shapes.append(tuple(int(dim) for dim in field.split("x")))
            low, mid, high = shapes * 3 if len(shapes) == 1 else shapes
            if name in inputs:
                raise ValueError(f"profile names the input {name!r} twice")
            inputs[name] = ShapeRange(min=low, opt=mid, max=high)
        if not inputs:
            raise ValueError("a profile needs at least one input")
        return cls(inputs=inputs)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            return cls.parse(value).model_dump()
        if isinstance(value, dict) and "inputs" not in value:
            return cls.parse(";".join(f"{name}={text}" for name, text in value.items())).model_dump()
        return value

    def __str__(self) -> str:
        return ";".join(f"{name}={shapes}" for name, shapes in self.inputs.items())


class InputSpec(_Config):
    """``NAME:SHAPE:DTYPE``, such as ``x:1x3x224x224:float32``: an example input for a PyTorch model.

    A dimension may be given as ``N`` or any other word to make it dynamic without a profile.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str = "float32"

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        name, _, rest = value.partition(":")
        shape, _, dtype = rest.partition(":")
        dims = re.split(r"[x,]", shape) if shape else []
        if not name or not dims or not all(re.fullmatch(r"\d+|[A-Za-z_]\w*", dim) for dim in dims):
            raise ValueError(f"input {value!r} is not NAME:SHAPE:DTYPE, such as x:1x3x224x224:float32")
        return {"name": name, "shape": tuple(int(d) if d.isdigit() else d for d in dims), "dtype": dtype or "float32"}


class Preprocess(_Config):
    """How an image file becomes an input tensor. The fields apply in this order.

    ``mean`` and ``std`` are in units of 8-bit pixel values (0..255), one number or one per channel:
    ``(pixel - mean) / std``. Text form: a preset name, or ``key=value`` pairs joined by ``;``, after a preset:
    ``imagenet;crop=288x288;channels=bgr``.

    ``mean`` and ``std`` are in the order of the channels as fed: typed numbers are those of blue, green and red with
    ``channels=bgr``. Those of a preset belong to colours and are brought into that order:
    ``imagenet;channels=bgr`` has ``mean=103.53,116.28,123.675``.
    """

    resize: tuple[int, ...] = ()
    """One number: the shorter side; two: height and width. Empty: as it is."""
    interpolation: Literal["nearest", "bilinear", "bicubic"] = "bilinear"
    crop: tuple[int, ...] = ()
    """Height and width of the centre crop (one number: a square)."""
    channels: Literal["rgb", "bgr", "gray"] = "rgb"
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (255.0,)
    layout: Literal["nchw", "nhwc"] = "nchw"

    def __str__(self) -> str:
        """In the text form: every field that is not empty."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        for name, separator in (("resize", "x"), ("crop", "x"), ("mean", ","), ("std", ",")):
            fields[name] = separator.join(map(str, fields[name]))
        return ";".join(f"{name}={text}" for name, text in fields.items() if text)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        fields: dict[str, Any] = {}
        preset: dict[str, Any] = {}
        for number, part in enumerate(filter(None, (piece.strip() for piece in value.split(";")))):
            key, separator, text = part.partition("=")
            name, comma, rest = key.partition(",")
            if comma and name.strip() in PRESETS:
                keys = ";".join([name.strip(), *re.split(r",\s*(?=[a-z])", rest.strip() + separator + text)])
                raise ValueError(f"preprocessing {part!r}: keys are joined by ';', so {keys!r}")
            if re.search(r",\s*[a-z]+\s*=", text):
                keys = ";".join(re.split(r",\s*(?=[a-z]+\s*=)", part))
                raise ValueError(f"preprocessing {part!r}: keys are joined by ';', so {keys!r}")
            if not separator:
                if number or key not in PRESETS:
                    raise ValueError(f"unknown preprocessing preset {key!r}; {did_you_mean(key, PRESETS)}")
                preset = PRESETS[key]
            else:
                fields[key.strip()] = text.strip()
        if fields.get("channels") == "bgr":  # a preset's numbers are those of red, green and blue
            preset = {key: numbers[::-1] if key in ("mean", "std") else numbers for key, numbers in preset.items()}
        return preset | fields

    @field_validator("resize", "crop", "mean", "std", mode="before")
    @classmethod
    def _numbers(cls, value: Any, info: Any) -> Any:
        if isinstance(value, (int, float)):
            return (value,)
        if isinstance(value, str):
            kind = float if info.field_name in ("mean", "std") else int
            try:
                return tuple(kind(part) for part in re.split(r"[x,]", value) if part)
            except ValueError as error:
                raise ValueError(
                    f"{info.field_name}={value!r} is not a list of numbers such as 256 or 224x224"
                ) from error
        return value

    @field_validator("resize", "crop")
    @classmethod
    def _sizes(cls, value: tuple[int, ...], info: Any) -> tuple[int, ...]:
        if len(value) > 2 or not all(1 <= size <= _LARGEST_IMAGE for size in value):
            raise ValueError(
                f"{info.field_name} must be one or two numbers from 1 to {_LARGEST_IMAGE}, got {value}: "
                "256 or 224x224 (height x width)"
            )
        return value

    @field_validator("mean", "std")
    @classmethod
    def _usable(cls, value: tuple[float, ...], info: Any) -> tuple[float, ...]:
        if not value or not all(math.isfinite(v) for v in value):
            raise ValueError(f"{info.field_name} must be finite, one number or one per channel, got {value}")
        if info.field_name == "std" and any(v == 0 for v in value):
            raise ValueError(f"std must not be zero, got {value}")
        return value


class CalibratorConfig(_Config):
    """Which calibrator turns statistics into ranges, and its parameters (None: the calibrator's default)."""

    name: str = "mse"
    """The default was nearest to FP32 on every trained network measured: an EfficientNet, a sentence encoder, text
    detection and recognition (scripts/experiments/results-placement.md)."""
    params: dict[str, FiniteFloat] = Field(default_factory=dict)


class PlacementConfig(_Config):
    """What is quantised beyond the rules' own judgement. Patterns are node names, shell patterns or operator types."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rules_off: tuple[str, ...] = ()
    precision: Literal["fp32", "fp16"] = "fp32"
    """Type of the part of the graph that stays float."""
    fp16_io: Literal["none", "inputs", "outputs", "both"] = "none"
    """Which of the graph's float32 inputs and outputs are float16."""


class MixedConfig(_Config):
    """Automatic mixed precision: the target that the INT8 network has to meet. One of the first three starts a search.

    A bare number is taken in the target's own unit, per cent or dB.
    """

    max_drop: str | None = None
    """Largest loss of top-1 against FP32 in points, such as ``0.5%``; needs labels."""
    min_sqnr: str | None = None
    """Smallest SQNR at the outputs, such as ``20dB``."""
    min_agreement: str | None = None
    """Smallest share of samples with the arg-max of FP32, such as ``99%``."""
    choose: int | None = Field(default=None, ge=0)
    """Point of the finished search to build; None: the fastest that meets the target."""
    samples: int = Field(default=32, ge=1)
    """Calibration samples to search on."""
    layer_times: tuple[Path, Path] | None = None
    """Layer times of an engine with everything in INT8 and of one in float, as `quantize inspect --engine --batch
    --json` prints them. None: multiply-accumulates stand for time."""

    @field_validator("max_drop", "min_sqnr", "min_agreement", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _one_target(self) -> MixedConfig:
        given = [_flag(kind) for kind, text in self._targets() if text is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; a search has one target")
        _ = self.target  # its own message
        return self

    def _targets(self) -> tuple[tuple[Literal["max_drop", "min_sqnr", "min_agreement"], str | None], ...]:
        return (
            ("max_drop", self.max_drop),
            ("min_sqnr", self.min_sqnr),
            ("min_agreement", self.min_agreement),
        )

    @property
    def wanted(self) -> bool:
        """A search, or a point of one, is asked for."""
        return self.choose is not None or any(text is not None for _, text in self._targets())

    @property
    def target(self) -> Target | None:
        """None: not given (with ``choose``, the search in the artifact knows it).

        Raises:
            InputError: not a number, another unit, or out of range.
        """
        for kind, text in self._targets():
            if text is not None:
                return Target.parse(kind, text)
        return None


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


class BuildConfig(_Config):
    """Everything `quantize build` needs."""

    model: str
    data: str
    out: Path
    name: str = ""
    """Name in the manifest; empty: the last part of ``out``. Of printable characters."""
    inputs: tuple[InputSpec, ...] = ()
    profiles: tuple[Profile, ...] = ()
    targets: tuple[Literal["rtx", "tensorrt", "onnx"], ...] = ()
    """Empty: what is installed and can work here."""
    opset: int = Field(default=17, ge=13, le=23)
    calibrator: CalibratorConfig = CalibratorConfig()
    calibration: Path | None = None
    """A ``calibration.npz`` to take the statistics from instead of a pass over the data."""
    samples: int | None = Field(default=None, ge=1)
    """Samples to calibrate on; None: 128, or three quarters of the data where there are fewer than 171."""
    verify_samples: int | None = Field(default=None, ge=1)
    """Held-aside samples to verify on; None: 64, or all that are left where labels are given."""
    batch_size: int = Field(default=8, ge=1)
    preprocess: Preprocess | None = None
    labels: Path | None = None
    on_nonfinite: Literal["error", "skip"] = "error"
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the float model runs for calibration."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Options of the engine builder, the fields of :class:`pipeline.engine.records.BuildOptions`."""
    placement: PlacementConfig = PlacementConfig()
    equalise: bool = False
    """Move the spread between an activation's channels into the weights behind it, where the float graph stays as it
    is."""
    mixed: MixedConfig = MixedConfig()

    @field_validator("name")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError(f"the name {value!r} has characters that cannot be printed")
        return value

    @model_validator(mode="after")
    def _labels_for_top1(self) -> BuildConfig:
        if self.mixed.max_drop is not None and self.labels is None:
            raise ValueError("--max-drop is about top-1, which needs labels: add --labels, or use --min-sqnr")
        return self


def validated(kind: type[Any], values: Mapping[str, Any], *, origin: str) -> Any:
    """``kind(**values)``, its complaints turned into one :class:`InputError` that names ``origin`` and each field."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        lines = []
        for item in error.errors():
            where = ".".join(str(part) for part in item["loc"])
            if item["type"] == "extra_forbidden":
                lines.append(
                    f"unknown key {where!r}; {did_you_mean(str(item['loc'][-1]), _field_names(kind, item['loc'][:-1]))}"
                )
            else:
                text = item["msg"].removeprefix("Value error, ")
                lines.append(f"{where}: {text}" if where else text)
        raise InputError(f"{origin}: " + "; ".join(lines)) from error


def _field_names(kind: Any, path: tuple[Any, ...]) -> list[str]:
    for part in path:
        if isinstance(part, int):  # the place in a tuple
            continue
        field = getattr(kind, "model_fields", {}).get(part)
        if field is None:
            return []
        inner = [item for item in get_args(field.annotation) if item not in (type(None), ...)]
        kind = inner[0] if inner else field.annotation
    return list(getattr(kind, "model_fields", {}))


def _key_given_twice(node: Any) -> str | None:
    """YAML's own loader silently takes the last value of a key that comes again."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        lines: dict[Any, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in lines and isinstance(key, yaml.ScalarNode):
                return f"gives the key {key.value!r} twice, in lines {lines[key.value]} and {line}"
            if isinstance(key, yaml.ScalarNode):
                lines[key.value] = line
            if (found := _key_given_twice(value)) is not None:
                return found
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            if (found := _key_given_twice(item)) is not None:
                return found
    return None


def load_config(path: Path | str) -> dict[str, Any]:
    """The mapping in a YAML file; paths in it are relative to the current folder, as on the command line."""
    import yaml

    path = Path(path)
    try:
        text = path.read_text()
        value = yaml.safe_load(text)
        twice = _key_given_twice(yaml.compose(text, Loader=yaml.SafeLoader))
    except FileNotFoundError as error:
        raise InputError(f"configuration {path} does not exist", remedy="`quantize init` writes one") from error
    except OSError as error:
        raise InputError(
            f"configuration {path} cannot be read: {error.strerror or error}", remedy="-c takes a YAML file"
        ) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, a number of thousands of digits
        raise InputError(f"configuration {path} is not valid YAML: {error}") from error
    except RecursionError as error:
        raise InputError(
            f"configuration {path} is nested too deeply, or an alias in it refers to itself",
            remedy="`quantize init` writes one to start from",
        ) from error
    if twice is not None:
        raise InputError(f"configuration {path} {twice}", remedy="leave one of them")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InputError(f"configuration {path} must be a mapping of keys to values, got {type(value).__name__}")
    return value


def stated_inputs(inputs: tuple[InputSpec, ...], profiles: tuple[Profile, ...]) -> tuple[TensorSpec, ...]:
    """The model's inputs as far as options state them; float32 where only profiles name one."""
    from pipeline.records import TensorSpec

    shapes: dict[str, list[tuple[int | str, ...]]] = {spec.name: [spec.shape] for spec in inputs}
    for profile in profiles:
        for name, known in profile.inputs.items():
            shapes.setdefault(name, []).extend((known.min, known.opt, known.max))
    types = {spec.name: spec.dtype for spec in inputs}
    return tuple(
        TensorSpec(name=name, dtype=types.get(name, "float32"), shape=_joined(found)) for name, found in shapes.items()
    )


def _joined(shapes: list[tuple[int | str, ...]]) -> tuple[int | str, ...] | None:
    """What all have in common: a dimension that varies is a name; None: not even the rank."""
    if len({len(shape) for shape in shapes}) != 1:
        return None
    return tuple(
        found[0] if len(set(found)) == 1 else f"d{axis}" for axis, found in enumerate(zip(*shapes, strict=True))
    )


def check_profiles(profiles: tuple[Profile, ...], inputs: tuple[TensorSpec, ...]) -> None:
    """Check profiles against the model's inputs, before anything long starts.

    Raises:
        InputError: an unknown input, another rank, a changed static dimension, or a dynamic input left out.
    """
    specs = {spec.name: spec for spec in inputs}
    for number, profile in enumerate(profiles):
        for name, shapes in profile.inputs.items():
            if name not in specs:
                raise InputError(
                    f"profile {number} names the input {name!r}, which the model does not have; "
                    f"{did_you_mean(name, specs)}"
                )
            expected = specs[name].shape
            if expected is None:
                continue
            if len(expected) != len(shapes.min):
                raise InputError(
                    f"profile {number}: input {name!r} has rank {len(expected)} {expected}, "
                    f"the profile {shapes} has {len(shapes.min)}"
                )
            for axis, dim in enumerate(expected):
                found = (shapes.min[axis], shapes.opt[axis], shapes.max[axis])
                if isinstance(dim, int) and set(found) != {dim}:
                    raise InputError(
                        f"profile {number}: dimension {axis} of input {name!r} is static ({dim}) in the model, "
                        f"the profile has {found}",
                        remedy="give the model's own number, or export the model with this dimension dynamic",
                    )
        for name, spec in specs.items():
            if spec.dynamic and name not in profile.inputs:
                raise InputError(
                    f"profile {number} leaves out the dynamic input {name!r} {spec.shape}",
                    remedy=f'add it: --profile "{profile};{name}=MIN,OPT,MAX"',
                )
    if not profiles and (dynamic := [spec for spec in inputs if spec.dynamic]):
        example = "x".join(str(dim) if isinstance(dim, int) else "N" for dim in dynamic[0].shape or ())
        raise InputError(
            f"input {dynamic[0].name!r} is dynamic {dynamic[0].shape} and no profile is given",
            remedy=f'add --profile "{dynamic[0].name}=MIN,OPT,MAX" with shapes such as {example}',
        )
