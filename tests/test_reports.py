"""The committed reports are those that the scripts write now, of the committed runs."""

from pathlib import Path

import judge_small_batches
import judge_study
import judge_uncertainty_term
import measure_direction_quality
import pytest
import show_recommended
import tabulate_search

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


JUDGED = {
    "paper/plain": "R/paper --noise 0",
    "paper/noise": "R/paper --noise 1",
    "paper_every_tenth": "R/paper_every_tenth --noise 0",
    "first": "R/first --noise 0",
    "pilot": "R/pilot --noise 0",
    "pilot/noise": "R/pilot --noise 1",
    "adversarial_noise": "R/adversarial_noise --noise 1",
    "adversarial_noise_repeated": "R/adversarial_noise R/adversarial_noise_repeated --noise 1",
}


@pytest.mark.parametrize(
    ("report", "main", "words"),
    [
        ("recommended/report.md", show_recommended.main, "--report --output OUTPUT"),
        ("uncertainty_term.md", judge_uncertainty_term.main, "--report OUTPUT/uncertainty_term.md"),
        *(
            (f"{name}/report.md", judge_small_batches.main, f"--folder R/{name} --report OUTPUT")
            for name in ("small_batches", "small_batches_confirmation")
        ),
        *(
            (f"{name}/judged.md", judge_study.main, f"--folder {words} --report OUTPUT/judged.md")
            for name, words in JUDGED.items()
        ),
    ],
)
def test_the_committed_report_is_that_of_the_committed_runs(report, main, words, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(judge_small_batches, "draw", lambda *_: None)
    main(words.replace("R/", "benchmarks/results/").replace("OUTPUT", str(tmp_path)).split())
    committed, written = RESULTS / report, tmp_path / Path(report).name
    assert written.read_text("utf-8") == committed.read_text("utf-8")
    assert all((committed.parent / figure.name).exists() for figure in tmp_path.glob("*.png"))


def test_the_reports_of_the_search_and_of_directions_are_those_of_the_committed_runs():
    search = tabulate_search.report(RESULTS / "search", RESULTS / "rivals")
    assert (RESULTS / "search" / "report.md").read_text("utf-8") == search
    for folder in (".", "n_steps_125", "n_steps_250", "n_steps_500", "n_steps_4000"):
        place = RESULTS / "direction_quality" / folder
        report = measure_direction_quality.report(measure_direction_quality.read(sorted(place.glob("*.json"))))
        assert (place / "report.md").read_text("utf-8") == report
