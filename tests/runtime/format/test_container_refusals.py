import json

import pytest
import torch

from qsrt_runtime.format import atom, container, slab, tensorfile
from qsrt_runtime.format.errors import FormatError

SECTION, SCALES, ATOMS = "_qsrt_format_section", "_qsrt_shared_scale_section", "qsrt_atoms"
TENSORS = (SECTION, SCALES, ATOMS)
CONSTANTS = {
    "alignment_bytes": "8192",
    "atom_channels": "64",
    "codebook": "sqg_cheb",
    "encoding": "qsrt",
    "format": "np",
    "profile_id": "2",
    "record_channels": "256",
    "rotation_multiplier": "3",
    "schema": "kquant_fruit_qsrt_atoms_v2",
    "version": "2",
}
DERIVED = (  # each follows from experts and the two channel counts
    *("atom_bundle_bytes", "atom_slot_payload_bytes", "atom_slot_stride_bytes", "atom_slots"),
    *("compressed_experts", "format_section_bytes", "pair_count", "shared_scale_rows"),
    *("shared_scale_section_bytes", "x4t_experts"),
)
FREE = ("experts", "intermediate_channels", "latent_channels", "layer")
DIGESTS = ("source_sha256", "encoder_fingerprint")
KEYS = sorted({*CONSTANTS, *DERIVED, *FREE, *DIGESTS})


def refused(path, *parts):
    with pytest.raises(FormatError) as caught:
        container.read_layer(path)
    for part in (str(path), *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize("key", KEYS)
def test_missing_metadata(damaged_layer, key):
    refused(damaged_layer(lambda header: header["__metadata__"].pop(key)), key)


def test_every_key_is_here(tiny_layer):
    length = int.from_bytes(tiny_layer[:8], "little")
    assert sorted(json.loads(tiny_layer[8 : 8 + length])["__metadata__"]) == KEYS


def test_extra_metadata(damaged_layer):
    refused(damaged_layer(lambda header: header["__metadata__"].update(more="1")), "more")


def test_no_metadata(damaged_layer):
    refused(damaged_layer(lambda header: header.pop("__metadata__")), "schema None")


@pytest.mark.parametrize(("key", "value"), CONSTANTS.items())
def test_other_constants(damaged_layer, key, value):
    refused(damaged_layer(lambda header: header["__metadata__"].update({key: value})), key, value)


@pytest.mark.parametrize("change", [1, -1, 4096])
@pytest.mark.parametrize("key", DERIVED)
def test_derived_metadata(damaged_layer, key, change):
    def edit(header):
        metadata = header["__metadata__"]
        metadata[key] = str(int(metadata[key]) + change)

    if key == "compressed_experts":
        refused(damaged_layer(edit))  # what follows from it disagrees first
    elif key == "atom_slot_stride_bytes" and change == 4096:
        refused(damaged_layer(edit), "qsrt_atoms has shape")  # a larger stride may be
    else:
        refused(damaged_layer(edit), key)


@pytest.mark.parametrize("text", ["", "x", "-1", "+1", " 1", "1 ", "1.0", "1e3", "01", "٣"])
@pytest.mark.parametrize("key", [*DERIVED, *FREE])
def test_numbers_not_in_decimal(damaged_layer, key, text):
    refused(damaged_layer(lambda header: header["__metadata__"].update({key: text})), key)


@pytest.mark.parametrize("text", ["", "a" * 63, "a" * 65, "A" * 64, "g" * 64, " " * 64])
@pytest.mark.parametrize("key", DIGESTS)
def test_digests_in_metadata(damaged_layer, key, text):
    refused(damaged_layer(lambda header: header["__metadata__"].update({key: text})), key)


@pytest.mark.parametrize("key", DIGESTS)
def test_digests_with_a_newline(damaged_layer, key):
    text = "a" * 64 + "\n"
    refused(damaged_layer(lambda header: header["__metadata__"].update({key: text})), key)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("experts", "1"),
        ("experts", "3"),
        ("latent_channels", "256"),
        ("intermediate_channels", "512"),
    ],
)
def test_other_sizes(damaged_layer, key, value):
    edit = damaged_layer(lambda header: header["__metadata__"].update({key: value}))
    refused(edit, value, "expected")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("experts", "0"),
        ("latent_channels", "0"),
        ("latent_channels", "129"),
        ("intermediate_channels", "0"),
        ("intermediate_channels", "128"),
    ],
)
def test_impossible_sizes(damaged_layer, key, value):
    path = damaged_layer(lambda header: header["__metadata__"].update({key: value}))
    with pytest.raises(FormatError, match=rf"\b{value}\b"):
        container.read_layer(path)


