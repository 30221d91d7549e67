"""Engines that cannot run here are refused before TensorRT says something obscure."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.core.errors import InputError, ToolError
from pipeline.engine.compat import Api
from pipeline.engine.loading import check_engine, load_engine
from pipeline.engine.records import BuildOptions
from pipeline.engine.runner import Runner
from tests.engine.conftest import CARD
from tests.engine.fakes import plan
from tests.engine.records import OTHER, record

OLD = Api(trt=SimpleNamespace(), rtx=False, version="8.6.0")
NEW = Api(trt=SimpleNamespace(), rtx=False, version="10.16.1.11")
NEWEST = Api(trt=SimpleNamespace(), rtx=False, version="11.4.0.106")
RTX = Api(trt=SimpleNamespace(), rtx=True, version="1.7.1.116")
PORTABLE = BuildOptions(version_compatible=True)
AMPERE = BuildOptions(hardware_compatibility="ampere_plus")


def test_the_same_version_and_card_pass() -> None:
    assert check_engine(record(), OLD, CARD) == ()


def test_another_card_of_the_same_kind_is_a_warning() -> None:
    twin = CARD.model_copy(update={"name": "Twin"})
    assert check_engine(record(device=twin), OLD, CARD) == (
        "the engine was tuned on the Twin, this is a Fake card: one built here may be faster",
    )


@pytest.mark.parametrize(
    ("fields", "api", "words"),
    [
        ({"tensorrt": "8.5.3.1"}, OLD, "built with version 8.5.3.1, this is TensorRT 8.6.0"),
        ({}, NEW, "built with version 8.6.0, this is TensorRT 10.16.1.11"),
        ({"device": OTHER}, OLD, r"built for compute capability 8.6 \(Other card\); the Fake card has 9.0"),
        ({"target": "rtx"}, OLD, "built for target rtx, this is TensorRT 8.6.0"),
        ({"options": PORTABLE}, NEWEST, "built with version 8.6.0, this is TensorRT 11.4"),
        ({"options": PORTABLE, "tensorrt": "10.16.1.11"}, OLD, "built with version 10.16"),
        ({"target": "rtx", "tensorrt": "1.7.1.116"}, RTX, r"8.0, 8.6, 8.9, 12.0, 12.1, newer; the Fake card has 9.0"),
    ],
)
def test_what_cannot_run_is_refused_with_the_remedy(fields: dict[str, object], api: Api, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        check_engine(record(**fields), api, CARD)
    assert caught.value.remedy


def test_portable_engines_pass_where_they_may() -> None:
    assert check_engine(record(options=PORTABLE), NEW, CARD) == ()
    assert check_engine(record(options=PORTABLE, tensorrt="10.16.1.11"), NEWEST, CARD) == ()
    assert "built on the Other card" in check_engine(record(options=AMPERE, device=OTHER), OLD, CARD)[0]
    rtx = {"target": "rtx", "tensorrt": "1.7.1.116", "device": None}
    assert check_engine(record(**rtx), RTX, OTHER) == ()
    named = BuildOptions(compute_capabilities=("7.5",))
    turing = OTHER.model_copy(update={"compute_capability": "7.5", "name": "T4"})
    assert check_engine(record(**rtx, options=named), RTX, turing) == ()
    with pytest.raises(InputError, match=r"built for compute capability 8\.0(.|\n)*--compute-capability"):
        check_engine(record(**rtx), RTX, turing)


def test_without_a_card_nothing_runs() -> None:
    with pytest.raises(ToolError, match="no engine can run here"):
        check_engine(record(), OLD, None)


def test_loading_without_a_driver_never_reaches_tensorrt() -> None:
    with pytest.raises(ToolError, match="no engine can run here"):
        load_engine(b"plan", Api(trt=None, rtx=False, version="8.6.0"), device=None)


def test_plans_that_are_missing_empty_or_damaged(card: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        Runner(tmp_path / "none.plan")
    with pytest.raises(InputError, match="cannot read"):
        Runner(tmp_path)
    empty = tmp_path / "empty.plan"
    empty.write_bytes(b"")
    with pytest.raises(InputError, match="is empty"):
        Runner(empty)
    with pytest.raises(ToolError, match=r"cannot load the plan:(.|\n)*magicTagRead"):
        Runner(b"no engine")


def test_a_record_that_does_not_fit_stops_the_load(card: SimpleNamespace) -> None:
    with pytest.raises(InputError, match=r"built with version 8\.5"):
        Runner(plan(), record=record(tensorrt="8.5.0"))
    with Runner(plan(), record=record()) as runner:
        assert runner.outputs


def test_a_version_compatible_engine_may_bring_host_code(card: SimpleNamespace) -> None:
    with Runner(plan(), record=record(options=PORTABLE)) as runner:
        assert runner._loaded.runtime.engine_host_code_allowed


def test_one_logger_per_process_writes_into_the_latest_engine(card: SimpleNamespace) -> None:
    with Runner(plan()) as first, Runner(plan()) as second:
        assert first._loaded.logger is second._loaded.logger
        first._loaded.logger.log(2, "a warning")
        assert [message.text for message in second._loaded.messages] == ["a warning"]
        assert not first._loaded.messages
