"""Which devices work, and the order of their results. No device is used: work only gets it."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from qsrt_pack import workers
from qsrt_pack.workers import find_devices, in_order

CPU = (torch.device("cpu"),)
GPUS = (torch.device("cuda", 0), torch.device("cuda", 1))
AHEAD = 2 * workers.THREADS * len(GPUS)
SECONDS = 20  # nothing here takes a second; what hangs ends as an error
Work = Callable[[int, torch.device], int]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Pretend that the machine has so many CUDA devices."""

    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


@pytest.fixture
def threads_end() -> Iterator[None]:
    """After the test there are no threads that were not there before."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


class Items:
    """Numbers from 0 on; counts those taken."""

    def __init__(self, count: int) -> None:
        self.taken = 0
        self.count = count

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            self.taken += 1
            yield number


def within_seconds(work: Callable[[], None]) -> None:
    """Run in a thread that may not take long, and raise what it raises."""
    raised = []

    def caught() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=caught, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "hangs"
    if raised:
        raise raised[0]


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ("auto", 0, ["cpu"]),
        ("auto", 1, ["cuda:0"]),
        ("auto", 4, ["cuda:0"]),
        ("cpu", 0, ["cpu"]),
        ("cpu", 2, ["cpu"]),
        ("0", 1, ["cuda:0"]),
        ("1", 2, ["cuda:1"]),
        ("0,1", 2, ["cuda:0", "cuda:1"]),
        ("3,0,2", 4, ["cuda:3", "cuda:0", "cuda:2"]),
    ],
)
def test_devices_found(text: str, count: int, expected: list[str], gpus) -> None:
    gpus(count)
    assert find_devices(text) == tuple(map(torch.device, expected))


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1,1", "0,00", "0,", ",0", "0, 1", "0;1", "cuda", "cuda:0", "cpu,0"]
)
def test_refuses_what_is_no_list_of_devices(text: str, gpus) -> None:
    gpus(2)
    with pytest.raises(ValueError, match=f"^'{text}' is neither auto, cpu nor a list"):
        find_devices(text)


@pytest.mark.parametrize(
    ("text", "count", "missing"), [("0", 0, 0), ("1", 1, 1), ("0,5,7", 4, 5), ("2,0", 2, 2)]
)
def test_refuses_devices_that_are_not_there(text: str, count: int, missing: int, gpus) -> None:
    gpus(count)
    expected = f"there is no CUDA device {missing}; this machine has {count}"
    with pytest.raises(ValueError, match=expected):
        find_devices(text)


def test_no_devices_where_cuda_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers too old for this torch: devices are counted, but not available."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert find_devices("auto") == CPU
    with pytest.raises(ValueError, match="this machine has 0"):
        find_devices("0")


def test_the_cpu_works_only_when_asked() -> None:
    items, done = Items(3), []

    def work(item: int, device: torch.device) -> int:
        assert device == CPU[0]
        assert threading.current_thread() is threading.main_thread()
        done.append(item)
        return 10 * item

    results = in_order(work, items, CPU)
    assert (items.taken, done) == (0, [])
    assert next(results) == 0
    assert (items.taken, done) == (1, [0])
    assert list(results) == [10, 20]


@pytest.mark.parametrize("devices", [CPU, GPUS])
def test_an_error_of_the_items_comes_through(devices, threads_end: None) -> None:
    def items() -> Iterator[int]:
        yield 0
        raise RuntimeError("cannot read")

    with pytest.raises(RuntimeError, match="cannot read"):
        list(in_order(lambda item, device: item, items(), devices))


@pytest.mark.parametrize("count", [0, 1, 5, AHEAD, AHEAD + 1, 41])
@pytest.mark.parametrize("devices", [CPU, GPUS[:1], GPUS, (torch.device("meta"),) * 3])
def test_every_item_once_in_order_and_dealt_out(count: int, devices, threads_end: None) -> None:
    found = list(in_order(lambda item, device: (item, device), range(count), devices))
    assert found == [(item, devices[item % len(devices)]) for item in range(count)]


def test_results_are_in_order_whatever_ends_first(threads_end: None) -> None:
    ended, done = [], [threading.Event() for _ in range(7)]
    done[6].set()

    def work(item: int, device: torch.device) -> int:
        assert done[item + 1].wait(SECONDS)  # the next one's end
        ended.append(item)
        done[item].set()
        return item

    assert list(in_order(work, range(6), GPUS)) == [0, 1, 2, 3, 4, 5]
    assert ended == [5, 4, 3, 2, 1, 0]


def test_some_threads_to_each_device(threads_end: None) -> None:
    lock, running, most = threading.Lock(), Counter(), Counter()
    full = threading.Barrier(workers.THREADS * len(GPUS), timeout=SECONDS)

    def work(item: int, device: torch.device) -> int:
        with lock:
            running[device] += 1
            most[device] = max(most[device], running[device])
        full.wait()  # broken unless all threads of both devices come
        with lock:
            running[device] -= 1
        return item

    count = 4 * workers.THREADS * len(GPUS)
    assert list(in_order(work, range(count), GPUS)) == list(range(count))
    assert most == dict.fromkeys(GPUS, workers.THREADS)


def test_a_bounded_number_is_under_way_or_not_yet_taken(threads_end: None) -> None:
    items, count, begun = Items(3 * AHEAD), 3 * AHEAD, []

    def work(item: int, device: torch.device) -> int:
        begun.append(item)
        return item

    results = in_order(work, items, GPUS)
    assert items.taken == 0
    for number in range(count):
        assert next(results) == number
        assert items.taken == min(AHEAD + number + 1, count)  # one of them waits for its turn
        assert max(begun) < AHEAD + number
    assert list(results) == []


def test_an_error_comes_at_its_place_and_nothing_hangs(threads_end: None) -> None:
    items, found = Items(100), []

    def work(item: int, device: torch.device) -> int:
        if item == 7:
            raise ArithmeticError("cannot encode")
        return item

    def take() -> None:
        for result in in_order(work, items, GPUS):
            found.append(result)

    with pytest.raises(ArithmeticError, match="cannot encode"):
        within_seconds(take)
    assert found == list(range(7))
    assert items.taken == 7 + AHEAD + 1  # the last of them has not begun


def test_closing_early_drops_what_has_not_begun_and_ends_the_threads(threads_end: None) -> None:
    begun, go = [], threading.Event()

    def work(item: int, device: torch.device) -> int:
        begun.append(item)
        assert item == 0 or go.wait(SECONDS)
        return item

    results = in_order(work, range(100), GPUS)
    assert next(results) == 0
    timer = threading.Timer(1, go.set)  # long after all that waits has been dropped
    timer.start()
    within_seconds(results.close)
    timer.join()
    # Three threads of each device, and one that is free again after item 0.
    assert set(begun) <= set(range(7))
    assert list(results) == []