def test_impossible_size_names_the_file(damaged_layer):
    path = damaged_layer(lambda header: header["__metadata__"].update(latent_channels="129"))
    refused(path)


def test_a_fruit_header_of_other_slots(golden, tmp_path):
    """The canonical sizes fix slots, pairs and bundle bytes in the schema itself."""
    data = (golden / "publication/qsrt-layer-005.safetensors").read_bytes()
    path = tmp_path / "layer.safetensors"
    for old, new, key in (
        (b'"atom_slots":"16"', b'"atom_slots":"24"', "atom_slots"),
        (b'"pair_count":"2"', b'"pair_count":"3"', "pair_count"),
        (b'"atom_bundle_bytes":"37056"', b'"atom_bundle_bytes":"37057"', "atom_bundle_bytes"),
    ):
        assert old in data
        path.write_bytes(data.replace(old, new))
        refused(path, f"$.metadata.{key}")


@pytest.mark.parametrize("name", TENSORS)
def test_renamed_tensor(damaged_layer, name):
    def edit(header):
        header[name + "2"] = header.pop(name)

    refused(damaged_layer(edit), name)


def test_extra_tensor(damaged_layer):
    def edit(header):
        end = header[ATOMS]["data_offsets"][1]
        header["extra"] = {"dtype": "U8", "shape": [0], "data_offsets": [end, end]}

    refused(damaged_layer(edit), "extra")


@pytest.mark.parametrize("name", TENSORS)
def test_missing_tensor(tmp_path, tiny_layer, name):
    length = int.from_bytes(tiny_layer[:8], "little")
    header = json.loads(tiny_layer[8 : 8 + length])
    entries = {n: ("U8", tuple(header[n]["shape"])) for n in TENSORS if n != name}
    path = tmp_path / "layer.safetensors"
    head = tensorfile.header_bytes(header["__metadata__"], tensorfile.layout(entries))
    size = sum(tensorfile.tensor_bytes(*entry) for entry in entries.values())
    path.write_bytes(head + bytes(size))
    refused(path, f"'{name}' is a required property")


def test_reordered_tensors(damaged_layer):
    def edit(header):  # both sections have 4,096 bytes here
        header[SECTION], header[SCALES] = header[SCALES], header[SECTION]

    refused(damaged_layer(edit), "order", SCALES)


def test_key_order_of_the_header_is_free(damaged_layer, tiny_experts):
    def edit(header):
        items = list(header.items())
        header.clear()
        header.update(reversed(items))

    found = slab.unpack_expert(container.read_layer(damaged_layer(edit)), 1)
    assert torch.equal(atom.pack_expert(found), atom.pack_expert(tiny_experts[1]))


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("dtype", ["I8", "BOOL", "F8_E4M3"])
def test_wrong_dtype(damaged_layer, name, dtype):
    refused(damaged_layer(lambda header: header[name].update(dtype=dtype)), name, dtype)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (SECTION, [1, 4096]),
        (SCALES, [2, 2048]),
        (ATOMS, [98304]),
        (ATOMS, [8, 1, 12288]),
        (ATOMS, [12288, 8]),
        (ATOMS, [4, 24576]),
    ],
)
def test_wrong_shape(damaged_layer, name, shape):
    refused(damaged_layer(lambda header: header[name].update(shape=shape)), name)


