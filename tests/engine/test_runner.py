"""The runner's own logic on a fake card: pool, buffers, profiles, graphs, errors."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.core.errors import InputError, ToolError
from pipeline.engine.runner import Runner
from tests.engine.fakes import MEMORY_BYTES, plan

Card = SimpleNamespace


def rows(count: int, value: float = 1.0) -> np.ndarray:
    return np.full((count, 3), value, np.float32)


@pytest.mark.parametrize("graphs", [False, True])
def test_shapes_come_and_go(card: Card, graphs: bool) -> None:
    with Runner(plan(), cuda_graphs=graphs, graphs_kept=2) as runner:
        for number, count in enumerate((1, 8, 3, 8, 1, 2, 8)):
            found = runner({"x": rows(count, number)})["y"]
            assert found.shape == (count, 3)
            assert np.all(found == 2 * number)
    assert (card.graphs.launches == 7) == graphs


def test_inputs_outputs_and_profiles_are_described(card: Card) -> None:
    with Runner(plan(profiles=[[(1, 3), (2, 3), (4, 3)], [(5, 3), (8, 3), (16, 3)]])) as runner:
        (spec,) = runner.inputs
        assert (spec.name, spec.dtype, spec.shape) == ("x", "float32", ("?", 3))
        assert [str(profile) for profile in runner.profiles] == ["x=1x3,2x3,4x3", "x=5x3,8x3,16x3"]
        assert runner.outputs[0].name == "y"
        for count in (1, 4, 5, 16):
            assert runner({"x": rows(count)})["y"].shape == (count, 3)


def test_results_are_copies(card: Card) -> None:
    with Runner(plan()) as runner:
        first = runner({"x": rows(2, 1)})["y"]
        runner({"x": rows(2, 5)})
        assert np.all(first == 2)


def test_an_output_of_data_dependent_size_grows_and_shrinks(card: Card) -> None:
    with Runner(plan("positive"), cuda_graphs=True) as runner:
        for count in (1, 8, 2):
            assert runner({"x": rows(count)})["y"].shape == (3 * count,)
        assert runner({"x": rows(4, -1)})["y"].shape == (0,)
        assert "depends on the data" in next(iter(runner.uncaptured.values()))
    assert card.graphs.launches == 0


def test_an_engine_that_cannot_be_captured_runs_without(card: Card) -> None:
    card.graphs.refuse = True
    with Runner(plan(), cuda_graphs=True) as runner:
        assert np.all(runner({"x": rows(3, 4)})["y"] == 8)
        assert np.all(runner({"x": rows(3, 5)})["y"] == 10)
        assert "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED" in runner.uncaptured["{'x': (3, 3)}"]


def test_a_larger_request_voids_the_graphs_made_before(card: Card) -> None:
    with Runner(plan(), cuda_graphs=True) as runner:
        for count in (1, 8, 1):  # 8 moves the buffers that the graph of 1 wrote to
            assert np.all(runner({"x": rows(count, count)})["y"] == 2 * count)


def test_threads_share_the_slots(card: Card) -> None:
    wrong: list[object] = []
    with Runner(plan(), in_flight=2) as runner:

        def work(number: int) -> None:
            try:
                for turn in range(50):
                    found = runner({"x": rows(1 + (number + turn) % 8, number)})["y"]
                    if not np.all(found == 2 * number):
                        wrong.append((number, turn))
            except Exception as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_submit_waits_for_a_free_slot(card: Card) -> None:
    with Runner(plan(), in_flight=1) as runner:
        first = runner.submit({"x": rows(1)})
        done = threading.Event()
        thread = threading.Thread(target=lambda: (runner({"x": rows(2)}), done.set()))
        thread.start()
        assert not done.wait(0.1)
        first.result()
        assert done.wait(5)
        thread.join()
        assert np.all(first.result()["y"] == 2)  # again, without the slot


def test_map_keeps_the_order_and_survives_being_left(card: Card) -> None:
    with Runner(plan(), in_flight=3) as runner:
        stream = runner.map({"x": rows(1, number)} for number in range(10))
        assert [float(outputs["y"][0, 0]) for outputs in stream] == [2.0 * number for number in range(10)]
        half = runner.map({"x": rows(1, number)} for number in range(10))
        next(half)
        half.close()
        assert np.all(runner({"x": rows(1)})["y"] == 2)


def test_pinned_arrays_are_filled_in_place(card: Card) -> None:
    with Runner(plan()) as runner:
        with runner.request({"x": (2, 3)}) as request:
            request.inputs["x"][...] = 3
            request.submit()
            assert np.all(request.wait()["y"] == 6)
        with pytest.raises(InputError, match="was released"):
            request.submit()


@pytest.mark.parametrize(
    ("feeds", "words"),
    [
        ({}, r"input 'x' \(float32, \('\?', 3\)\) is missing"),
        ({"x": rows(1), "z": rows(1)}, "no input 'z'; did you mean 'x'|no input 'z'; known: x"),
        ({"x": [1, 2, 3]}, "must be a numpy array, got list"),
        ({"x": rows(1).astype(np.float64)}, r"dtype float64, the engine wants float32\n.*astype\(np.float32\)"),
        ({"x": rows(1)[:, :2]}, r"has shape \(1, 2\), the engine wants"),
        ({"x": rows(1)[0]}, r"has shape \(3,\)"),
        ({"x": rows(9)}, r"shape 9x3, profile 0 allows 1x3 to 8x3, nearest 8x3"),
    ],
)
def test_wrong_feeds_are_named(card: Card, feeds: dict[str, object], words: str) -> None:
    with Runner(plan()) as runner:
        with pytest.raises(InputError, match=words):
            runner(feeds)  # type: ignore[arg-type]
        assert np.all(runner({"x": rows(1)})["y"] == 2)  # the slot is free again


def test_int64_feeds_an_int32_input_when_the_values_fit(card: Card) -> None:
    with Runner(plan(dtype="int32")) as runner:
        assert np.array_equal(runner({"x": np.full((1, 3), 7, np.int64)})["y"], np.full((1, 3), 14, np.int32))
        with pytest.raises(InputError, match="dtype int64, the engine wants int32"):
            runner({"x": np.full((1, 3), 1 << 40, np.int64)})


def test_an_array_that_is_not_contiguous_is_copied_with_one_warning(card: Card) -> None:
    turned = np.arange(6, dtype=np.float32).reshape(3, 2).T
    with Runner(plan()) as runner:
        with pytest.warns(RuntimeWarning, match="input 'x' is not contiguous"):
            assert np.array_equal(runner({"x": turned})["y"], 2 * turned)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            runner({"x": turned})


def test_shapes_of_a_request_are_checked(card: Card) -> None:
    with Runner(plan()) as runner:
        with pytest.raises(InputError, match="no input 'z'"), runner.request({"z": (1, 3)}):
            pass
        with pytest.raises(InputError, match="input 'x' is missing"), runner.request({}):
            pass
        assert runner({"x": rows(1)})


def test_tensorrts_refusal_to_run_is_an_error(card: Card) -> None:
    with Runner(plan("fail")) as runner, pytest.raises(ToolError, match=r"TensorRT 8\.6\.0 cannot run the engine"):
        runner({"x": rows(1)})


def test_no_room_on_the_card_is_an_error_that_names_the_size(card: Card) -> None:
    with pytest.raises(ToolError, match=r"no room for 2048\.0 MiB on the card, 1024\.0 MiB are free"):
        Runner(plan(scratch=2 * MEMORY_BYTES))


def test_no_room_for_an_output_is_raised_after_the_call(card: Card) -> None:
    huge = MEMORY_BYTES // 4 // 3
    with Runner(plan("positive", profiles=[[(1, 3), (1, 3), (huge, 3)]])) as runner:
        with pytest.raises(ToolError, match="no room for"):
            runner({"x": rows(int(huge * 0.6))})


def test_a_closed_runner_says_so_and_waiting_threads_wake(card: Card) -> None:
    runner = Runner(plan())
    held = runner.open_request({"x": (1, 3)})
    caught: list[InputError] = []

    def wait() -> None:
        try:
            runner({"x": rows(1)})
        except InputError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    runner.close()
    runner.close()
    thread.join(5)
    assert [error.message for error in caught] == ["the runner is closed"]
    with pytest.raises(InputError, match="closed"):
        held.submit()
    held.release()
    with pytest.raises(InputError, match="closed"):
        runner({"x": rows(1)})


def test_nothing_is_left_after_many_runners(card: Card) -> None:
    for _ in range(100):
        with Runner(plan(), in_flight=2, cuda_graphs=True) as runner:
            runner({"x": rows(2)})
    gc.collect()
    assert card.driver.alive == {}


def test_bad_numbers_are_refused(card: Card) -> None:
    with pytest.raises(InputError, match="must be at least 1, got 0 and 8"):
        Runner(plan(), in_flight=0)


def test_layer_times_are_medians_in_the_engines_order(card: Card) -> None:
    with Runner(plan()) as runner:
        assert list(runner.layer_times({"x": rows(1)}, runs=3).items()) == [("first", 0.5), ("second", 0.25)]
        assert runner.layer_information() == '{"Layers": []}'


def test_layers_are_looked_at_in_a_context_that_stands_on_the_shapes(card: Card) -> None:
    two = plan(profiles=(((1, 3), (1, 3), (1, 3)), ((2, 3), (4, 3), (8, 3))))
    with Runner(two) as runner:
        assert runner.layer_information({"x": (5, 3)}) == '{"Layers": ["(5, 3) on profile 1"]}'
        with pytest.raises(InputError, match="no optimisation profile of the engine allows"):
            runner.layer_information({"x": (9, 3)})
        assert runner.layer_information({"x": (1, 3)}) == '{"Layers": ["(1, 3) on profile 0"]}'
        assert runner.layer_information({"x": (2, 3)}) == '{"Layers": []}'


def test_the_device_is_given_back_at_the_end_of_the_process(card: Card) -> None:
    runner = Runner(plan())
    runner.device._finish()
    assert runner.closed
