"""What makes an INT8 engine slower than it could be, read off its layer table, with the remedy.

The rules follow NVIDIA's published advice on INT8 tensor cores and Q/DQ placement; a finding is a place to look, and
its time says whether looking pays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pipeline.engine.messages import skipped_tactics
from pipeline.engine.profiles import choose_profile, distance_from_opt
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pipeline.config import Profile
    from pipeline.engine.inspect import EngineLayer
    from pipeline.engine.profiles import Shape
    from pipeline.engine.records import Message

__all__ = ["Finding", "lint_build", "lint_layers", "lint_shapes"]

Kind = Literal["reformat", "float convolution", "channels", "profile", "workspace"]

_ALIGNED = 16
_WELL_ALIGNED = 32
_FAR = 1.0  # a factor of two in one dimension
_FLOATS = ("float32", "float16", "bfloat16")


class Finding(Record):
    """One thing worth changing."""

    kind: Kind
    where: str
    """A layer of the engine, an input, or the build."""
    message: str
    remedy: str
    ms: float | None = None
    """Time of the layer per run, where it was measured."""


def lint_layers(layers: Sequence[EngineLayer], times: Mapping[str, float] | None = None) -> tuple[Finding, ...]:
    """Reformats at INT8 layers, convolutions that ended in float, channels that tensor cores pad; the costliest first.

    Args:
        times: milliseconds per layer name, from :meth:`pipeline.engine.runner.Runner.layer_times`.
    """
    known = times or {}
    quantised = any(layer.convolution and layer.computes_int8 for layer in layers)
    found = [*_reformats(layers), *_convolutions(layers, quantised=quantised)]
    timed = [finding.model_copy(update={"ms": known.get(finding.where)}) for finding in found]
    return tuple(sorted(timed, key=lambda finding: -(finding.ms or 0.0)))


def _reformats(layers: Sequence[EngineLayer]) -> Iterator[Finding]:
    makers = {tensor.name: layer for layer in layers for tensor in layer.outputs}
    users = {tensor.name: layer for layer in layers for tensor in layer.inputs}
    for layer in layers:
        if not layer.reformat or not layer.inputs or not layer.outputs:
            continue
        source, target = layer.inputs[0], layer.outputs[0]
        before, after = makers.get(source.name), users.get(target.name)
        near = [other for other in (before, after) if other is not None and other.convolution]
        if "int8" not in (source.dtype, target.dtype) or not near:
            continue
        names = " and ".join(f"{other.name!r}" for other in near)
        if source.dtype == target.dtype:
            yield Finding(
                kind="reformat",
                where=layer.name,
                message=f"INT8 data change their layout at {names}: {source.format} to {target.format}",
                remedy=f"make both sides' channels a multiple of {_WELL_ALIGNED}, or give TensorRT more workspace",
            )
        elif before is None and target.dtype == "int8":
            yield Finding(
                kind="reformat",
                where=layer.name,
                message=f"the engine's input is quantised in a pass of its own ({source.dtype} to int8) at {names}",
                remedy="one pass is needed; float16 inputs halve what it reads and what is copied (--fp16-io inputs)",
            )
        else:
            yield Finding(
                kind="reformat",
                where=layer.name,
                message=f"{source.dtype} becomes {target.dtype} in a pass of its own at {names}",
                remedy="quantise what lies between too, or neither side: unfused pairs cost a pass",
            )


def _convolutions(layers: Sequence[EngineLayer], *, quantised: bool) -> Iterator[Finding]:
    for layer in layers:
        if not layer.convolution:
            continue
        if quantised and layer.computes_float:
            yield Finding(
                kind="float convolution",
                where=layer.name,
                message=f"computes in {layer.computes_in}, with {len(layer.fused)} fused nodes",
                remedy="look in placement.json for why its inputs have no Q/DQ pair; a small layer may stay so",
            )
        elif layer.computes_int8 and layer.outputs and layer.outputs[0].dtype in _FLOATS and _feeds_int8(layer, layers):
            yield Finding(
                kind="float convolution",
                where=layer.name,
                message=f"computes in INT8 and writes {layer.outputs[0].dtype}, which the next layer quantises again",
                remedy="put the Q node right behind it, so that it can write INT8 itself",
            )
        if layer.computes_int8 and layer.channels is not None and layer.groups == 1:
            bad = [count for count in layer.channels if count % _ALIGNED]
            if bad:
                yield Finding(
                    kind="channels",
                    where=layer.name,
                    message=f"{layer.channels[0]} input, {layer.channels[1]} output channels: INT8 tensor cores take "
                    f"{_ALIGNED} or {_WELL_ALIGNED} at a time and pad {' and '.join(map(str, bad))}",
                    remedy=f"widen the layer to a multiple of {_WELL_ALIGNED}, or keep it in float if that is faster",
                )


def _feeds_int8(layer: EngineLayer, layers: Sequence[EngineLayer]) -> bool:
    """A layer that only turns this one's float output into int8 follows."""
    name = layer.outputs[0].name
    return any(
        other.inputs
        and other.inputs[0].name == name
        and other.outputs
        and other.outputs[0].dtype == "int8"
        and not other.convolution
        for other in layers
    )


def lint_shapes(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> tuple[Finding, ...]:
    """The profile that serves ``shapes`` was tuned for something far from them: more than a factor of two."""
    number = choose_profile(profiles, shapes)
    profile = profiles[number]
    if distance_from_opt(profile, shapes) <= _FAR:
        return ()
    return tuple(
        Finding(
            kind="profile",
            where=name,
            message=f"shape {shapes[name]} is served by profile {number}, tuned for {shape_range.opt}",
            remedy=f"add a profile whose optimum is {'x'.join(map(str, shapes[name]))}",
        )
        for name, shape_range in profile.inputs.items()
        if shapes[name] != shape_range.opt
    )


def lint_build(messages: Iterable[Message]) -> tuple[Finding, ...]:
    """TensorRT said that it left kernels out for lack of workspace."""
    skipped = skipped_tactics(messages)
    if not skipped:
        return ()
    return (
        Finding(
            kind="workspace",
            where="build",
            message=f"{len(skipped)} messages say that kernels needed more workspace than allowed: {skipped[0]}",
            remedy="build with a larger --workspace",
        ),
    )
