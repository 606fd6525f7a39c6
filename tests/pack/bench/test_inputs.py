"""What calls are given: other layers and experts, one after another."""

import torch

from qsrt_pack.bench.inputs import count_calls, experts_of, make_inputs
from qsrt_pack.bench.layers import layers_in_turn
from qsrt_pack.bench.shapes import parse_shape

SHAPE = parse_shape("H=128,I=256,E=16,k=2")


def made(tokens, calls, layers=2):
    return make_inputs(SHAPE, tokens, calls, layers, torch.float16, torch.device("cpu"))


def test_calls_take_layers_in_turn_and_no_expert_again_while_there_are_others():
    inputs = made(1, 8)
    assert [i.place for i in inputs] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert sorted(e for i in inputs for e in i.ids.flatten().tolist()) == list(range(16))
    assert experts_of(inputs) == (2.0, 16)
    assert experts_of(made(64, 4)) == (16.0, 32)
    for given in inputs:
        assert given.x.shape == (1, 128) and given.x.dtype == torch.float16
        assert given.ids.dtype == torch.int32 and given.weights.dtype == torch.float32
        torch.testing.assert_close(given.weights.sum(1), torch.ones(1))
    assert len({i.x.sum().item() for i in inputs}) == 8


def test_calls_read_more_than_the_cache_holds():
    expert = SHAPE.packed_bytes // 16
    for tokens, l2 in ((1, 10 * expert), (4, 10 * expert), (500, 100 * expert)):
        layers = layers_in_turn(SHAPE, l2)
        calls = count_calls(SHAPE, tokens, layers, l2)
        assert calls >= layers
        read = sum(len(i.ids.unique()) for i in made(tokens, calls, layers)) * expert
        assert read >= 4 * l2


def test_there_are_at_least_four_calls_and_at_most_128():
    assert count_calls(SHAPE, 500, 1, 1) == 4
    assert count_calls(SHAPE, 500, 7, 1) == 7
    assert count_calls(SHAPE, 1, 7, 1 << 40) == 128
