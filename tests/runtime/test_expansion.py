"""Expanded layers against packed ones: their labels, their outputs, what they hold."""

import dataclasses
import logging

import pytest
import torch
from layers import (
    BFLOAT,
    BOUND,
    DEVICES,
    GPU,
    HALF,
    SMALL,
    check_guards,
    error,
    guard,
    inputs,
    place,
    poisoned,
    random_layer,
    uneven_sum,
)
from packages import write_package
from torch.multiprocessing.reductions import StorageWeakRef

from qsrt_runtime import load, load_package, moe_forward
from qsrt_runtime.expansion import expand_by_kernels, expanded
from qsrt_runtime.format import decode, slab
from qsrt_runtime.format.errors import FormatError
from qsrt_runtime.format.geometry import Geometry, TrueSizes
from qsrt_runtime.moe_decode import moe_decode
from qsrt_runtime.moe_kernels import moe_forward_kernels
from qsrt_runtime.moe_prefill import moe_prefill
from qsrt_runtime.moe_reference import moe_forward_reference
from qsrt_runtime.ops.expand.reference import expand_reference
from qsrt_runtime.ops.expert_gemm.reference import in_slot_order
from qsrt_runtime.weights import with_traits
from qsrt_runtime.workspace import make_prefill_workspace, make_workspace

CPU = torch.device("cpu")
MODES = [0x00, 0x12, 0x21, 0x11, 0x02, 0x20]
LAYERS = [
    pytest.param(Geometry(256, 512, 5), [0x00, 0x10, 0x01, 0x11, 0x10], None, id="two pairs"),
    pytest.param(Geometry(128, 1024, 6), MODES, None, id="every mode, moved pairs"),
    pytest.param(Geometry(128, 1024, 6), MODES, range(8, 24), id="a rank"),
    pytest.param(Geometry(384, 256, 2), [0x00, 0x00], None, id="one pair"),
]
FRAGMENT = torch.tensor([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])


def held_bytes(layer):
    """Of each tensor that a layer holds."""
    values = {f.name: getattr(layer, f.name) for f in dataclasses.fields(layer)}
    return {name: v.nbytes for name, v in values.items() if isinstance(v, torch.Tensor)}


