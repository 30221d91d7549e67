"""What the exporter is given, from the user's example, ``--input`` and profiles."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pipeline.config import InputSpec, Profile  # noqa: E402
from pipeline.usercode.child.examples import Example, check_inputs, resolve_example  # noqa: E402
from pipeline.usercode.child.loading import Complaint  # noqa: E402


class Two(torch.nn.Module):
    def forward(self, ids, mask=None):
        return ids


def _resolve(given: Any = None, inputs: tuple[str, ...] = (), profiles: tuple[str, ...] = ()) -> Example:
    return resolve_example(
        Two(),
        given,
        [InputSpec.model_validate(text).model_dump(mode="json") for text in inputs],
        [Profile.parse(text).model_dump(mode="json")["inputs"] for text in profiles],
    )


def _shapes(tensors: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_names_of_forward_for_a_tensor_and_a_tuple() -> None:
    assert _resolve(torch.ones(2, 3)).names == ["ids"]
    found = _resolve((torch.ones(2, 3), torch.ones(2, 3)))
    assert found.names == ["ids", "mask"]
    assert found.by_keyword
    assert found.dynamic == {}


def test_names_of_the_profile_where_they_are_others() -> None:
    found = _resolve(torch.ones(2, 3), profiles=("x=1x3,2x3,8x3",))
    assert found.names == ["x"]
    assert not found.by_keyword
    assert len(found.args) == 1
    assert found.kwargs == {}


def test_dict_keeps_its_order_and_goes_by_keyword() -> None:
    found = _resolve({"mask": torch.ones(2, 3), "ids": torch.ones(2, 3)})
    assert found.names == ["mask", "ids"]
    assert found.args == ()
    assert list(found.kwargs) == ["mask", "ids"]


def test_dynamic_dimensions_from_profiles() -> None:
    found = _resolve(profiles=("ids=1x8,4x8,16x8;mask=1x4,4x8,16x32",))
    assert found.dynamic == {"ids": {0: "batch"}, "mask": {0: "batch", 1: "mask_dim1"}}
    assert _shapes(found.tensors) == {"ids": (2, 8), "mask": (2, 8)}
    first, second = check_inputs(found)
    assert _shapes(first) == {"ids": (1, 8), "mask": (1, 8)}
    assert _shapes(second) == {"ids": (3, 8), "mask": (3, 4)}


def test_dimensions_that_differ_between_profiles_are_dynamic() -> None:
    found = _resolve(profiles=("ids=1x224", "ids=1x448"))
    assert found.dynamic == {"ids": {1: "ids_dim1"}}


def test_narrow_ranges() -> None:
    found = _resolve(profiles=("ids=4x8,6x8,6x8",))
    assert _shapes(found.tensors) == {"ids": (4, 8)}
    assert [_shapes(item)["ids"] for item in check_inputs(found)] == [(4, 8), (6, 8)]
    assert check_inputs(_resolve(profiles=("ids=4x8",)))[1]["ids"].shape == (4, 8)


def test_words_and_types_of_the_input_option() -> None:
    found = _resolve(inputs=("ids:Nx7:int64", "mask:1x7:bool"))
    assert found.dynamic == {"ids": {0: "N"}}
    assert found.tensors["ids"].dtype == torch.int64
    assert found.tensors["mask"].dtype == torch.bool
    assert [tuple(item["ids"].shape) for item in check_inputs(found)] == [(1, 7), (3, 7)]


def test_other_names_in_the_order_of_forward_go_by_position() -> None:
    found = _resolve(inputs=("ids:1x2:int64", "attention:1x2:int64"))
    assert not found.by_keyword
    assert found.names == ["ids", "attention"]
    assert found.renamed == {"attention": "mask"}
    assert _resolve(torch.ones(2, 3), profiles=("idz=1x3,2x3,8x3",)).renamed == {"idz": "ids"}
    assert _resolve(inputs=("mask:1x2:int64",)).renamed == _resolve(profiles=("ids=1x2",)).renamed == {}


def test_check_values_come_from_the_users_example() -> None:
    given = torch.tensor([[7, 9, 11], [7, 9, 11]])
    found = _resolve(given, profiles=("ids=1x3,2x3,8x3",))
    for item in check_inputs(found):
        assert set(item["ids"].flatten().tolist()) <= {7, 9, 11}
    first, second = check_inputs(_resolve(profiles=("ids=2x300",)))
    assert not torch.equal(first["ids"], second["ids"])
    assert torch.equal(first["ids"], check_inputs(_resolve(profiles=("ids=2x300",)))[0]["ids"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "nothing says what the model's inputs are"),
        ({"given": 5}, "the example inputs are int"),
        ({"given": {"ids": [1]}}, "the example input 'ids' is list, not a tensor"),
        ({"given": (torch.ones(1),) * 3}, "the example has 3 inputs and forward has 2 named parameters"),
        ({"inputs": ("ids:1x2:float33",)}, "input 'ids' has the unknown type 'float33'"),
        (
            {"given": {"ids": torch.ones(2, 2)}, "profiles": ("idz=1x2,2x2,3x2",)},
            "a profile names the input 'idz', and the model's inputs are ids",
        ),
        (
            {"given": {"ids": torch.ones(2, 2)}, "profiles": ("ids=1x2x2",)},
            r"input 'ids' is \(2, 2\), a profile has \[1, 2, 2\]",
        ),
        (
            {"inputs": ("attention:1x2:int64", "ids:1x2:int64")},
            "'attention' is no parameter of forward, so inputs go by position, where 'ids' is another one",
        ),
        (
            {"given": (torch.ones(2, 2), torch.ones(2, 2)), "profiles": ("mask=1x2,2x2,3x2;words=1x2,2x2,3x2",)},
            "'words' is no parameter of forward, so inputs go by position, where 'mask' is another one",
        ),
    ],
)
def test_faults(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(Complaint, match=message):
        _resolve(**arguments)
