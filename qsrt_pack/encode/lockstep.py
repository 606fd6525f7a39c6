"""Many encodings at once: each is a generator that asks for searches, answered together.

A generator yields lists of requests and is sent what was found for each. What needs one search
after another, such as error feedback from block to block, stays plain code; the searches of all
matrices and experts that are at such a point go to the device in one call. A search's result
depends on its own tile alone, so the company it keeps changes nothing.
"""

from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple, TypeVar

import torch

from qsrt_runtime.format import codebook, tile

Result = TypeVar("Result")


class Request(NamedTuple):
    """Tiles to search.

    targets: [n, 256] float32, trellis order, in codebook units.   bits, method: see viterbi.search.
    """

    targets: torch.Tensor
    bits: int
    method: str


class Found(NamedTuple):
    """The edges of a request's tiles [n, 256] uint8, and the values that they decode to."""

    edges: torch.Tensor
    values: torch.Tensor


Steps = Generator[list[Request], list[Found], Result]
Search = Callable[[torch.Tensor, int, str], torch.Tensor]


def serve(steps: Generator[tuple, Any, Result], answer: Callable[..., Any]) -> Result:
    """Run a generator to its end; each tuple that it yields is answered by answer(*tuple)."""
    reply = None
    while True:
        try:
            request = steps.send(reply)
        except StopIteration as end:
            return end.value
        reply = answer(*request)


def together(generators: Iterable[Steps[Result]]) -> Steps[list[Result]]:
    """Run generators in lockstep as one; returns what each of them returns."""
    running = dict(enumerate(generators))
    results = dict.fromkeys(running)
    replies: dict[int, list[Found] | None] = dict.fromkeys(running)
    while running:
        asked = {}
        for number, steps in list(running.items()):
            try:
                asked[number] = steps.send(replies[number])
            except StopIteration as end:
                results[number] = end.value
                del running[number]
        if asked:
            found = iter((yield [request for requests in asked.values() for request in requests]))
            replies = {n: [next(found) for _ in requests] for n, requests in asked.items()}
    return list(results.values())


def in_turn(generators: Iterable[Steps[Result]]) -> Steps[list[Result]]:
    """As together, one after another: less at once in memory, and less for a device to do."""
    results = []
    for steps in generators:
        results.append((yield from steps))
    return results


def run(steps: Steps[Result], search: Search) -> Result:
    """Run a generator, with one search for all its requests of a rate and method at each step."""

    def answer(*requests: Request) -> list[Found]:
        found: list[Found | None] = [None] * len(requests)
        groups: dict[tuple[int, str], list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault((request.bits, request.method), []).append(place)
        for (bits, method), places in groups.items():
            parts = [requests[place].targets for place in places]
            targets = parts[0] if len(parts) == 1 else torch.cat(parts)
            edges = search(targets, bits, method)
            values = codebook.values(bits, edges.device)[tile.states_of_edges(edges, bits)]
            sizes = [len(part) for part in parts]
            pieces = zip(places, edges.split(sizes), values.split(sizes), strict=True)
            for place, *part in pieces:
                found[place] = Found(*part)
        return found

    return serve(steps, answer)
