"""A layer of 1,000 experts, from random words: headers stay small, documents are checked fast."""

import time
from pathlib import Path

from packages import write_package

from qsrt_pack.validate import validate
from qsrt_runtime.format import manifest, schema
from qsrt_runtime.format.geometry import Geometry
from qsrt_runtime.format.package import open_package


def test_st_2f_a_thousand_experts(tmp_path: Path) -> None:
    path = write_package(tmp_path / "package", Geometry(128, 256, 1000), topk=8)
    layer_file = path / manifest.layer_file_name(0)
    assert int.from_bytes(layer_file.read_bytes()[:8], "little") < 2000

    start = time.perf_counter()
    package = open_package(path)
    assert time.perf_counter() - start < 5
    assert len(schema.dump(package.documents.manifest)) < 10_000
    assert validate(path, show_progress=False)["experts"] == 1000
