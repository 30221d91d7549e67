#!/usr/bin/env python3
"""Write the small ONNX models, and what they compute, that the tests on a GPU machine use (it has no onnx package).

    make_engine_fixtures.py tests/engine/data

``*.npz`` beside a model holds ``inputs/NAME`` and ``outputs/NAME``, from onnxruntime without graph optimisation.
"""

from __future__ import annotations

import argparse
import struct
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

OPSET, IR_VERSION = 17, 8
CHANNELS = 32


def model(nodes: list, inputs: list, outputs: list, initializers: dict[str, np.ndarray]) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(values, name) for name, values in initializers.items()]
    graph = helper.make_graph(nodes, "fixture", inputs, outputs, tensors)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    return made


def info(name: str, shape: list, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def weights() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(7)
    draw = lambda *shape: generator.normal(0, np.sqrt(2 / np.prod(shape[1:])), shape).astype(np.float32)  # noqa: E731
    return {"w1": draw(CHANNELS, 16, 3, 3), "w2": draw(CHANNELS, CHANNELS, 3, 3), "w3": draw(10, CHANNELS)}


def convolutions() -> list:
    """x -> conv -> relu -> conv, added to the first relu, -> relu -> mean -> fully connected -> y."""
    return [
        helper.make_node("Conv", ["x", "w1"], ["c1"], name="conv1", pads=[1] * 4, kernel_shape=[3, 3]),
        helper.make_node("Relu", ["c1"], ["r1"], name="relu1"),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], name="conv2", pads=[1] * 4, kernel_shape=[3, 3]),
        helper.make_node("Add", ["c2", "r1"], ["a"], name="add"),
        helper.make_node("Relu", ["a"], ["r2"], name="relu2"),
        helper.make_node("GlobalAveragePool", ["r2"], ["g"], name="mean"),
        helper.make_node("Flatten", ["g"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "w3"], ["y"], name="fc", transB=1),
    ]


def fp32_model(batch: str | int = "N") -> onnx.ModelProto:
    return model(convolutions(), [info("x", [batch, 16, 16, 16])], [info("y", [batch, 10])], weights())


def amax(tensors: list[str]) -> dict[str, float]:
    feeds = {"x": samples(16)}
    extended = fp32_model()
    extended.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors if name != "x")
    session = onnxruntime.InferenceSession(extended.SerializeToString(), providers=["CPUExecutionProvider"])
    values = {**feeds, **dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))}
    return {name: float(np.abs(values[name]).max()) for name in tensors}


def samples(count: int) -> np.ndarray:
    return np.random.default_rng(1).normal(0, 1, (count, 16, 16, 16)).astype(np.float32)


def qdq_model(*, stored_weights: bool = False) -> onnx.ModelProto:
    """The Q/DQ form: pairs on the inputs of the weighted layers and on the skip input of the addition."""
    constants: dict[str, np.ndarray] = {}
    nodes = []
    for name, largest in amax(["x", "r1", "f"]).items():
        constants |= {f"{name}_scale": np.float32(largest / 127), f"{name}_zero": np.int8(0)}
        parameters = [f"{name}_scale", f"{name}_zero"]
        nodes.append(helper.make_node("QuantizeLinear", [name, *parameters], [f"{name}_q"], name=f"{name}_quantize"))
        nodes.append(
            helper.make_node("DequantizeLinear", [f"{name}_q", *parameters], [f"{name}_dq"], name=f"{name}_dequantize")
        )
    for name, values in weights().items():
        scale = (np.abs(values).reshape(len(values), -1).max(1) / 127).astype(np.float32)
        constants |= {f"{name}_scale": scale, f"{name}_zero": np.zeros(len(values), np.int8)}
        parameters = [f"{name}_scale", f"{name}_zero"]
        if stored_weights:
            shape = (-1, *[1] * (values.ndim - 1))
            constants[f"{name}_q"] = np.clip(np.rint(values / scale.reshape(shape)), -127, 127).astype(np.int8)
        else:
            constants[name] = values
            nodes.append(
                helper.make_node("QuantizeLinear", [name, *parameters], [f"{name}_q"], name=f"{name}_quantize", axis=0)
            )
        nodes.append(
            helper.make_node(
                "DequantizeLinear", [f"{name}_q", *parameters], [f"{name}_dq"], name=f"{name}_dequantize", axis=0
            )
        )
    body = convolutions()
    for node in body:
        for index, name in enumerate(node.input):
            if name in ("x", "r1", "f", "w1", "w2", "w3"):
                node.input[index] = f"{name}_dq"
    made = model(nodes + body, [info("x", ["N", 16, 16, 16])], [info("y", ["N", 10])], constants)
    return sorted_nodes(made)


def sorted_nodes(made: onnx.ModelProto) -> onnx.ModelProto:
    known = {tensor.name for tensor in made.graph.initializer} | {value.name for value in made.graph.input}
    waiting, ordered = list(made.graph.node), []
    while waiting:
        node = next(node for node in waiting if all(name in known for name in node.input))
        waiting.remove(node)
        ordered.append(node)
        known.update(node.output)
    del made.graph.node[:]
    made.graph.node.extend(ordered)
    return made


