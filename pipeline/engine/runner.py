"""Run an engine: TensorRT and PyCUDA, nothing else.

A :class:`Runner` keeps a pool of slots (:mod:`pipeline.engine.pool`). A slot has a stream, pinned host buffers, device
buffers and scratch memory, which its execution contexts share and which only grow; there is one context per profile, or
one per shape where CUDA graphs are replayed, since a graph holds only as long as its context is left alone. Copies of
one request overlap with the computation of another; results come back in order through :meth:`Serving.map`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.artifact import Artifact
from pipeline.core.errors import InputError, ToolError, did_you_mean
from pipeline.engine.compat import Api, load_api
from pipeline.engine.cuda import Device, open_device
from pipeline.engine.loading import artifact_engine, load_engine
from pipeline.engine.pool import SlotPool
from pipeline.engine.serving import Arrays, Request, Serving
from pipeline.engine.slot import Slot
from pipeline.engine.tensors import EngineIO, checked

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.config import Profile
    from pipeline.engine.profiles import Shape
    from pipeline.engine.records import EngineRecord
    from pipeline.records import TensorSpec

__all__ = ["Runner"]


class Runner(Serving):
    """An engine, ready to answer from any thread.

    Args:
        plan: path or bytes of an engine.
        target: ``tensorrt`` or ``rtx``.
        record: what ``build.json`` beside the plan says; it lets a wrong card or version be named at once.
        in_flight: requests that may be on the card at a time; each has buffers and scratch memory of its own.
        cuda_graphs: replay a graph for each shape that was seen before. Where an engine cannot be captured
            (outputs of data-dependent size) its kernels are launched one by one; :attr:`uncaptured` says why.
        graphs_kept: shapes per slot whose graph and context are kept, least recently used first out.

    Raises:
        InputError: the engine is for another card or version; PyCUDA or TensorRT is not installed.
        ToolError: no card, no memory, or TensorRT refuses, in its own words.
    """

    def __init__(
        self,
        plan: Path | bytes,
        *,
        target: str = "tensorrt",
        record: EngineRecord | None = None,
        in_flight: int = 1,
        cuda_graphs: bool = False,
        graphs_kept: int = 8,
        device_number: int = 0,
    ) -> None:
        if in_flight < 1 or graphs_kept < 1:
            raise InputError(f"in_flight and graphs_kept must be at least 1, got {in_flight} and {graphs_kept}")
        self.api: Api = load_api(target)
        self.device: Device = open_device(device_number)
        self.in_flight = in_flight
        self._uncaptured: dict[str, str] = {}
        self._warned: set[str] = set()
        with self.device.active():
            before = self.device.free_bytes()
            self._loaded = load_engine(plan, self.api, device=self.device.info, record=record)
            self._pool = SlotPool(self.device, self._loaded)
            try:
                self.io = EngineIO(self._loaded.engine, self.api)
                for _ in range(in_flight):
                    self._pool.add(
                        Slot(self.device, self._loaded, self.io, graphs_kept if cuda_graphs else 0, self._uncaptured)
                    )
            except BaseException:
                self._pool.free()
                raise
            self._device_bytes = max(0, before - self.device.free_bytes())
        self.device.users.add(self._pool)

    @classmethod
    def from_artifact(cls, folder: Path, *, target: str = "tensorrt", **options: Any) -> Runner:
        """The INT8 engine of an artifact, which must be unchanged since it was written.

        :func:`pipeline.engine.dispatch.serve` uses a float plan beside it too.

        Raises:
            InputError: no such artifact or engine, or one for another card or version.
            CheckFailed: the engine is not the one that the manifest lists.
        """
        plan, record = artifact_engine(Artifact.open(folder), target)
        return cls(plan, target=target, record=record, **options)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.io.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.io.outputs

    @property
    def profiles(self) -> tuple[Profile, ...]:
        return self.io.profiles

    @property
    def device_bytes(self) -> int:
        return self._device_bytes

    @property
    def closed(self) -> bool:
        return self._pool.closed

    @property
    def uncaptured(self) -> Mapping[str, str]:
        return self._uncaptured

    def check(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        names = [spec.name for spec in self.inputs]
        for name in feeds:
            if name not in names:
                raise InputError(f"the engine has no input {name!r}; {did_you_mean(name, names)}")
        arrays: Arrays = {}
        for spec in self.inputs:
            if spec.name not in feeds:
                raise InputError(f"input {spec.name!r} ({spec.dtype}, {spec.shape}) is missing")
            values = checked(spec, feeds[spec.name])
            if not values.flags.c_contiguous:
                if spec.name not in self._warned:
                    self._warned.add(spec.name)
                    warnings.warn(
                        f"input {spec.name!r} is not contiguous and copied each time: pass np.ascontiguousarray(...)",
                        RuntimeWarning,
                        stacklevel=3,
                    )
                values = np.ascontiguousarray(values)
            arrays[spec.name] = values
        return arrays

    def layer_times(self, feeds: Mapping[str, np.ndarray], *, runs: int = 20) -> dict[str, float]:
        """Median time of each layer in milliseconds, in the engine's order, from TensorRT's own profiler.

        The times add up to more than a normal run takes: the profiler puts events between the layers.
        """
        arrays = self.check(feeds)
        with self.request({name: values.shape for name, values in arrays.items()}) as request:
            for name, values in arrays.items():
                np.copyto(request.inputs[name], values)
            with self.device.active():
                return request._slot.layer_times(runs)

    def run_watched(self, feeds: Mapping[str, np.ndarray], listener: Any) -> Arrays:
        """One request whose unfused tensors TensorRT hands to ``listener``, an ``IDebugListener``, while it runs.

        The engine must have been built with :attr:`BuildOptions.watch_unfused`, and run without CUDA graphs: a graph
        that is replayed calls nobody.

        Raises:
            ToolError: TensorRT refuses the listener.
        """
        arrays = self.check(feeds)
        with self.request({name: values.shape for name, values in arrays.items()}) as request:
            with self.device.active():
                watched = self.api.watch_unfused(request._slot.context, listener)
            if not watched:
                raise ToolError(f"{self.api.title} hands out no debug tensors of this engine")
            for name, values in arrays.items():
                np.copyto(request.inputs[name], values)
            request.submit()
            return {name: values.copy() for name, values in request.wait().items()}

    def layer_information(self, shapes: Mapping[str, Shape] | None = None) -> str:
        """The engine inspector's JSON.

        Args:
            shapes: inputs' shapes. TensorRT 8.6 tells formats and types of a dynamic engine's tensors only for an
                execution context that stands on shapes, and those of its profile. Where it has no word for such a
                context (seen with float engines on their first profile), the answer is as without shapes.
        """
        inspector = self._loaded.engine.create_engine_inspector()
        form = self.api.trt.LayerInformationFormat.JSON
        if shapes is None:
            return str(inspector.get_engine_information(form))
        with self.request(shapes) as request, self.device.active():
            inspector.execution_context = request._slot.context
            text = str(inspector.get_engine_information(form))
            del inspector  # before the context that it looks at
        return text or self.layer_information()

    def close(self) -> None:
        self._pool.close()

    def open_request(self, shapes: Mapping[str, Shape]) -> Request:
        slot = self._pool.take()
        try:
            with self.device.active():
                return Request(self._pool, slot, shapes)
        except BaseException:
            self._pool.give_back(slot)
            raise
