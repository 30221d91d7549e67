from __future__ import annotations

import pytest

from pipeline.consistency.launch import Launch, launched, own_cores
from pipeline.core.errors import InputError

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29400", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1",
}  # fmt: skip


def test_what_torchrun_sets() -> None:
    assert launched(TORCHRUN)
    assert Launch.from_environment(TORCHRUN) == Launch(3, 4, 1, 2, "node-a", 29400, True, "1")


def test_a_launcher_without_local_variables_starts_one_rank_a_machine() -> None:
    values = {key: value for key, value in TORCHRUN.items() if not key.startswith("LOCAL")}
    launch = Launch.from_environment(values)
    assert (launch.local_rank, launch.local_size) == (0, 1)


def test_alone() -> None:
    assert not launched({})
    assert Launch.from_environment({}) == Launch()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "4"}, "RANK is 4 and WORLD_SIZE is 4"),
        ({"RANK": "two"}, "RANK is 'two', expected a whole number"),
        ({"MASTER_ADDR": ""}, "WORLD_SIZE is 4 and MASTER_ADDR is not set"),
        ({"MASTER_PORT": ""}, "WORLD_SIZE is 4 and MASTER_PORT is not set"),
    ],
)
def test_wrong_variables(change: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Launch.from_environment(TORCHRUN | change)


@pytest.mark.parametrize(
    ("cores", "size", "expected"),
    [
        ([0, 1], 1, [[0, 1]]),
        ([0, 1], 2, [[0], [1]]),
        ([4, 5, 6, 7, 8], 2, [[4, 5], [6, 7, 8]]),
        ([0, 1], 4, [[0], [1], [0], [1]]),
    ],
)
def test_cores_of_each_rank(cores: list[int], size: int, expected: list[list[int]]) -> None:
    assert [own_cores(cores, rank, size) for rank in range(size)] == expected
