import pytest
import torch

from qsrt_pack.calibrate import statistics
from qsrt_pack.calibrate.statistics import PARTS, gather, part_of, parts_of, rows_of

CPU, EXPERTS, HIDDEN = torch.device("cpu"), 4, 8


@pytest.fixture
def routed():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(600, HIDDEN, generator=generator).to(torch.bfloat16)
    gates, ids = torch.rand(600, EXPERTS, generator=generator).topk(2)
    return rows, ids.int(), gates, torch.arange(60).repeat_interleave(10)


def collected(routed, limit=1000, seed=0):
    return gather(*routed, EXPERTS, limit=limit, seed=seed, device=CPU)


def test_everything_is_kept_below_the_limit(routed):
    rows, ids, gates, documents = routed
    layer = collected(routed)
    assert torch.equal(layer.rows, rows)
    assert torch.equal(layer.places, torch.arange(600))
    for expert in range(EXPERTS):
        place, choice = (ids == expert).nonzero(as_tuple=True)
        found = rows_of(layer, expert, CPU)
        assert torch.equal(found.rows, rows[place].float())
        assert torch.equal(found.gates, gates[place, choice])
        assert torch.equal(found.documents.long(), documents[place])
        assert int(layer.tokens[expert]) == len(place)


def test_reservoir(routed):
    layer, other = collected(routed, limit=50), collected(routed, limit=50, seed=1)
    whole = collected(routed)
    for expert in range(EXPERTS):
        found, everything = rows_of(layer, expert, CPU), rows_of(whole, expert, CPU)
        assert len(found.gates) == 50
        assert torch.isin(found.gates, everything.gates).all()
        assert int(layer.tokens[expert]) == len(everything.gates)
    assert torch.equal(layer.moments, whole.moments)
    assert len(layer.rows) < 600
    assert not torch.equal(layer.places, other.places)
    # A larger reservoir holds the smaller one: the draw is by place alone.
    larger = collected(routed, limit=80)
    assert torch.isin(layer.places, larger.places).all()


def test_reservoir_does_not_prefer_the_first(routed):
    place = collected(routed, limit=60).places.double().mean()
    assert 250 < float(place) < 350


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["rows", "gates"])
def test_rows_that_are_not_finite_are_dropped_and_counted(routed, value, where):  # QN-5b
    rows, ids, gates, documents = (part.clone() for part in routed)
    (rows if where == "rows" else gates)[[5, 70], 1] = value
    layer = collected((rows, ids, gates, documents))
    assert int(layer.dropped) == 2
    assert int(layer.tokens.sum()) == 2 * 598
    assert not torch.isin(torch.tensor([5, 70]), layer.places).any()
    for name in ("rows", "gates", "moments", "weights"):
        assert getattr(layer, name).isfinite().all()


def test_rows_beyond_bfloat16_are_dropped(routed):
    rows, *others = routed
    rows = rows.float()
    rows[3, 0] = torch.finfo(torch.float32).max  # rounds to infinity
    assert int(collected((rows, *others)).dropped) == 1


def test_moments_by_part(routed):
    rows, ids, gates, documents = routed
    layer = collected(routed)
    power = gates.double().square().sum(1)
    for place, part in enumerate(PARTS):
        chosen = torch.tensor([part_of(int(d)) == part for d in documents])
        x, w = rows[chosen].double(), power[chosen]
        torch.testing.assert_close(
            layer.moments[place].double(), (x.T * w) @ x, rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(layer.weights[place], torch.stack([w.sum(), w.square().sum()]))
    assert ids.min() >= 0


def test_moments_are_summed_in_chunks(routed, monkeypatch):
    expected = collected(routed).moments
    monkeypatch.setattr(statistics, "_CHUNK", 7)
    torch.testing.assert_close(collected(routed).moments, expected, rtol=1e-4, atol=1e-4)


def test_parts_are_of_documents_and_of_their_sizes():
    parts = [part_of(document) for document in range(4000)]
    counts = [parts.count(part) / len(parts) for part in PARTS]
    assert counts == pytest.approx([12 / 16, 3 / 16, 1 / 16], abs=0.02)
    documents = torch.tensor([7, 7, 3, 900, 3])
    assert [PARTS[i] for i in parts_of(documents).tolist()] == [parts[d] for d in documents]


def test_a_layer_without_rows():
    nothing = (torch.empty(0, HIDDEN), torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2))
    layer = collected((*nothing, torch.empty(0, dtype=torch.int64)))
    assert layer.tokens.tolist() == [0] * EXPERTS
    assert rows_of(layer, 0, CPU).rows.shape == (0, HIDDEN)
