"""Sections about networks, against the same metrics computed here."""

import numpy as np
import pytest

from dkcls.analysis import erf
from dkcls.analysis.dynamics import beside, collect_dynamics, explain, explain_control
from dkcls.analysis.probes import Look
from dkcls.data.sets.deformed_fashion import DeformedFashion, Factors
from dkcls.report.page import table
from dkcls.report.sections import Subject, curves_section, dynamics_section, fields_section
from tests.models.common import awake, create, stir
from tests.report.common import labelled, write_metrics


@pytest.fixture(scope="module")
def subject(tmp_path_factory) -> Subject:
    path = tmp_path_factory.mktemp("subject") / "metrics.jsonl"
    train = [{"kind": "train", "step": s, "loss": 4.0 / s} for s in (1, 2)]
    write_metrics(
        path,
        *train,
        {"kind": "val", "step": 1, "top1": 5.0},
        {"kind": "val", "step": 2, "top1": 6.0},
    )
    model = stir(awake(create(spatial="local_dk", num_classes=10, in_chans=1)))
    return Subject("local", model, DeformedFashion("val"), path)


def test_a_report_has_the_curves_of_its_runs(drawn, subject):
    assert "training loss and validation top-1 over the steps" in curves_section([subject]).content
    loss, accuracy = drawn[0].axes
    assert labelled(loss) == {"local": [(1, 4), (2, 2)]}
    assert labelled(accuracy) == {"local": [(1, 5), (2, 6)]}


def test_a_report_looks_into_networks_with_images_as_they_take_them(drawn, subject, monkeypatch):
    """Compare the object's ERF with that of an image that is normalised by hand.

    The object stands on pixel 16, half a pixel off the middle.
    """
    monkeypatch.setattr("dkcls.report.sections.SIZES", {"A large object": 1.05})
    monkeypatch.setattr(
        "dkcls.report.sections.middle", lambda *network: Look((16.0, 16.0), (2, 2))
    )  # which takes long to find
    content = fields_section([subject]).content
    dataset = subject.dataset
    index = np.flatnonzero(dataset.targets == dataset.class_names.index("Ankle boot"))[:1]
    factors = Factors(*(np.array([value]) for value in (1.05, 20.0, 0.5, 0.5)))
    images, masks = dataset.render(index, factors)
    field = erf.effective_receptive_field(
        subject.model, (images / 255 - 0.15) / 0.25, (2, 2), projections=32
    )[0]
    inside = 100 * erf.share_inside(field, masks[0])
    assert f"local: radius {erf.radius(field):.1f}, {inside:.0f} % inside" in content


def test_a_report_says_what_the_last_layer_follows(drawn, subject, monkeypatch):
    monkeypatch.setattr("dkcls.report.sections.IMAGES", 60)
    content = dynamics_section([subject]).content
    batch = subject.dataset.load(np.arange(60)).batch
    found = collect_dynamics(subject.model, [(batch.images / 255 - 0.15) / 0.25])
    last = found[max(found)]  # the names are numbered: blocks.0, blocks.1, ...
    about = batch.targets.numpy(), subject.dataset.factors(np.arange(60)).scale
    cells = beside(explain(last.values, *about), explain_control(last, *about))
    assert table([{"setting": "local"} | cells]) in content