def nonzero_model() -> onnx.ModelProto:
    """The indices of the positive values: an output whose size depends on the data."""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="relu"),
        helper.make_node("NonZero", ["r"], ["n"], name="nonzero"),
        helper.make_node("Cast", ["n"], ["y"], name="cast", to=TensorProto.FLOAT),
    ]
    return model(nodes, [info("x", ["N", 8])], [info("y", [2, "K"])], {})


def two_input_model() -> onnx.ModelProto:
    """Rows of a table by number, scaled by a second input: an integer input, and two dynamic dimensions."""
    table = np.random.default_rng(3).normal(0, 1, (50, 8)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], name="gather"),
        helper.make_node("Mul", ["rows", "factor"], ["y"], name="scale"),
    ]
    inputs = [info("ids", ["N", "L"], TensorProto.INT64), info("factor", ["N", "L", 1])]
    return model(nodes, inputs, [info("y", ["N", "L", 8])], {"table": table})


def unsupported_model() -> onnx.ModelProto:
    """Two operators that no TensorRT imports, between ones that it does."""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="relu"),
        helper.make_node("Unique", ["r"], ["u"], name="first_unique"),
        helper.make_node("Unique", ["u"], ["y"], name="second_unique"),
    ]
    return model(nodes, [info("x", [8])], [info("y", ["K"])], {})


def depthwise_fp32() -> onnx.ModelProto:
    """A stem and three mobile blocks (expand, depthwise, project; ReLU6), the first and the last with a residual Add.

    The output channels of each layer differ in size by up to 16, so that a scale of another channel is seen.
    """
    generator = np.random.default_rng(11)
    constants: dict[str, np.ndarray] = {"low": np.float32(0), "high": np.float32(6)}
    nodes = []

    def conv(source: str, name: str, inputs: int, outputs: int, *, kernel: int, stride: int = 1, group: int = 1) -> str:
        shape = (outputs, inputs // group, kernel, kernel)
        size = np.exp2(generator.uniform(-2, 2, (outputs, 1, 1, 1)))
        constants[f"{name}_w"] = (size * generator.normal(0, np.sqrt(1 / np.prod(shape[1:])), shape)).astype(np.float32)
        constants[f"{name}_b"] = generator.normal(0, 0.3, outputs).astype(np.float32)
        nodes.append(
            helper.make_node(
                "Conv",
                [source, f"{name}_w", f"{name}_b"],
                [name],
                name=f"{name}_conv",
                kernel_shape=[kernel, kernel],
                pads=[kernel // 2] * 4,
                strides=[stride, stride],
                group=group,
            )
        )
        return name

    def relu6(source: str) -> str:
        nodes.append(helper.make_node("Clip", [source, "low", "high"], [f"{source}_r"], name=f"{source}_relu6"))
        return f"{source}_r"

    tensor, width = relu6(conv("x", "stem", 3, 16, kernel=3, stride=2)), 16
    for block, (outputs, stride) in enumerate(((16, 1), (32, 2), (32, 1))):
        wide = relu6(conv(tensor, f"b{block}_expand", width, 4 * width, kernel=1))
        deep = relu6(conv(wide, f"b{block}_deep", 4 * width, 4 * width, kernel=3, stride=stride, group=4 * width))
        out = conv(deep, f"b{block}_project", 4 * width, outputs, kernel=1)
        if outputs == width and stride == 1:
            nodes.append(helper.make_node("Add", [out, tensor], [f"b{block}_sum"], name=f"b{block}_add"))
            out = f"b{block}_sum"
        tensor, width = out, outputs
    constants["fc_w"] = generator.normal(0, np.sqrt(1 / width), (10, width)).astype(np.float32)
    nodes += [
        helper.make_node("GlobalAveragePool", [tensor], ["g"], name="mean"),
        helper.make_node("Flatten", ["g"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "fc_w"], ["y"], name="fc", transB=1),
    ]
    return model(nodes, [info("x", ["N", 3, 16, 16])], [info("y", ["N", 10])], constants)


def depthwise_qdq() -> tuple[onnx.ModelProto, list[str]]:
    """Its Q/DQ form, made by the pipeline's own stages, and the outputs of the quantised layers."""
    import calibrators
    from pipeline import calibrate, quantize
    from pipeline.config import PlacementConfig
    from pipeline.data.batching import Batch
    from pipeline.placement import make_plan
    from pipeline.prepare import run as prepare

    with tempfile.TemporaryDirectory() as scratch:
        folder, config = Path(scratch), PlacementConfig()
        onnx.save(depthwise_fp32(), folder / "net.onnx")
        prepared = prepare(folder / "net.onnx", folder=folder / "prepared").folder / "model.onnx"
        plan = make_plan(prepared, config)
        batches = [Batch(0, tuple(range(32)), {"x": colours(32)})]
        done = calibrate.run(prepared, plan.tensors, batches, folder=folder / "calibration")
        statistics, _ = calibrators.load_statistics(done.statistics_path)
        made = quantize.run(
            prepared, plan, statistics, calibrators.get("minmax"), folder=folder / "int8", config=config
        )
        layers = [decision.outputs[0] for decision in plan.decisions if decision.quantized]
        return onnx.load(made.model_path), layers


def clip_qdq() -> onnx.ModelProto:
    """A float convolution, clipped twice and quantised: to 0..6 with a range of 6, and to -3..3 with a range of 12."""
    generator = np.random.default_rng(13)
    draw = lambda *shape: generator.normal(0, 2 / np.sqrt(shape[1]), shape).astype(np.float32)  # noqa: E731
    constants = {"w": draw(CHANNELS, 16, 1, 1)}
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], name="conv", kernel_shape=[1, 1])]

    def pair(name: str, scale: np.ndarray, **attributes: int) -> str:
        constants[f"{name}_scale"] = np.asarray(scale, np.float32)
        constants[f"{name}_zero"] = np.zeros(np.shape(scale), np.int8)
        parameters = [f"{name}_scale", f"{name}_zero"]
        nodes.append(helper.make_node("QuantizeLinear", [name, *parameters], [f"{name}_q"], **attributes))
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}_q", *parameters], [f"{name}_dq"], **attributes))
        return f"{name}_dq"

    for output, low, high, largest in (("y", 0, 6, 6), ("z", -3, 3, 12)):
        constants |= {f"{output}_low": np.float32(low), f"{output}_high": np.float32(high)}
        clipped, kernel = f"{output}_clipped", f"{output}_w"
        nodes.append(helper.make_node("Clip", ["c", f"{output}_low", f"{output}_high"], [clipped], name=clipped))
        constants[kernel] = draw(CHANNELS, CHANNELS, 1, 1)
        each = np.abs(constants[kernel]).reshape(CHANNELS, -1).max(1) / 127
        inputs = [pair(clipped, np.float32(largest / 127)), pair(kernel, each, axis=0)]
        nodes.append(helper.make_node("Conv", inputs, [output], name=f"{output}_conv", kernel_shape=[1, 1]))
    outputs = [info(output, ["N", CHANNELS, 16, 16]) for output in ("y", "z")]
    return model(nodes, [info("x", ["N", 16, 16, 16])], outputs, constants)