@pytest.mark.parametrize(("geometry", "codes", "slots"), LAYERS)
def test_labels_are_where_products_read_them(geometry, codes, slots):
    """As the kernel that makes them for one call has them, from the stored definition."""
    layer = random_layer(geometry, CPU, codes=codes, slots=slots, layer=3)
    experts, hidden, held = geometry.experts, geometry.hidden, 32 * len(layer.slots)
    found = expanded(layer).matrices()
    shapes = [
        (experts, 2 * held // 8, hidden // 64, 8, 64),
        (experts, hidden // 8, held // 64, 8, 64),
    ]
    for half, shape, i in zip(found, shapes, (0, 1), strict=True):
        rows = half.view(shape).transpose(2, 3).flatten(3).flatten(1, 2)
        for expert in range(experts):
            order = in_slot_order(layer, expert)
            expected = expand_reference(layer, expert, order)[i].to(torch.float8_e4m3fn)
            expected = expected.unflatten(1, (-1, 16)).view(torch.uint8)[..., FRAGMENT].flatten(1)
            assert torch.equal(rows[expert], expected)


@pytest.mark.parametrize(("geometry", "codes", "slots"), LAYERS)
def test_the_same_experts(geometry, codes, slots):
    packed = random_layer(geometry, CPU, codes=codes, slots=slots, layer=3, sides="expert")
    layer = expanded(packed)
    for expert in range(geometry.experts):
        found, expected = (slab.unpack_expert(each, expert) for each in (layer, packed))
        assert (found.mode13, found.mode2) == (expected.mode13, expected.mode2)
        for name, dense in decode.dense_expert(found).items():
            assert torch.equal(dense, decode.dense_expert(expected)[name])
    x, ids, weights = inputs(packed, 7, 2, torch.float32)
    ids[2, 1] = -1
    expected = moe_forward_reference(x, packed, ids, weights)
    assert torch.equal(moe_forward_reference(x, layer, ids, weights), expected)
    assert torch.equal(moe_forward(x, layer, ids, weights), moe_forward(x, packed, ids, weights))
    assert expected.any()


@pytest.mark.parametrize("name", [pytest.param("cpu"), pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize(
    ("geometry", "codes", "slots"),
    [
        (Geometry(128, 512, 3), [0x00, 0x11, 0x10], None),
        (Geometry(384, 768, 2), [0x11, 0x01], range(8, 24)),
    ],
)
def test_kernels_make_the_same_labels(name, geometry, codes, slots):
    """But for the sign of zeros, which labels that are computed have."""
    layer = random_layer(geometry, place(name), codes=codes, slots=slots)
    found, expected = layer.atoms.new_empty(2, layer.label_bytes)
    expand_by_kernels(layer, found)
    slab.expand(layer, expected)
    values = [each.view(torch.float8_e4m3fn).float() for each in (found, expected)]
    assert torch.equal(*values)


def test_expands_once_and_into_memory_that_is_there():
    packed = random_layer(SMALL, CPU)
    labels = torch.full((packed.label_bytes,), 0x7F, dtype=torch.uint8)
    layer = expanded(packed, labels)
    assert layer.labels is labels
    assert torch.equal(labels, expanded(packed).labels)
    with pytest.raises(ValueError, match=r"^layer 1 is expanded already$"):
        expanded(layer)


def run(x, layer, ids, weights, **options):
    """By moe_prefill, in a workspace where what is not written is noticed, without scratch."""
    sizes = (layer.geometry, ids.shape[1], max(1, len(x)), layer.traits.inputs, x.dtype, x.device)
    expand = {} if layer.labels is None else {"scratch_bytes": 0}
    workspace = guard(make_prefill_workspace(*sizes, **expand))
    assert layer.labels is None or not len(workspace.scratch)
    out = torch.full_like(x, float("nan"))
    moe_prefill(x, layer, ids, weights, workspace, out, **options)
    check_guards(workspace)
    return out


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("tokens", [1, 11])
@pytest.mark.parametrize(
    ("geometry", "codes", "slots", "sides"),
    [
        (SMALL, None, None, "one"),
        (Geometry(128, 512, 3), [0x00, 0x11, 0x10], None, "expert"),
        (Geometry(128, 768, 2), [0x11, 0x01], range(8, 24), "two"),
    ],
    ids=["small", "rates", "rank"],
)
def test_kernels_give_the_same(name, dtype, tokens, geometry, codes, slots, sides):
    packed = random_layer(geometry, place(name), codes=codes, slots=slots, sides=sides)
    layer = expanded(packed)
    x, ids, weights = inputs(layer, tokens, 2, dtype)
    if tokens > 1:  # RT-1a, RT-1b
        ids[1, 1], ids[3] = -1, -1
        weights[1, 1], weights[3] = float("nan"), float("nan")
    found = run(x, layer, ids, weights)
    assert torch.equal(found, run(x, packed, ids, weights))
    expected = moe_forward_reference(x.float(), layer, ids, weights)
    assert expected.any()
    assert error(found, expected) < 1.2 * BOUND[dtype]  # as little as 128 numbers


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_maps_and_weights_on_the_input(name, dtype):  # RT-1c, RT-3b, RT-7b, RT-8a, RT-8b
    packed = random_layer(SMALL, place(name))
    layer = expanded(packed)
    x, ids, weights = inputs(layer, 17, 2, dtype)
    ids[:] = 2
    ids[3, 1], ids[4] = 6, 0
    here = torch.tensor([-1, 4, 3, -1, 0, 1, 2], device=ids.device)
    for given in ({"expert_map": here}, {"expert_map": here, "weight_on_input": True}):
        found = run(x, layer, ids.long(), 4 * weights.double(), **given)
        assert torch.equal(found, run(x, packed, ids, 4 * weights, **given))
        expected = moe_forward_reference(x.float(), layer, ids, 4 * weights, **given)
        assert error(found, expected) < 1.2 * BOUND[dtype]


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
def test_sum_in_float32(name, dtype):  # RT-9b
    packed = random_layer(SMALL, place(name))
    layer = expanded(packed)
    x = inputs(layer, 1, 2, dtype)[0]
    ids, weights = uneven_sum(x.device)
    found = run(x, layer, ids, weights)
    assert torch.equal(found, run(x, packed, ids, weights))
    unit = moe_forward_reference(x.float(), layer, ids[:, :1], weights[:, 1:2])
    assert error(found, 6 * unit) < 1.2 * BOUND[dtype]
    if layer.atoms.is_cuda:
        few = moe_decode(x, layer, ids, weights, poisoned(layer, 8, dtype), torch.empty_like(x))
        assert error(few, 6 * unit) < 1.2 * BOUND[dtype]


@pytest.mark.parametrize(("name", "dtype"), DEVICES)
@pytest.mark.parametrize("tokens", [0, 3])
def test_any_number_and_layout_of_rows(name, dtype, tokens):  # RT-3a, RT-7a
    layer = expanded(random_layer(SMALL, place(name)))
    x, ids, weights = inputs(layer, 3, 2, dtype)
    x, ids, weights = x[:tokens], ids[:tokens], weights[:tokens]
    wide = torch.cat([x, x], 1)[:, : SMALL.hidden]
    found = moe_forward_kernels(wide, layer, ids, weights)
    assert (found.shape, found.dtype, found.device) == (x.shape, x.dtype, x.device)
    assert torch.equal(found, moe_forward_kernels(x, layer, ids, weights))
    if tokens:
        assert error(found, moe_forward_reference(x.float(), layer, ids, weights)) < BOUND[dtype]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it does on CUDA")
def test_decoding_refuses_it():
    layer = expanded(random_layer(SMALL, torch.device("cpu")))
    x, ids, weights = inputs(layer, 2, 2, HALF)
    workspace = poisoned(layer, 2, HALF)
    with pytest.raises(ValueError, match="moe_decode runs expanded layers on NVIDIA GPUs alone"):
        moe_decode(x, layer, ids, weights, workspace, torch.empty_like(x))
    with pytest.raises(ValueError, match="moe_decode runs expanded layers on NVIDIA GPUs alone"):
        moe_forward_kernels(x, layer, ids, weights, workspace=workspace)


@GPU
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 40])
@pytest.mark.parametrize("sides", ["one", "two", "expert"])
@pytest.mark.parametrize(
    ("geometry", "codes"),
    [
        (SMALL, None),
        (Geometry(256, 512, 3), [0x00, 0x12, 0x21]),  # every rate mode
        (Geometry(640, 768, 5), None),  # a tile of columns that is not full
        (Geometry(1024, 1536, 16), None),  # runs of a few steps
    ],
    ids=["small", "rates", "wide", "many"],
)
def test_decodes_as_packed(dtype, tokens, sides, geometry, codes):
    packed = random_layer(geometry, torch.device("cuda"), codes=codes, sides=sides)
    layer = expanded(packed)
    x, ids, weights = inputs(layer, tokens, 3, dtype)
    ids[-1, 1] = -1
    here = torch.arange(geometry.experts, device=ids.device)
    for options in ({}, {"weight_on_input": True}, {"expert_map": here}):
        workspace, out = poisoned(layer, 3, dtype, max(tokens, 16)), torch.full_like(x, torch.nan)
        moe_decode(x, layer, ids, weights, workspace, out, **options)
        check_guards(workspace)
        expected = moe_forward_reference(x.float(), packed, ids, weights, **options)
        assert error(out, expected) < BOUND[dtype]
        again = torch.empty_like(out)
        moe_decode(x, layer, ids, weights, workspace, again, **options)
        assert torch.equal(out, again)
    ids[:] = -1
    assert not moe_decode(x, layer, ids, weights, workspace, out).any()


def test_a_workspace_without_scratch_is_for_expanded_layers():
    layer = random_layer(SMALL, place("cuda" if torch.cuda.is_available() else "cpu"))
    x, ids, weights = inputs(layer, 2, 2, HALF)
    workspace = make_prefill_workspace(SMALL, 2, 2, 1, HALF, x.device, scratch_bytes=0)
    with pytest.raises(ValueError, match="no scratch, and is for expanded layers alone"):
        moe_prefill(x, layer, ids, weights, workspace, torch.empty_like(x))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda w: {"labels": w.labels[:-16]}, ValueError, "labels have shape"),
        (lambda w: {"labels": w.labels.view(torch.int8)}, TypeError, "labels are torch.int8"),
        (lambda w: {"labels": w.labels.to("meta")}, ValueError, "labels are on meta"),
        (lambda w: {"labels": torch.cat([w.labels] * 2)[::2]}, ValueError, "labels must be cont"),
        (lambda w: {"labels": torch.cat([w.labels[:1], w.labels])[1:]}, ValueError, "start at 16"),
        (lambda w: {"labels": None}, ValueError, "atoms have shape"),
    ],
)
def test_labels_that_do_not_fit(change, kind, message):  # RT-7c
    layer = expanded(random_layer(SMALL, CPU))
    x, ids, weights = inputs(layer, 2, 2, HALF)
    with pytest.raises(kind, match=message):
        moe_forward(x, dataclasses.replace(layer, **change(layer)), ids, weights)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Two layers of experts of 4 pairs, with true sizes that are odd."""
    path = tmp_path_factory.mktemp("package") / "package"
    sizes = TrueSizes(100, 1000)
    return write_package(path, Geometry(128, 1024, 3), layers=(0, 2), true_sizes=sizes)


DEVICE = [pytest.param("cpu"), pytest.param("cuda", marks=GPU)]


@pytest.mark.parametrize("device", DEVICE)
@pytest.mark.parametrize(
    "share",
    [{}, {"rank": 1, "world_size": 3}, {"experts": range(1, 3)}],
    ids=["whole", "rank", "experts"],
)
def test_loads_expanded(package, device, share, caplog):
    packed = load_package(package, device=device, **share)
    assert all(layer.labels is None for layer in packed.layers.values())  # the default
    assert packed.held_bytes == packed.load_bytes
    with caplog.at_level(logging.INFO, "qsrt_runtime"):
        loaded = load_package(package, device=device, expand="e4m3", **share)
    assert f"expanded to {loaded.held_bytes} bytes" in caplog.text
    assert loaded.load_bytes == packed.load_bytes
    total = 0
    for number, layer in loaded.layers.items():
        expected, geometry = packed.layers[number], layer.geometry
        held = held_bytes(layer)
        assert layer.traits == expected.traits
        assert held["labels"] == 3 * geometry.experts * geometry.hidden * 32 * len(layer.slots)
        assert held["atoms"] == len(layer.slots) * geometry.experts * 192  # no words
        assert layer.atoms.untyped_storage().nbytes() == held["atoms"]  # nor behind a view
        total += sum(held.values()) - held["activations"]
        x, ids, weights = torch.randn(5, 100), torch.tensor([[0, 1]] * 5), torch.rand(5, 2)
        given = [value.to(layer.atoms.device) for value in (x, ids, weights)]
        output = moe_forward(given[0], layer, *given[1:])
        assert output.any()
        assert torch.equal(output, moe_forward(given[0], expected, *given[1:]))
    assert loaded.held_bytes == total


def test_one_packed_layer_at_a_time(package, monkeypatch):
    """When a layer is expanded, the words of those before it are gone."""
    alive, words = [], []

    def watched(layer):
        alive.append(sum(not each.expired() for each in words))
        words.append(StorageWeakRef(layer.atoms.untyped_storage()))
        return expanded(layer)

    monkeypatch.setattr(load, "expanded", watched)
    load_package(package, expand="e4m3")
    assert alive == [0, 0]


@pytest.mark.parametrize("expand", ["fp8", "E4M3", "", True])
def test_other_expansions_are_refused(package, expand):
    message = rf"expand is {expand!r}, expected None or one of \('e4m3',\)"
    with pytest.raises(ValueError, match=message):
        load_package(package, expand=expand)


def test_an_expert_that_is_kept_exact_is_refused(package, monkeypatch):
    def with_x4t(layers):
        layers[0].format_codes[1] = 0xFF
        return with_traits(layers)

    monkeypatch.setattr(load, "with_traits", with_x4t)
    with pytest.raises(FormatError, match="a format byte is X4T"):
        load_package(package, expand="e4m3")


def test_the_example(example):
    packed, loaded = (load_package(example[1], expand=expand) for expand in (None, "e4m3"))
    x = torch.randn(5, packed.true_sizes.hidden)
    weights, ids = torch.rand(5, packed.geometry.experts).topk(packed.topk)
    for number, layer in loaded.layers.items():
        expected = moe_forward(x, packed.layers[number], ids, weights)
        assert error(moe_forward(x, layer, ids, weights), expected) < 1e-6


def on_gpu(geometry, **options):
    return random_layer(geometry, torch.device("cuda"), **options)


@GPU
def test_labels_beyond_two_gigabytes():  # RT-4
    small, large = Geometry(4096, 2048, 1), Geometry(4096, 2048, 128)
    first = on_gpu(small, layer=5 * 127 + 1)  # its pairs stand where those of the last expert do
    atoms = torch.zeros(large.slots, large.slot_stride(128), dtype=torch.uint8, device="cuda")
    size = large.bundle_bytes
    atoms[:, 127 * size : 128 * size] = first.atoms[:, :size]
    codes = torch.zeros(128, dtype=torch.uint8, device="cuda")
    packed = dataclasses.replace(
        first,
        layer=1,
        geometry=large,
        atoms=atoms,
        format_codes=codes,
        shared_scales=first.shared_scales.expand(3, 128, large.hidden).contiguous(),
        activations=codes,
    )
    layer, alone = expanded(packed), expanded(first)
    assert layer.labels.nbytes > 1 << 31
    both = (each.matrices() for each in (layer, alone))
    for found, expected in zip(*both, strict=True):
        assert torch.equal(found.view(128, -1)[127], expected)
    x, ids, weights = inputs(alone, 3, 1, BFLOAT)
    found = run(x, layer, ids + 127, weights)
    assert found.any()
    assert torch.equal(found, run(x, alone, ids, weights))
    outs = [torch.empty_like(x) for _ in range(2)]
    for each, out, shift in ((layer, outs[0], 127), (alone, outs[1], 0)):
        moe_decode(x, each, ids + shift, weights, poisoned(each, 1, BFLOAT), out)
    assert torch.equal(*outs)
    assert error(outs[0], found.float()) < 2 * BOUND[BFLOAT]


@GPU
@pytest.mark.parametrize("forward", [moe_prefill, moe_decode])
def test_graphs_and_their_first_call(forward):  # RT-6
    layer = expanded(on_gpu(Geometry(384, 512, 6)))
    x, ids, weights = inputs(layer, 5, 2, BFLOAT)
    sizes = (layer.geometry, 2, 5)
    workspace = make_workspace(*sizes, BFLOAT, x.device)
    if forward is moe_prefill:
        workspace = make_prefill_workspace(*sizes, 1, BFLOAT, x.device, scratch_bytes=0)
    out = torch.empty_like(x)

    def call():
        forward(x, layer, ids, weights, workspace, out)

    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        kept = x + 1
        with pytest.raises(RuntimeError, match="not compiled yet; call it once"):
            call()
    assert kept.shape == x.shape
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for seed in (1, 2):
        for old, new in zip((x, ids, weights), inputs(layer, 5, 2, BFLOAT, seed=seed), strict=True):
            old.copy_(new)
        call()
        eager = out.clone()
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, eager)


@GPU
def test_the_same_bits_while_others_work():  # RT-9a
    layer = expanded(on_gpu(Geometry(512, 512, 32)))
    x, ids, weights = inputs(layer, 16, 8, BFLOAT)
    expected = moe_forward(x, layer, ids, weights)
    other, stream = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(stream):
            other = (other @ other).tanh()
        assert torch.equal(moe_forward(x, layer, ids, weights), expected)


@GPU
def test_memory_while_loading(tmp_path):
    """Besides what is kept, one packed layer."""
    path = write_package(tmp_path / "package", Geometry(1024, 1024, 24), layers=(0, 1, 2))
    load_package(path, device="cuda", expand="e4m3", layers=[0])  # the kernels' own tables
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = load_package(path, device="cuda", expand="e4m3")
    some = 1 << 20  # allocations are rounded up
    held = torch.cuda.memory_allocated() - before
    assert loaded.held_bytes <= held <= loaded.held_bytes + some
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= loaded.held_bytes + loaded.load_bytes // 3 + some
