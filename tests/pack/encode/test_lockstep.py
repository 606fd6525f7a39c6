"""Generators that are answered together."""

from collections.abc import Generator

import pytest
import torch

from qsrt_pack.encode import viterbi
from qsrt_pack.encode.expert import Settings, encode_expert, expert_steps
from qsrt_pack.encode.lockstep import Request, Steps, in_turn, run, serve, together
from qsrt_runtime.format import atom, codebook, tile


def edges_of(targets: torch.Tensor, bits: int) -> torch.Tensor:
    """The edges that Search finds: the first two tell the tile's number, below 16."""
    number = targets[:, :1].to(torch.uint8)
    return torch.cat([number // 4, number % 4, torch.full_like(number, bits - 1).repeat(1, 254)], 1)


class Search:
    """In place of the search; notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str, list[float]]] = []

    def __call__(self, targets: torch.Tensor, bits: int, method: str) -> torch.Tensor:
        self.calls.append((bits, method, targets[:, 0].tolist()))
        return edges_of(targets, bits)


def request(*numbers: float, bits: int = 3, method: str = "exact") -> Request:
    """One tile full of each number."""
    return Request(torch.tensor(numbers).view(-1, 1).repeat(1, 256), bits, method)


def asks(name: str, *steps: list[Request]) -> Steps[tuple[str, int]]:
    """A generator that makes these requests and checks each answer; returns its name and length."""
    for requests in steps:
        found = yield requests
        assert len(found) == len(requests)
        for (targets, bits, _), (edges, values) in zip(requests, found, strict=True):
            assert torch.equal(edges, edges_of(targets, bits))
            assert torch.equal(values, codebook.values(bits)[tile.states_of_edges(edges, bits)])
    return name, len(steps)


def test_serve_answers_each_request_with_its_parts() -> None:
    def steps() -> Generator[tuple, int, list[int]]:
        first = yield 3, 4
        second = yield (first,)
        third = yield ()
        return [first, second, third]

    asked = []

    def answer(*parts: int) -> int:
        asked.append(parts)
        return sum(parts) + len(asked)

    assert serve(steps(), answer) == [8, 10, 3]
    assert asked == [(3, 4), (8,), ()]


def test_serve_returns_at_once_what_asks_nothing() -> None:
    assert serve(asks("none"), lambda: pytest.fail("nothing was asked")) == ("none", 0)


def test_results_are_in_order_whatever_ends_first() -> None:
    search = Search()
    long = asks("long", *[[request(n)] for n in (1, 2, 3)])
    steps = [long, asks("none"), asks("short", [request(4)]), asks("two", *[[request(5)]] * 2)]
    found = run(together(steps), search)
    assert found == [("long", 3), ("none", 0), ("short", 1), ("two", 2)]
    assert [numbers for _, _, numbers in search.calls] == [[1, 4, 5], [2, 5], [3]]


def test_in_turn_one_is_done_before_the_next_begins() -> None:
    search = Search()
    steps = [asks("a", [request(1)], [request(2)]), asks("none"), asks("b", [request(3)])]
    assert run(in_turn(steps), search) == [("a", 2), ("none", 0), ("b", 1)]
    assert [numbers for _, _, numbers in search.calls] == [[1], [2], [3]]


def test_one_search_for_each_rate_and_method_at_each_step() -> None:
    search = Search()
    mixed = [request(1, 2), request(3, bits=2), request(4, method="fast"), request(5)]
    steps = [
        asks("mixed", mixed, [request(6, bits=4)]),
        asks("other", [request(7, 8, 9, bits=2), request(10)], [request(11, bits=4)]),
    ]
    assert run(together(steps), search) == [("mixed", 2), ("other", 2)]
    assert search.calls == [
        (3, "exact", [1, 2, 5, 10]),
        (2, "exact", [3, 7, 8, 9]),
        (3, "fast", [4]),
        (4, "exact", [6, 11]),
    ]


def test_groups_of_groups_go_in_lockstep() -> None:
    search = Search()
    groups = [
        together([asks("a", [request(1)], [request(2)]), asks("b", [request(3)])]),
        together([asks("c", [request(4)])]),
    ]
    assert run(together(groups), search) == [[("a", 2), ("b", 1)], [("c", 1)]]
    assert [numbers for _, _, numbers in search.calls] == [[1, 3, 4], [2]]


def test_requests_of_no_tile_and_steps_of_no_request() -> None:
    search = Search()
    empty = Request(torch.empty(0, 256), 3, "exact")
    steps = [asks("a", [], [empty, request(1)], []), asks("b", [request(2)], [empty])]
    assert run(together(steps), search) == [("a", 3), ("b", 2)]
    assert [numbers for _, _, numbers in search.calls] == [[2], [1]]


def test_what_asks_nothing_is_not_answered() -> None:
    search = Search()
    assert run(together([]), search) == []
    assert list(together([])) == []
    assert list(together([asks("none")])) == []
    assert search.calls == []


def test_generators_are_taken_from_any_iterable() -> None:
    steps = (asks(name, [request(1)]) for name in "ab")
    assert run(together(steps), Search()) == [("a", 1), ("b", 1)]


def test_an_error_of_one_comes_through() -> None:
    def fails() -> Steps[None]:
        yield [request(1)]
        raise ArithmeticError("cannot go on")

    search = Search()
    with pytest.raises(ArithmeticError, match="cannot go on"):
        run(together([asks("a", *[[request(2)]] * 3), fails()]), search)
    assert len(search.calls) == 1


def test_an_error_of_the_search_comes_through() -> None:
    def search(*_: object) -> torch.Tensor:
        raise ValueError("cannot search")

    with pytest.raises(ValueError, match="cannot search"):
        run(together([asks("a", [request(1)])]), search)


def test_experts_encoded_together_have_the_bytes_of_each_alone() -> None:
    settings = Settings(search="fast", modes="all")
    shapes = {"w1": (256, 128), "w3": (256, 128), "w2": (128, 256)}
    calls: list[tuple[int, str]] = []

    def search(targets: torch.Tensor, bits: int, method: str) -> torch.Tensor:
        calls.append((bits, method))
        return viterbi.search(targets, bits, method)

    def weights(expert: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(expert)
        return {name: 0.05 * torch.randn(*s, generator=generator) for name, s in shapes.items()}

    def steps(expert: int) -> Steps:
        return expert_steps(weights(expert), layer=3, expert=expert, settings=settings)

    together_found = run(together([steps(0), steps(1)]), search)
    shared = len(calls)
    run(steps(0), search)
    assert shared == len(calls) - shared  # as many searches as one expert alone takes
    for expert, encoded in enumerate(together_found):
        alone = encode_expert(**weights(expert), layer=3, expert=expert, settings=settings)
        assert torch.equal(atom.pack_expert(encoded.coded), atom.pack_expert(alone.coded))
        assert torch.equal(encoded.coded.shared_scales, alone.coded.shared_scales)
        assert torch.equal(encoded.low_to_high_groups, alone.low_to_high_groups)
        assert (encoded.nmse, encoded.rms) == (alone.nmse, alone.rms)
