"""The supplement: further samples, others than the figure's, all of them shown."""

import re
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure

from ecinn.progress import Progress
from ecinn.studies.paper import figures_digits as digits
from ecinn.studies.paper import style, supplement
from ecinn.studies.paper.artefact import ARTEFACTS, Context, Made

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def context() -> Context:
    return Context(seed=0)


def test_every_figure_of_samples_has_a_supplement() -> None:
    names = [artefact.name for artefact in ARTEFACTS]
    assert names[-10:] == [f"supplement-{figure}" for figure in range(1, 11)]


def test_supplement_3_shows_two_hundred_further_samples(context) -> None:
    made = supplement.figure_3(context)
    pages = made.books["supplement-3"]
    assert len(re.findall(rb"/Type /Page\b", style.pdf_bytes(pages))) == len(pages) == 2
    assert sum(len(figure.axes[0].images) for figure in pages) == 2 * 200
    places = torch.tensor(made.data["supplement-3"])
    labels = context.data("fakemnist", "test").labels[places]
    assert torch.equal(labels, torch.arange(10).expand(20, 10))
    own = [row["test_image"] for row in digits.figure_3(context).data["figure-3"]]
    assert own not in places.tolist()


@pytest.mark.parametrize(("figure", "sheets"), [(4, 2), (5, 1), (6, 2), (7, 5)])
def test_supplements_of_figures_with_counterfactuals(context, monkeypatch, figure, sheets) -> None:
    monkeypatch.setattr(supplement, "SHEETS", sheets)
    seen: list[Progress] = []
    watched = Context(observe=seen.append)
    vars(watched).update(model=context.model, data=context.data)
    name = f"supplement-{figure}"
    made = getattr(supplement, f"figure_{figure}")(watched)
    assert [(progress.done, progress.total) for progress in seen] == [
        (n + 1, sheets) for n in range(sheets)
    ]
    numbers = made.data[name]
    assert [len(sheet) for sheet in numbers] == [9] * sheets
    assert all(row["p"] != row["q"] for sheet in numbers for row in sheet)
    images = sum(len(page.axes[0].images) for page in made.books[name])
    assert images == sheets * 36 * (2 if figure == 4 else 1)
    reached = sum(row["reached"] for sheet in numbers for row in sheet)
    assert f"{9 * sheets} counterfactuals, {reached} of them" in made.captions[name]
    if figure == 6:
        assert {row["q"] for sheet in numbers for row in sheet} == {"0"}
    if figure == 7:
        pairs = [(sheet[0]["p"], sheet[0]["q"]) for sheet in numbers]
        assert pairs[:4] == [("4", "9")] * 4
        shown = [row["test_image"] for sheet in numbers[:4] for row in sheet]
        assert len(set(shown)) > 30


def test_supplement_6_has_two_sheets_per_target(context, monkeypatch) -> None:
    targets = []
    monkeypatch.setattr(digits, "all_to_one", lambda tested, target, draws: targets.append(target))
    monkeypatch.setattr(supplement, "_book", lambda name, shown: Made())
    supplement.figure_6(context)
    assert targets == [digit for digit in range(10) for _ in range(2)]


def test_supplement_2_has_nine_further_pairs_with_numbers(context, monkeypatch) -> None:
    asked, figure = [], Figure()
    found = SimpleNamespace(numbers=lambda: {"points": [[0.0]], "alpha_0": 0.4, "z": [1.0]})

    def projected(model, data, p, q, draws) -> tuple:
        asked.append((p, q))
        return found, figure, 17

    monkeypatch.setattr(supplement, "projected", projected)
    made = supplement.figure_2(context)
    assert len(made.books["supplement-2"]) == 9
    assert len(set(asked)) > 6
    assert made.data["supplement-2"] == [
        {"p": p, "q": q, "test_image": 17, "alpha_0": 0.4, "z": [1.0]} for p, q in asked
    ]
    assert all(p != q for p, q in asked)


@pytest.mark.parametrize("seed", [0, 4])
def test_draws_differ_from_those_of_the_figures(seed) -> None:
    given = Context(seed=seed)
    for figure in range(1, 11):
        own, further = given.generator(figure), given.generator(supplement.FURTHER + figure)
        assert own.initial_seed() != further.initial_seed()
