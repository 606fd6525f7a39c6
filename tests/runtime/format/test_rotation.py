import hashlib

import pytest
import torch

from qsrt_runtime.format.rotation import rotate, rotate_rows, signs

KEY = {"seed": 3, "layer": 5, "expert": 7, "matrix": "w1", "side": "hidden"}


def dense_rotation(size):
    """B by Sylvester's doubling, float64: blocks [[h, h], [h, -h]] divided by sqrt(128)."""
    block = torch.ones(1, 1, dtype=torch.float64)
    while len(block) < 128:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    return torch.block_diag(*[block / 128**0.5] * (size // 128))


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def relative(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(("shape"), [(128,), (1, 128), (3, 256), (2, 5, 384)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_last_axis_against_the_dense_matrix(shape, dtype, bound):
    x = normal(*shape, dtype=dtype)
    found = rotate(x)
    assert (found.dtype, found.shape) == (dtype, x.shape)
    assert relative(found, x.double() @ dense_rotation(shape[-1])) < bound


@pytest.mark.parametrize("shape", [(128, 1), (384, 7)])
def test_first_axis_against_the_dense_matrix(shape):
    x = normal(*shape)
    assert relative(rotate_rows(x), dense_rotation(shape[0]) @ x) < 1e-14


def test_own_inverse():
    x = normal(5, 256)
    assert relative(rotate(rotate(x)), x) < 1e-14
    assert relative(rotate_rows(rotate_rows(x.T)), x.T) < 1e-14


def test_unit_vectors_give_rows_of_signs():
    found = rotate(torch.eye(128, dtype=torch.float64))
    assert torch.equal(found, found.T)
    assert torch.equal(found.abs(), torch.full((128, 128), 128**-0.5, dtype=torch.float64))


def test_empty():
    assert rotate(torch.empty(0, 128)).shape == (0, 128)


def test_blocks_do_not_mix():
    x = torch.zeros(384)
    x[200] = 1
    found = rotate(x)
    assert (found[128:256] != 0).all()
    assert not found[:128].any()
    assert not found[256:].any()


def test_known_signs():
    found = signs(16, seed=0, layer=0, expert=0, matrix="w1", side="hidden")
    assert found.dtype == torch.float32
    assert "".join("+" if s > 0 else "-" for s in found.tolist()) == "+-++-+++-+++---+"
    many = signs(4096, **KEY)
    assert (
        hashlib.sha256(bytes((many < 0).tolist())).hexdigest()
        == "4da450d2edaaa4138f7358ff8a980c05bf488525117f99404a9aedc8e41547fb"
    )
    shared = signs(4096, **KEY | {"expert": None, "matrix": None})
    assert (
        hashlib.sha256(bytes((shared < 0).tolist())).hexdigest()
        == "0b588835a55a2cfc307dae4c8d490e0ee16dd6812547993bf3f31675fbdb7de3"
    )


def test_signs_are_the_bits_of_the_key_text():
    text = b"qsrt signs 1 seed=3 layer=5 expert=7 matrix=w1 side=hidden"
    data = int.from_bytes(hashlib.shake_128(text).digest(32), "little")
    assert signs(256, **KEY).tolist() == [1 - 2 * (data >> i & 1) for i in range(256)]


def test_a_draw_depends_on_its_key_alone():
    first = signs(1024, **KEY)
    torch.manual_seed(99)
    signs(8, **KEY | {"seed": 4})
    assert torch.equal(signs(1024, **KEY), first)
    assert torch.equal(signs(64, **KEY), first[:64])


def test_keys_are_told_apart():
    changes = [
        {},
        {"seed": 4},
        {"layer": 6},
        {"expert": 8},
        {"expert": None},
        {"matrix": "w3"},
        {"matrix": None},
        {"side": "intermediate"},
        {"seed": 35, "layer": 5},
        {"seed": 3, "layer": 55},
        {"layer": 57, "expert": 7},
    ]
    draws = [signs(1024, **KEY | change) for change in changes]
    for i, one in enumerate(draws):
        for two in draws[:i]:
            assert abs((one * two).sum().item()) < 5 * 1024**0.5  # five standard deviations


@pytest.mark.parametrize("seed", range(5))
def test_signs_are_balanced(seed):
    found = signs(65536, **KEY | {"seed": seed})
    assert set(found.tolist()) == {-1.0, 1.0}
    assert abs(found.sum().item()) < 5 * 65536**0.5
    assert abs((found[1:] * found[:-1]).sum().item()) < 5 * 65536**0.5