def colours(count: int) -> np.ndarray:
    return np.random.default_rng(5).normal(0, 1, (count, 3, 16, 16)).astype(np.float32)


def calibration_cache() -> str:
    lines = ["TRT-8600-EntropyCalibration2"]
    for name, largest in amax(["x", "c1", "r1", "c2", "a", "r2", "g", "f", "y"]).items():
        lines.append(f"{name}: {struct.pack('>f', largest / 127).hex()}")
    return "\n".join(lines) + "\n"


def write(
    folder: Path, name: str, made: onnx.ModelProto, feeds: dict[str, np.ndarray] | None, *, extra: list[str]
) -> None:
    path = folder / f"{name}.onnx"
    if feeds is not None:
        onnx.checker.check_model(made)
    path.write_bytes(made.SerializeToString())
    if feeds is None:
        return
    captured = onnx.ModelProto()
    captured.CopyFrom(made)
    captured.graph.output.extend(onnx.ValueInfoProto(name=tensor) for tensor in extra)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(captured.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    outputs = dict(zip(names, session.run(None, feeds), strict=True))
    stored = {f"inputs/{key}": value for key, value in feeds.items()} | {
        f"outputs/{key}": value for key, value in outputs.items()
    }
    np.savez_compressed(folder / f"{name}.npz", **stored)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    images = {"x": samples(4)}
    write(folder, "conv_fp32", fp32_model(), images, extra=["r1", "r2"])
    write(folder, "conv_static", fp32_model(2), {"x": samples(2)}, extra=[])
    write(folder, "conv_qdq", qdq_model(), images, extra=["r1", "r2"])
    write(folder, "conv_qdq_stored", qdq_model(stored_weights=True), images, extra=[])
    write(folder, "nonzero", nonzero_model(), {"x": samples(1)[0, 0, :4, :8].copy()}, extra=[])
    ids = np.arange(12, dtype=np.int64).reshape(3, 4)
    write(
        folder, "two_inputs", two_input_model(), {"ids": ids, "factor": np.full((3, 4, 1), 0.5, np.float32)}, extra=[]
    )
    write(folder, "unsupported", unsupported_model(), None, extra=[])
    quantised, layers = depthwise_qdq()
    write(folder, "depthwise_qdq", quantised, {"x": colours(2)}, extra=[name for name in layers if name != "y"])
    write(folder, "clip_qdq", clip_qdq(), {"x": samples(1)}, extra=[])
    (folder / "conv_fp32.cache").write_text(calibration_cache())


if __name__ == "__main__":
    main()
