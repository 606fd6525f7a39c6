import logging

import pytest

from qsrt_pack.quality import describe_worst, report_expert


@pytest.mark.parametrize(
    ("nmse", "zero", "tokens", "messages"),
    [
        ((0.02, 0.02, 0.02), [], None, []),
        ((0.02, 0.11, 0.5), [], None, ["w3, w2 coded poorly"]),
        ((0.02, 0.11, 0.5), [], 7, []),  # calibrated, where it is no measure
        ((0.0, 0.02, 0.02), ["w1"], None, ["w1 all zero"]),
        (
            (0.0, 1.0, 0.2),
            ["w1", "w3"],
            None,
            [
                "w1 all zero",
                "w3 too small for float16 scales, decodes to zeros",
                "w2 coded poorly",
            ],
        ),
    ],
)
def test_what_is_not_coded_well_is_told(
    caplog: pytest.LogCaptureFixture,
    nmse: tuple[float, float, float],
    zero: list[str],
    tokens: int | None,
    messages: list[str],
) -> None:
    errors = dict(zip(("w1", "w3", "w2"), nmse, strict=True))
    entry = {"expert": 5, "nmse": errors, "zero_matrices": zero, "tokens": tokens}
    with caplog.at_level(logging.WARNING, "qsrt_pack"):
        report_expert(3, entry)
    assert [r.message for r in caplog.records] == [f"layer 3 expert 5: {m}" for m in messages]


def test_the_worst_experts_are_listed() -> None:
    def entry(expert: int, *errors: float) -> dict:
        nmse = dict(zip(("w1", "w3", "w2"), errors, strict=True))
        return {"expert": expert, "mode13": "R0", "mode2": "R1", "nmse": nmse}

    evidence = {
        3: {"experts": [entry(0, 0.01, 0.01, 0.01), entry(1, 0.02, 0.5, 0.02)]},
        12: {"experts": [entry(e, 0.03, 0.02, 0.1 - e / 100) for e in range(5)]},
    }
    title, columns, *rows = describe_worst(evidence).splitlines()
    assert title == "worst experts"
    assert columns.split() == ["layer", "expert", "modes", "NMSE", "w1", "w3", "w2"]
    assert [row.split() for row in rows] == [
        ["3", "1", "R0", "R1", "0.02000", "0.50000", "0.02000"],
        *(
            ["12", str(e), "R0", "R1", "0.03000", "0.02000", f"{0.1 - e / 100:.5f}"]
            for e in range(4)
        ),
    ]
