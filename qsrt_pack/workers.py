"""Work on devices: which ones, and many pieces of it in order, ahead of who takes the results."""

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

import torch

_NO_MEMORY = re.compile(r"\bout of memory|_ALLOC_FAILED|can't allocate memory")
_OF_DEVICE = re.compile(r"CUDA|\bHIP\b|cuDNN|cusolver|nvrtc")  # in their own words

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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch, Triton or a library says that a device's memory is full."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def device_failure(error: BaseException) -> str | None:
    """A line of what a device or its libraries say of an error of theirs; None of other errors."""
    reason = str(error).strip().partition("\n")[0]
    if is_out_of_memory(error):
        return f"too little memory: {reason}" if reason else "too little memory"
    if isinstance(error, torch.AcceleratorError):
        return reason
    is_of_device = isinstance(error, RuntimeError) and _OF_DEVICE.search(reason)
    return reason if is_of_device else None


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
