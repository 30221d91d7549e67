"""TensorRT's words: collected in order, filtered, and asked for what matters."""

from __future__ import annotations

from types import SimpleNamespace

from pipeline.engine.calibration import cache_version
from pipeline.engine.compat import Api
from pipeline.engine.messages import make_error_recorder, make_logger, skipped_tactics, worst_words
from pipeline.engine.records import Message
from tests.engine.fakes import FakeGraphs, fake_tensorrt


def message(severity: str, text: str, source: str = "logger") -> Message:
    return Message(severity=severity, source=source, text=text)  # type: ignore[arg-type]


def api() -> Api:
    trt = fake_tensorrt(FakeGraphs())
    trt.IErrorRecorder = type("IErrorRecorder", (), {"__init__": lambda self: None})
    return Api(trt=trt, rtx=False, version="8.6.0")


def test_the_logger_keeps_order_and_drops_verbose_lines_unless_wanted() -> None:
    for verbose, expected in ((False, ["warning", "info"]), (True, ["warning", "verbose", "info"])):
        received: list[Message] = []
        logger = make_logger(api(), received.append, verbose=verbose)
        for severity in (2, 4, 3):
            logger.log(severity, "text")
        assert [m.severity for m in received] == expected
        assert {m.source for m in received} == {"logger"}


def test_the_recorder_answers_tensorrts_questions() -> None:
    received: list[Message] = []
    recorder = make_error_recorder(api(), received.append)
    assert recorder.report_error(SimpleNamespace(name="INVALID_CONFIG"), "no profile") is False
    assert (recorder.num_errors(), recorder.has_overflowed()) == (1, False)
    assert recorder.get_error_desc(0) == "no profile"
    assert recorder.get_error_code(0).name == "INVALID_CONFIG"
    recorder.clear()
    assert recorder.num_errors() == 0
    assert [(m.source, m.text) for m in received] == [("error recorder", "INVALID_CONFIG: no profile")]


def test_errors_come_before_warnings_and_no_driver_lines_say_nothing() -> None:
    words = [message("info", "hello"), message("warning", "careful"), message("error", "cudaError 35: no driver")]
    assert worst_words(words) == "careful"
    assert worst_words([*words, message("error", "real"), message("error", "real")]) == "real"
    assert worst_words([message("warning", "ours", "check"), message("info", "hello")]) == ""
    about_cache = message("error", "The timing cache will not be used!", "timing cache")
    assert worst_words([about_cache, *words[:2]]) == "careful"


def test_lines_about_workspace_are_recognised() -> None:
    lines = [
        "Tactic Device request: 1234MB Available: 12MB. Device memory is insufficient to use tactic.",
        "Skipping tactic 3 due to insufficient memory on requested size of 512 detected for tactic 0x1.",
        "Some tactics do not have sufficient workspace memory to run. Increasing workspace size will enable more",
        "an unrelated warning",
    ]
    assert len(skipped_tactics([message("warning", line) for line in lines])) == 3


def test_the_header_of_a_cache_has_the_versions_number() -> None:
    assert cache_version(Api(trt=None, rtx=False, version="8.6.0")) == "8600"
    assert cache_version(Api(trt=None, rtx=False, version="8.2.5.1")) == "8205"
    assert cache_version(Api(trt=None, rtx=False, version="10.16.1.11")) == "101601"