@pytest.mark.parametrize(
    ("name", "offset"),
    [
        (SECTION, 2),
        (SECTION, -1),
        (SCALES, 3 * 2 * 128 * 2),
        (SCALES, -1),
        (ATOMS, 9600),
        (ATOMS, 12287),
        (ATOMS, 3 * 12288 + 9600),
        (ATOMS, -1),
    ],
)
def test_padding(damaged_layer, name, offset):
    refused(damaged_layer(flips={(name, offset): 1}), name, "padding that is not zero")


@pytest.mark.parametrize("high", [0x7C, 0x7E, 0xFC, 0xFF])  # infinities and NaNs
@pytest.mark.parametrize(
    ("name", "offset"),
    [
        (SCALES, 1),
        (SCALES, 3 * 2 * 128 * 2 - 1),
        (ATOMS, 36 * 128 + 1),
        (ATOMS, 4800 - 1),
        (ATOMS, 7 * 12288 + 9600 - 1),
    ],
)
def test_scales_that_are_not_finite(damaged_layer, name, offset, high):
    path = damaged_layer(flips={(name, offset - 1): 0, (name, offset): high})
    refused(path, name, "not finite")


def test_bytes_that_are_no_scale_may_be_anything(damaged_layer):
    path = damaged_layer(flips={(ATOMS, offset): 0xFF for offset in range(36 * 128)})
    assert container.read_layer(path).atoms[0, : 36 * 128].eq(0xFF).all()


@pytest.mark.parametrize(
    ("code", "part"),
    [
        (0x30, "nibble 3"),
        (0x03, "nibble 3"),
        (0x40, "nibble 4"),
        (0x04, "nibble 4"),
        (0xF0, "nibble 15"),
        (0x20, "R2 needs 4 records"),
        (0x02, "R2 needs 4 records"),
    ],
)
def test_codes(damaged_layer, code, part):
    path = damaged_layer(flips={(SECTION, 1): code})
    with pytest.raises(FormatError, match=f"layer 3 expert 1.*{part}"):
        container.read_layer(path)


def test_count_of_x4t_experts(damaged_layer, golden, tmp_path):
    refused(damaged_layer(flips={(SECTION, 1): 0xFF}), "1 X4T format codes, its metadata says 0")
    path = tmp_path / "kimi.safetensors"
    data = bytearray((golden / "kimi_layer.safetensors").read_bytes())
    data[4096 + 1] = 0x00
    path.write_bytes(data)
    refused(path, "0 X4T format codes, its metadata says 1")


@pytest.mark.parametrize("change", ["drop", "codebook", "slots"])
def test_kimi_header(golden, tmp_path, change):
    data = (golden / "kimi_layer.safetensors").read_bytes()
    header = json.loads(data[8:4096])
    metadata = header["__metadata__"]
    if change == "drop":
        del metadata["profile_id"]
    elif change == "codebook":
        metadata["codebook"] = "sqg_xor_cheb_t12"
    else:
        metadata["atom_slots"] = "16"
    text = json.dumps(header).encode()
    path = tmp_path / "kimi.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[4096:])
    refused(path, {"drop": "profile_id", "codebook": "codebook", "slots": "atom_slots"}[change])


@pytest.mark.parametrize("cut", [0, 4, 8, 100, 1048, 5000, 9239, 9240, -12288, -1])
def test_truncated(tiny_layer, tmp_path, cut):
    path = tmp_path / "layer.safetensors"
    path.write_bytes(tiny_layer[:cut])
    refused(path, "truncated")


def test_trailing_bytes(tiny_layer, tmp_path):
    path = tmp_path / "layer.safetensors"
    path.write_bytes(tiny_layer + b"\0")
    refused(path, "1 bytes follow the last tensor")


@pytest.mark.parametrize(
    "encode", [lambda t: b"\xef\xbb\xbf" + t, lambda t: t.decode().encode("utf-16")]
)
def test_header_that_is_not_plain_utf8(tiny_layer, tmp_path, encode):
    length = int.from_bytes(tiny_layer[:8], "little")
    text = encode(tiny_layer[8 : 8 + length])
    path = tmp_path / "layer.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + tiny_layer[8 + length :])
    refused(path)


def test_missing_file(tmp_path):
    refused(tmp_path / "layer.safetensors")
