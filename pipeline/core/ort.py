"""onnxruntime sessions that return chosen intermediate tensors beside the graph's outputs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import InputError, ToolError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["EXTERNAL_DATA_KEY", "cpu_threads", "make_session", "read_graph"]

EXTERNAL_DATA_KEY = "session.model_external_initializers_file_folder_path"
_FATAL = 4
"""Log level: the text of an error is in its exception, and need not be printed too."""


def cpu_threads() -> int:
    """Cores this process may use (its affinity mask), not the cores of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_graph(model: Path) -> Any:
    """The file as an ``onnx.ModelProto``; external weights are not opened.

    Raises:
        InputError: the file is missing or no ONNX model.
    """
    import onnx

    try:
        proto = onnx.load(model, load_external_data=False)
    except FileNotFoundError as error:
        raise InputError(f"model {model} does not exist") from error
    except Exception as error:  # protobuf's own errors have no common type
        raise InputError(f"{model} is not a readable ONNX model: {error}", remedy="export it again") from error
    if not proto.graph.node and not proto.graph.output:  # an empty file is read as such a model
        raise InputError(
            f"{model} is not a readable ONNX model: it has no graph", remedy="it may be empty or truncated"
        )
    return proto


def make_session(
    model: Path | Any,
    *,
    capture: Sequence[str] = (),
    optimise: bool = True,
    threads: int | None = None,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    external_data_dir: Path | None = None,
    spin: bool = True,
    save_optimised: Path | None = None,
) -> Any:
    """An ``onnxruntime.InferenceSession`` whose outputs are the graph's own and then ``capture``, in that order.

    Args:
        model: path of an ``.onnx`` file or an ``onnx.ModelProto`` (left as it is).
        capture: names of intermediate tensors to return as well.
        optimise: False switches every graph optimisation off. True never fuses Q/DQ nodes into integer kernels: those
            saturate on CPUs without VNNI and are not what TensorRT computes. The float kernels of the two round
            differently, which moves values across the steps of a Q/DQ pair: about as much as a change of the biases
            by a millionth does.
        threads: intra-op threads; None takes :func:`cpu_threads`.
        external_data_dir: where external weights of a ``ModelProto`` lie; a path brings its own folder.
        spin: False lets idle threads sleep at once, for callers that compute something else between runs.
        save_optimised: where to write the graph as optimised for this machine. The session itself is not meant to be
            run: its weights are not brought into the order that its kernels like best.

    Raises:
        InputError: the file is missing or no ONNX model, or a tensor in ``capture`` does not exist.
        ToolError: onnxruntime refuses the model; its own words are kept.
    """
    import onnx
    import onnxruntime

    onnxruntime.set_default_logger_severity(_FATAL)
    options = onnxruntime.SessionOptions()
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimise else level.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads or cpu_threads()
    options.log_severity_level = _FATAL
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if not spin:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if save_optimised is not None:
        options.optimized_model_filepath = str(save_optimised)
        options.add_session_config_entry("session.disable_prepacking", "1")
    if isinstance(model, (str, Path)):
        path = Path(model)
        external_data_dir = path.parent
        proto = read_graph(path)
    else:
        proto = model
    if capture:
        produced = {name for node in proto.graph.node for name in node.output} | {i.name for i in proto.graph.input}
        if missing := [name for name in capture if name not in produced]:
            raise InputError(
                f"tensor {missing[0]!r} to capture does not exist in the graph ({len(missing)} missing in all)"
            )
        extended = onnx.ModelProto()
        extended.CopyFrom(proto)
        present = {output.name for output in proto.graph.output}
        extended.graph.output.extend(onnx.ValueInfoProto(name=name) for name in capture if name not in present)
        proto = extended
    if external_data_dir is not None:
        options.add_session_config_entry(EXTERNAL_DATA_KEY, str(external_data_dir))
    try:
        return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=list(providers))
    except Exception as error:
        which = str(model) if isinstance(model, (str, Path)) else "the model"
        raise ToolError(f"onnxruntime cannot load {which}: {error}") from error
