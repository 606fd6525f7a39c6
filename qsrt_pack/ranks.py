"""Several processes on one conversion: torchrun's ranks, with gloo between them.

Rank 0 alone writes; it deals out the batches of each layer, and the others send it theirs.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from qsrt_runtime.format.errors import FormatError

Item = TypeVar("Item")
Result = TypeVar("Result")

_JOINING = timedelta(minutes=5)
_PATIENCE = timedelta(hours=12)  # a rank may wait for another's batch, or for rank 0's hashing


@dataclass(frozen=True)
class Ranks:
    """This process and how many there are in all."""

    rank: int = 0
    world: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def leads_machine(self) -> bool:
        """Whether this is the first process of its machine."""
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def agree(self, facts: dict[str, Any]) -> None:
        """Refuse ranks whose facts differ from rank 0's, on all ranks alike; None is no fact."""
        if self.world == 1:
            return
        found: list[dict[str, Any]] = [{}] * self.world
        _talk(dist.all_gather_object, found, facts, group=self.group)
        for rank, theirs in enumerate(found):
            for key, value in found[0].items():
                if theirs[key] is not None and theirs[key] != value:
                    raise FormatError(
                        f"rank {rank} has {key} {theirs[key]}, rank 0 has {value}; "
                        "all must convert the same with the same versions"
                    )

    def told(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        if self.world == 1:
            return value
        box = [value]
        _talk(dist.broadcast_object_list, box, src=0, group=self.group)
        return box[0]

    def deal(
        self, items: list[Item], produce: Callable[[Iterable[Item]], Iterator[Result]]
    ) -> Iterator[Result]:
        """produce() of all items in order on rank 0; the others produce their share and yield none.

        Item i is rank i % world's. produce: some items -> their results in order.
        """
        own = produce(islice(items, self.rank, None, self.world))
        if not self.is_first:
            for result in own:
                _talk(dist.send_object_list, [result], dst=0, group=self.group)
            return
        for number in range(len(items)):
            source = number % self.world
            if source:
                box: list[Any] = [None]
                _talk(dist.recv_object_list, box, src=source, group=self.group)
                yield box[0]
            else:
                yield next(own)


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Join the other processes that torchrun started; alone where it did not."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks()
        return
    _talk(dist.init_process_group, "gloo", timeout=_JOINING)
    try:
        group = _talk(dist.new_group, timeout=_PATIENCE, backend="gloo")
        yield Ranks(dist.get_rank(), world, group)
    finally:
        dist.destroy_process_group()


def rank_devices(devices: tuple[torch.device, ...]) -> tuple[torch.device, ...]:
    """This process's share of a machine's devices, by its place on the machine.

    Processes share devices where there are fewer of them.
    """
    place = int(os.environ.get("LOCAL_RANK", "0"))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return devices[place::processes] or (devices[place % len(devices)],)


def _talk(operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    try:
        return operation(*arguments, **options)
    except (RuntimeError, ValueError, dist.DistError) as error:
        reason = str(error).strip().splitlines()[0].split(". ")[0]
        raise FormatError(f"another rank has stopped or cannot be reached: {reason}") from error
