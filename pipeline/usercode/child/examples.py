"""Example inputs of a module: from the user's example, from ``--input``, or from the profiles."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch

from .loading import Complaint

__all__ = ["Example", "check_inputs", "resolve_example"]

_NO_INPUT = (
    'give --profile "x=1x3x224x224,8x3x224x224,64x3x224x224" or --input x:1x3x224x224:float32, '
    "or let the callable return (module, example inputs)"
)
_FREE_SIZE = 2
"""Size of a dynamic dimension about which nothing is known; one would be taken for a constant by the exporter."""


@dataclass
class Example:
    """One set of inputs and what may vary in it."""

    tensors: dict[str, torch.Tensor]
    """Input name to tensor, in the module's order."""
    by_keyword: bool
    """Whether the names are parameters of ``forward`` to be passed by keyword."""
    dynamic: dict[str, dict[int, str]] = field(default_factory=dict)
    """Input name -> axis -> name of the dynamic dimension."""
    ranges: dict[str, dict[int, tuple[int, int, int]]] = field(default_factory=dict)
    """Input name -> axis -> smallest, optimal, largest size."""
    given: bool = False
    """Whether the values are the user's."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Input name -> the parameter of ``forward`` that it becomes by its position, where that is called otherwise."""

    @property
    def names(self) -> list[str]:
        return list(self.tensors)

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        return self.rebuilt(self.tensors)[0]

    @property
    def kwargs(self) -> dict[str, torch.Tensor]:
        return self.rebuilt(self.tensors)[1]

    def rebuilt(self, tensors: dict[str, torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """Positional and keyword arguments of the module."""
        return ((), dict(tensors)) if self.by_keyword else (tuple(tensors.values()), {})


def resolve_example(
    module: torch.nn.Module, given: Any, inputs: list[dict[str, Any]], profiles: list[dict[str, Any]]
) -> Example:
    """The example to export with.

    Args:
        given: what the callable returned beside the module: a tensor, a tuple or list of them, a dict, or None.
        inputs: ``--input``: name, shape (ints and words), dtype.
        profiles: input name -> ``min``, ``opt``, ``max``.

    Raises:
        Complaint: nothing says what the inputs are, or the parts contradict each other.
    """
    parameters = _parameters(module)
    words: dict[str, dict[int, str]] = {}
    if inputs:
        tensors = {}
        for spec in inputs:
            words[spec["name"]] = {axis: dim for axis, dim in enumerate(spec["shape"]) if not isinstance(dim, int)}
            shape = [dim if isinstance(dim, int) else _FREE_SIZE for dim in spec["shape"]]
            tensors[spec["name"]] = _values(shape, _dtype(spec["dtype"], spec["name"]))
    elif given is not None:
        tensors = _given(given, parameters, list(profiles[0]) if profiles else [])
    elif profiles:
        tensors = {name: _values(shapes["opt"], torch.float32) for name, shapes in profiles[0].items()}
    else:
        raise Complaint("nothing says what the model's inputs are", _NO_INPUT)
    example = Example(tensors, by_keyword=set(tensors) <= set(parameters), given=given is not None and not inputs)
    if not example.by_keyword:
        _check_positions(list(tensors), parameters)
        example.renamed = {name: own for name, own in zip(tensors, parameters, strict=False) if name != own}
    _set_dynamic(example, words, profiles)
    return example


def _check_positions(names: list[str], parameters: list[str]) -> None:
    """By position, no input may become a parameter of ``forward`` that has another one's name."""
    for position, name in enumerate(names):
        if name in parameters and parameters.index(name) != position:
            strange = ", ".join(repr(each) for each in names if each not in parameters)
            raise Complaint(
                f"{strange} is no parameter of forward, so inputs go by position, where {name!r} is another one",
                f"forward takes {', '.join(parameters)}: give these names, or the inputs in this order",
            )


def _parameters(module: torch.nn.Module) -> list[str]:
    try:
        found = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # a compiled or scripted forward
        return []
    return [item.name for item in found if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)]


def _given(given: Any, parameters: list[str], profiled: list[str]) -> dict[str, torch.Tensor]:
    if isinstance(given, dict):
        tensors = {str(name): value for name, value in given.items()}
    else:
        values = (
            [given] if isinstance(given, torch.Tensor) else list(given) if isinstance(given, (tuple, list)) else None
        )
        if values is None:
            raise Complaint(
                f"the example inputs are {type(given).__name__}",
                "return a tensor, a tuple of tensors or a dict by input name",
            )
        names = parameters[: len(values)]
        # A profile written for other names than forward's gives its own, where that is unambiguous.
        if profiled and not set(profiled) <= set(names) and len(profiled) == len(values):
            names = profiled
        if len(names) < len(values):
            raise Complaint(
                f"the example has {len(values)} inputs and forward has {len(parameters)} named parameters",
                "return the example as a dict by input name",
            )
        tensors = dict(zip(names, values, strict=True))
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise Complaint(f"the example input {name!r} is {type(value).__name__}, not a tensor", "give tensors only")
    return {name: value.detach().cpu() for name, value in tensors.items()}


def _dtype(text: str, name: str) -> torch.dtype:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise Complaint(
            f"input {name!r} has the unknown type {text!r}", "give a type such as float32, float16, int64 or bool"
        )
    return dtype


def _values(shape: list[int], dtype: torch.dtype, like: torch.Tensor | None = None, seed: int = 0) -> torch.Tensor:
    """Reproducible values: drawn from those of ``like`` where it has several, else standard normal or 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    if like is not None and like.numel() and bool((like != like.flatten()[0]).any()):
        count = int(torch.Size(shape).numel())
        return like.flatten()[torch.randint(like.numel(), (count,), generator=generator)].reshape(shape)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _set_dynamic(example: Example, words: dict[str, dict[int, str]], profiles: list[dict[str, Any]]) -> None:
    """Dynamic are the dimensions that differ within or between the profiles, and those with a word in ``--input``."""
    for profile in profiles:
        for name in profile:
            if name not in example.tensors:
                raise Complaint(
                    f"a profile names the input {name!r}, and the model's inputs are {', '.join(example.names)}",
                    "use the names of forward's parameters, of the example dict, or of --input",
                )
    for name, tensor in list(example.tensors.items()):
        shapes = [profile[name] for profile in profiles if name in profile]
        rank = tensor.dim()
        for shape in shapes:
            if len(shape["opt"]) != rank:
                raise Complaint(f"input {name!r} is {tuple(tensor.shape)}, a profile has {shape['opt']}")
        sizes = list(tensor.shape)
        for axis in range(rank):
            word = words.get(name, {}).get(axis)
            if shapes:
                low = min(shape["min"][axis] for shape in shapes)
                high = max(shape["max"][axis] for shape in shapes)
                middle = shapes[0]["opt"][axis]
                sizes[axis] = middle
                if low == high:
                    continue
                # A size of one would be taken for a constant; the batch is kept small to be quick.
                sizes[axis] = min(high, max(low, _FREE_SIZE)) if axis == 0 else max(middle, min(high, _FREE_SIZE))
                example.ranges.setdefault(name, {})[axis] = (low, middle, high)
            elif word is None:
                continue
            example.dynamic.setdefault(name, {})[axis] = word or ("batch" if axis == 0 else f"{name}_dim{axis}")
        if sizes != list(tensor.shape):
            example.tensors[name] = _values(sizes, tensor.dtype, tensor if example.given else None)


def check_inputs(example: Example) -> list[dict[str, torch.Tensor]]:
    """Two sets of inputs, of different batch size where the batch is dynamic, both unlike the size exported with.

    Other dynamic dimensions take their optimal size in the first set and their smallest in the second.
    """
    found = []
    for number in range(2):
        tensors = {}
        for name, tensor in example.tensors.items():
            sizes = list(tensor.shape)
            for axis in example.dynamic.get(name, {}):
                low, middle, high = example.ranges.get(name, {}).get(axis, (1, sizes[axis], sizes[axis] + 2))
                if axis == 0:
                    sizes[axis] = low if number == 0 else min(high, low + 2)
                else:
                    sizes[axis] = middle if number == 0 else low
            tensors[name] = _values(sizes, tensor.dtype, tensor if example.given else None, seed=number + 1)
        found.append(tensors)
    return found
