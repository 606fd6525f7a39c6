"""Work on devices: which ones, and many pieces of it in order, ahead of who takes the results."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

# Threads of a GPU: one reads and packs while another one's searches run.
THREADS = 3


def find_devices(text: str) -> tuple[torch.device, ...]:
    """`cpu`, numbers of CUDA devices such as `0,1`, or `auto`: the first CUDA device, else the CPU.

    Where torchrun starts several processes on this machine, `auto` is all of them.
    Raises ValueError for anything else, a device that is not there, and one named twice.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text == "cpu" or (text == "auto" and not count):
        return (torch.device("cpu"),)
    if text == "auto":
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        text = ",".join(map(str, range(count if processes > 1 else 1)))
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise ValueError(f"{text!r} is neither auto, cpu nor a list of device numbers such as 0,1")
    missing = [part for part in parts if int(part) >= count]
    if missing:
        raise ValueError(f"there is no CUDA device {missing[0]}; this machine has {count}")
    return tuple(torch.device("cuda", int(part)) for part in parts)


def in_order(
    work: Callable[[Item, torch.device], Result],
    items: Iterable[Item],
    devices: tuple[torch.device, ...],
    threads: int = THREADS,
) -> Iterator[Result]:
    """work(item, device) of each item in order.

    On the CPU one after another, as each is asked for. On GPUs the items are dealt out to them,
    `threads` to each, and at most two for every thread are under way or not yet taken.
    """
    if devices[0].type == "cpu":
        for item in items:
            yield work(item, devices[0])
        return

    with ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(threads)) for _ in devices]
        under_way: deque[Future[Result]] = deque()
        try:
            for number, item in enumerate(items):
                if len(under_way) == 2 * threads * len(devices):
                    yield under_way.popleft().result()
                at = number % len(devices)
                under_way.append(pools[at].submit(work, item, devices[at]))
            while under_way:
                yield under_way.popleft().result()
        finally:
            for pool in pools:
                pool.shutdown(wait=False, cancel_futures=True)
