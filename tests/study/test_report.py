"""Reports of made-up studies: what they say is what the records hold."""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import zipfile
from collections import OrderedDict, defaultdict

import matplotlib.image
import numpy as np
import pytest
import yaml
from scipy import stats
from torch import nn

from sb3_uatrpo import study
from sb3_uatrpo.study.folders import read_folder, read_zoo_folder
from sb3_uatrpo.study.plots import PICTURES
from sb3_uatrpo.study.record import StudyError, write_record
from sb3_uatrpo.study.report import _seeds, report
from sb3_uatrpo.study.results import Results, evaluations, in_order, pairs_of, tabulate_runs
from tests.study.synthetic import make_folder, make_record, make_study

DRAWN = {
    "learning_curves", "evaluations", "cvar", "cvar_over_training", "differences", "kl_ratio", "kl_ratio_over_training",
    "performance_profiles", "interquartile_means", "probability_of_improvement",
}  # fmt: skip


def section(text: str, heading: str) -> str:
    return re.split(r"^## ", text.split(f"\n## {heading}\n")[1], flags=re.M)[0]


def tables(text: str) -> list[list[list[str]]]:
    """The cells of all tables, without their headers."""
    found = [block.splitlines()[2:] for block in text.strip().split("\n\n") if block.startswith("|")]
    return [[[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table] for table in found]


def rows(text: str) -> list[list[str]]:
    return tables(text)[0]


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def final_returns(folder) -> dict[tuple[str, ...], np.ndarray]:
    """Final returns of the runs, by environment, variant and algorithm, as in the tables."""
    finals = defaultdict(list)
    for record in read_folder(folder)[0]:
        spec = record.spec
        timesteps, returns = (np.array(record.episodes[name]) for name in ("timesteps", "returns"))
        mean = returns[timesteps > 0.9 * spec.n_timesteps].mean()
        finals[spec.env_id, spec.variant or "–", spec.algo].append(mean)
    return {key: np.array(values) for key, values in finals.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two algorithms, two environments, with and without noise, three seeds."""
    folder = make_study(tmp_path_factory.mktemp("study"), n_seeds=3)
    path = report(folder, folder / "report")
    return folder, path.read_text(encoding="utf-8")


def test_pictures_are_there_and_linked(whole):
    folder, text = whole
    output = folder / "report"
    assert {path.stem for path in output.glob("*.png")} == DRAWN
    for name in DRAWN:
        assert f"]({name}.png)" in text
        assert f"]({name}.svg)" in text
        picture = matplotlib.image.imread(output / f"{name}.png")
        # more than paper
        assert picture.std() > 0.02
        assert (output / f"{name}.svg").read_text(encoding="utf-8").lstrip().startswith("<?xml")
    assert sum(path.stat().st_size for path in output.iterdir()) < 4_000_000


def test_the_definition_of_the_final_return_is_printed(whole):
    said = section(whole[1], "What the numbers are")
    assert (
        "*Final return* of a run: mean undiscounted training return of the episodes that ended in the last 10%" in said
    )


def test_the_table_of_returns(whole):
    folder, text = whole
    assert text.splitlines()[2].startswith("24 runs done, 0 failed, 0 left out")
    table = rows(section(text, "Returns"))
    assert [row[:3] for row in table[:2]] == [
        ["HalfCheetah-v4", "–", "uatrpo"],
        ["HalfCheetah-v4", "–", "trpo_matched"],
    ]
    assert len(table) == 8
    records, _ = read_folder(folder)
    finals = [
        study.final_return(record.episodes["timesteps"], record.episodes["returns"], 300_000)
        for record in records
        if (record.spec.algo, record.spec.env_id, record.spec.variant) == ("uatrpo", "Hopper-v4", "noise=1")
    ]
    (row,) = [row for row in table if row[:3] == ["Hopper-v4", "noise=1", "uatrpo"]]
    assert row[3] == "3"
    assert row[4].startswith(f"{np.mean(finals):,.0f} ± ")
    assert row[6] == f"{min(finals):,.0f}"
    assert row[8] == "1 run"
    assert "**The 20%-CVaR of 3 runs is the worst run alone.**" in text


def test_differences_and_proposed_steps(whole):
    _, text = whole
    table = rows(section(text, "Differences"))
    assert {row[2] for row in table} == {"uatrpo − trpo_matched"}
    assert [row[:2] for row in table] == [
        ["HalfCheetah-v4", "–"], ["HalfCheetah-v4", "noise=1"], ["Hopper-v4", "–"], ["Hopper-v4", "noise=1"],
    ]  # fmt: skip
    steps = rows(section(text, "Proposed steps"))
    by_algorithm = {row[2]: row for row in steps}
    assert float(by_algorithm["uatrpo"][4]) == pytest.approx(1.0, abs=0.05)
    assert float(by_algorithm["trpo_matched"][4]) == pytest.approx(1.8, abs=0.15)
    assert 35 < float(by_algorithm["trpo_matched"][5].rstrip("%")) < 50


def test_every_number_of_the_tables(whole):
    """Computed again, by numpy and scipy alone."""
    folder, text = whole
    finals = final_returns(folder)
    for row in rows(section(text, "Returns")):
        x = finals[tuple(row[:3])]
        mean, _, error = row[4].partition(" ± ")
        assert [number(mean), number(error)] == pytest.approx([x.mean(), stats.sem(x)], rel=1e-3, abs=0.5)
        low, high = map(number, row[5].split(" to "))
        assert min(x) - 1 <= low < x.mean() < high <= max(x) + 1
        assert [number(cell) for cell in (row[6], row[9], row[10])] == pytest.approx([min(x), min(x), max(x)], abs=0.5)
    for row in rows(section(text, "Differences")):
        x, y = (finals[row[0], row[1], algo] for algo in ("uatrpo", "trpo_matched"))
        assert number(row[4]) == pytest.approx(x.mean() - y.mean(), rel=1e-3)
        welch = stats.ttest_ind(x, y, equal_var=False)
        assert row[6] == f"{welch.statistic:.2f}"
        assert row[7] == f"{welch.pvalue:.3f}"
        # three runs: the 20%-CVaR is the lowest
        assert number(row[8]) == pytest.approx(min(x) - min(y), rel=1e-3)
        assert number(row[10]) == pytest.approx((x[:, None] > y).mean(), abs=0.005)
    logged = defaultdict(list)
    for record in read_folder(folder)[0]:
        for key in ("kl_ratio", "kl_proposed"):
            logged[record.spec.env_id, record.spec.variant or "–", record.spec.algo, key] += record.updates[key]
    for row in rows(section(text, "Proposed steps")):
        ratio, proposed = (np.array(logged[(*row[:3], key)], dtype=float) for key in ("kl_ratio", "kl_proposed"))
        ratio = ratio[np.isfinite(ratio)]
        shares = [f"{np.mean(ratio >= threshold):.1%}" for threshold in (2, 3)]
        assert row[3:] == [f"{len(ratio):,}", f"{np.median(ratio):.2f}", *shares, f"{proposed.mean():.4f}"]


def test_a_second_report_is_the_same(tmp_path):
    folder = make_study(tmp_path / "study", n_seeds=2, env_ids=("Hopper-v4",), variants=("",))
    first, second = (report(folder, tmp_path / name) for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    for name in DRAWN:
        for extension in ("png", "svg"):
            files = [path.with_name(f"{name}.{extension}").read_bytes() for path in (first, second)]
            assert files[0] == files[1], name


# ------------------------------------------------------------------------------------------------------- special cases


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page alone of a study's report; pictures take most of its time, and others look at them."""
    monkeypatch.setattr("sb3_uatrpo.study.plots.draw_pictures", lambda results, output: set())

    def write_page(folder, **options):
        return report(folder, tmp_path / "report", **options).read_text(encoding="utf-8")

    return write_page


def write(folder, *records):
    make_folder(folder)
    for record in records:
        write_record(record, folder / "records")
    return folder


def test_one_run_has_no_intervals(tmp_path):
    folder = write(tmp_path / "study", make_record(final=123.0))
    text = report(folder, tmp_path / "report").read_text(encoding="utf-8")
    (row,) = rows(section(text, "Returns"))
    assert row[3:8] == ["1", "123.0", "–", "123.0", "–"]
    assert "A single run has neither a standard error nor an interval" in text
    assert "## Differences" not in text
    assert not (tmp_path / "report" / "differences.png").exists()


def test_unequal_runs_without_evaluations_or_kl_ratio(tmp_path):
    folder = write(
        tmp_path / "study",
        *(make_record("ppo", seed=seed, final=500.0, kl_ratio=None, eval_freq=0) for seed in range(3)),
        make_record("trpo", seed=0, final=450.0, eval_freq=0),
        *(make_record("trpo", "CartPole-v1", seed=seed, final=500.0, eval_freq=0) for seed in range(2)),
    )
    text = report(folder, tmp_path / "report").read_text(encoding="utf-8")
    (row,) = rows(section(text, "Differences"))
    assert row[2:8] == ["ppo − trpo", "3, 1", "50.00", "–", "–", "–"]
    assert "No KL ratio in the records of ppo." in text
    assert "no algorithm has the same number of runs" in text
    assert not (tmp_path / "report" / "evaluations.png").exists()
    assert all(row[-1] == "–" for row in rows(section(text, "Returns")))


def test_pictures_of_an_earlier_report_do_not_stay(tmp_path):
    folder = write(tmp_path / "study", make_record("uatrpo"), make_record("ppo"))
    report(folder, tmp_path / "report")
    assert (tmp_path / "report" / "differences.png").exists()
    next((folder / "records").glob("ppo*")).unlink()
    report(folder, tmp_path / "report")
    assert not (tmp_path / "report" / "differences.png").exists()


def test_failed_corrupted_and_empty_runs_are_counted_and_named(tmp_path, page):
    without = make_record(seed=2)
    without = dataclasses.replace(without, episodes={"timesteps": [], "returns": [], "lengths": []})
    backwards = make_record(seed=3)
    backwards.episodes["timesteps"].reverse()
    folder = write(
        tmp_path / "study", make_record(seed=0), make_record(seed=1, status="failed"), without, backwards,
        make_record("trpo", seed=0, status="failed"),
    )  # fmt: skip
    (folder / "records" / "cut.json.gz").write_text('{"format": 1, "spec"')
    text = page(folder)
    assert text.splitlines()[2].startswith("2 runs done, 2 failed, 2 left out")
    said = section(text, "Runs")
    assert "- uatrpo on Hopper-v4, seed 1: `RuntimeError: the simulator | broke`" in said
    assert "- trpo on Hopper-v4, seed 0: " in said
    assert "without a final return" in said
    assert "- uatrpo on Hopper-v4, seed 2" in said
    assert "- `cut.json.gz`: " in said
    assert "the timesteps of its episodes do not ascend" in said
    (row,) = rows(section(text, "Returns"))
    assert row[2:4] == ["uatrpo", "1"]
    # a run without a return is done too
    (row,) = [row for row in rows(said) if row[2] == "uatrpo"]
    assert row[3:] == ["2", "1", "10,000", "0, 2", "0.02"]


def test_settings_without_names_of_their_own_are_refused(tmp_path, page):
    def runs(low="", high=""):
        return [
            make_record(seed=seed, hyperparameters={"gamma": 0.99, "uncertainty_coef": coef}, final=final, variant=name)
            for coef, final, name in ((0.001, 100.0, low), (0.01, 200.0, high))
            for seed in range(2)
        ]

    expected = (
        r"^records of different settings: uatrpo on Hopper-v4 has uncertainty_coef=0.001 \(2 runs\) and "
        r"uncertainty_coef=0.01 \(2 runs\); they need names, as variants of a study file or by --vary$"
    )
    with pytest.raises(StudyError, match=expected):
        page(write(tmp_path / "nameless", *runs()))
    low, high = rows(section(page(write(tmp_path / "named", *runs("low", "uncertainty_coef=0.01"))), "Returns"))
    assert (low[2], low[6]) == ("uatrpo (low)", "100.0")
    assert (high[2], high[6]) == ("uatrpo (uncertainty_coef=0.01)", "200.0")


def test_failed_runs_with_other_settings_do_not_stand_in_the_way(tmp_path, page):
    wrong = [
        make_record(seed=0, hyperparameters={"gamma": 2}, status="failed"),
        make_record(seed=1, n_timesteps=20_000, status="failed"),
    ]
    right = [make_record(seed=seed, hyperparameters={"gamma": 0.99}) for seed in range(2)]
    text = page(write(tmp_path / "study", *wrong, *right))
    assert text.splitlines()[2].startswith("2 runs done, 2 failed")
    (row,) = rows(section(text, "Returns"))
    assert row[2:4] == ["uatrpo", "2"]
    # the settings and the steps are those of the runs that are averaged
    (row,) = rows(section(text, "Runs"))
    assert row[3:6] == ["2", "2", "10,000"]
    assert "`gamma: 0.99`" in section(text, "Settings")


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_returns_without_a_finite_standard_error_are_reported(tmp_path, page):
    text = page(write(tmp_path / "study", *(make_record(seed=seed, final=1e300 * seed) for seed in range(3))))
    assert text.splitlines()[2].startswith("3 runs done")


def test_a_difference_names_what_else_differs(tmp_path, page):
    theirs = {"gamma": 0.99, "n_envs": 2, "target_kl": 0.04}
    records = [make_record(seed=seed, hyperparameters={"gamma": 0.995, "n_envs": 2}) for seed in range(2)]
    records += [make_record("trpo", seed=seed, hyperparameters=theirs) for seed in range(2)]
    folder = write(tmp_path / "study", *records)
    said = section(page(folder), "Differences")
    assert "- uatrpo − trpo: gamma 0.995 and 0.99 (Hopper-v4)\n" in said
    elsewhere = [make_record(env_id="Swimmer-v4", hyperparameters={"gamma": 0.995})]
    elsewhere += [make_record("trpo", env_id="Swimmer-v4", hyperparameters=theirs)]
    said = section(page(write(tmp_path / "both", *records, *elsewhere)), "Differences")
    assert "- uatrpo − trpo: gamma 0.995 and 0.99 (Hopper-v4; Swimmer-v4)\n" in said
    alike = [make_record("trpo", seed=seed, hyperparameters={"gamma": 0.995}) for seed in range(2)]
    folder = write(tmp_path / "alike", *records[:2], *alike)
    assert "The algorithms are not the only difference" not in page(folder)


def test_runs_of_different_length_are_refused(tmp_path, page):
    folder = write(tmp_path / "study", make_record("uatrpo"), make_record("trpo", n_timesteps=20_000))
    with pytest.raises(
        StudyError, match=r"on Hopper-v4 they have 10,000 \(uatrpo\) and 20,000 \(trpo\) steps.*; report on"
    ):
        page(folder)


def test_a_setting_that_one_lacks_and_other_evaluations_count():
    a = make_record(seed=0, hyperparameters={"gamma": 0.9})
    b = make_record(seed=0, hyperparameters={"gamma": 0.9, "gae_lambda": 0.9}, eval_freq=0)
    expected = r"has eval_freq=0, gae_lambda=0.9 \(1 run\) and eval_freq=2000, no gae_lambda \(1 run\)"
    with pytest.raises(StudyError, match=expected):
        tabulate_runs([a, b])


def test_other_evaluations_are_no_other_training():
    """Unless one training would count twice."""
    a, b = make_record(seed=0, eval_freq=0), make_record(seed=1)
    runs = tabulate_runs([a, b])
    assert runs.record.tolist() == [a, b]
    assert runs.algorithm.tolist() == ["uatrpo"] * 2
    with pytest.raises(StudyError, match=r"has eval_freq=0 .* and eval_freq=2000 \(2 runs\)"):
        tabulate_runs([a, b, make_record(seed=0)])


def test_named_variants_are_compared_under_their_names(tmp_path, page):
    """Beside the plain algorithm, whatever was varied for both."""
    records = [
        make_record(seed=seed, variant=variant, hyperparameters={"uncertainty_coef": coef, "noise": noise})
        for name, coef in (("", 0.1), ("no covariance", 0.0))
        for noise, condition in ((0, ""), (1, "noise=1"))
        for variant in [",".join(filter(None, [name, condition]))]
        for seed in range(2)
    ]
    text = page(write(tmp_path / "study", *records))
    labels = ("uatrpo", "uatrpo (no covariance)")
    expected = [["Hopper-v4", variant, label] for variant in ("–", "noise=1") for label in labels]
    assert [row[:3] for row in rows(section(text, "Returns"))] == expected
    assert [row[2] for row in rows(section(text, "Differences"))] == ["uatrpo − uatrpo (no covariance)"] * 2


def test_success_rates(tmp_path, page):
    records = []
    for seed, successes in enumerate(([0.0] * 91 + [1.0] * 9, [None] * 91 + [1.0, 0.0, None] * 3)):
        record = make_record(seed=seed)
        # some algorithm's environment reports none
        records += [record, make_record("ppo", seed=seed)]
        record.episodes["is_success"] = successes
        record.evaluations["is_success"] = [[0.0, 1.0] for _ in record.evaluations["timesteps"]]
    text = page(write(tmp_path / "study", *records))
    (row,) = rows(section(text, "Success rates"))
    # nine of ten, and half of those that said
    assert row == ["Hopper-v4", "–", "uatrpo", "2", "70.0% ± 20.0%", "50.0% to 90.0%", "50.0% ± 0.0%"]
    # an episode long before the end does not stand in for those at the end
    records[0].episodes["is_success"] = [1.0] * 90 + [None] * 10
    (row,) = rows(section(page(write(tmp_path / "early", *records)), "Success rates"))
    assert row[3:5] == ["1", "50.0%"]


def variants_and_algorithms(*runs: tuple[str, str]) -> list[list[str]]:
    return (
        tabulate_runs([make_record(*run[:1], variant=run[1]) for run in runs])[["variant", "algorithm"]]
        .to_numpy()
        .tolist()
    )


def test_variants_are_groups_of_their_own():
    assert variants_and_algorithms(("uatrpo", ""), ("uatrpo", "noise=1")) == [["", "uatrpo"], ["noise=1", "uatrpo"]]
    assert variants_and_algorithms(
        ("uatrpo", "gamma=0.9"), ("ppo", "gamma=0.9"), ("uatrpo", "gamma=0.5"), ("ppo", "gamma=0.5")
    ) == [["gamma=0.5", "uatrpo"], ["gamma=0.5", "ppo"], ["gamma=0.9", "uatrpo"], ["gamma=0.9", "ppo"]]


def test_values_varied_for_one_algorithm_belong_to_its_name():
    """They are compared with each other and with the other algorithms, in one panel."""
    assert variants_and_algorithms(
        ("ppo", ""), ("uatrpo", ""), ("uatrpo", "noise=1,c=0,layers=[64, 64]"), ("uatrpo", "myopic,d=1")
    ) == [["", "uatrpo"], ["", "uatrpo (myopic, d=1)"], ["", "ppo"], ["noise=1", "uatrpo (c=0, layers=[64, 64])"]]
    # a variant by name is an algorithm of its own
    assert variants_and_algorithms(("uatrpo", "c=0"), ("uatrpo", "myopic,c=0")) == [
        ["c=0", "uatrpo"],
        ["c=0", "uatrpo (myopic)"],
    ]


def test_order():
    assert in_order(["trpo", "ppo", "uatrpo", "trpo"]) == ["uatrpo", "ppo", "trpo"]


def test_uatrpo_is_compared_with_every_other_one():
    names = in_order(["trpo_matched", "uatrpo_paper", "uatrpo", "uatrpo (no covariance)"])
    assert names == ["uatrpo", "uatrpo (no covariance)", "uatrpo_paper", "trpo_matched"]
    labels = ["uatrpo (gamma=0.9)", "uatrpo (gamma=1)", "ppo", "trpo"]
    expected = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert pairs_of(labels, None) == tuple((labels[i], labels[j]) for i, j in expected)
    assert pairs_of(labels[2:], None) == (("ppo", "trpo"),)


def test_shares_and_small_numbers_are_not_rounded_away(tmp_path, page):
    folder = write(tmp_path / "study", make_record(final=1.23456e-5), make_record("ppo", final=-2e-4))
    text = page(folder, kappa=0.125)
    assert [row[4] for row in rows(section(text, "Returns"))] == ["1.235e-05", "-0.0002"]
    assert "| 12.5%-CVaR |" in section(text, "Returns")
    assert "| of 12.5%-CVaR |" in section(text, "Differences")
    assert "12%" not in text


def test_few_runs_are_warned_of_and_resamples_that_agree_are_no_interval(tmp_path, page):
    def differences(name, n_runs):
        runs = [
            make_record(algo, seed=seed, final=100.0 * k + seed)
            for k, algo in enumerate(("ppo", "trpo"))
            for seed in range(n_runs)
        ]
        return section(page(write(tmp_path / name, *runs)), "Differences")

    few, several = differences("few", 3), differences("several", 5)
    assert "some groups have only 3 runs" in few
    assert "Do not rely" not in several
    for text in (few, several):
        (row,) = rows(text)
        assert row[-2:] == ["0.00", "–"]


def test_some_variants_alone(tmp_path, page):
    folder = make_study(tmp_path / "study", n_seeds=2, env_ids=("Hopper-v4",))

    def shown(*variants):
        return {row[1] for row in rows(section(page(folder, variants=variants), "Returns"))}

    assert shown() == shown("plain", "noise=1") == {"–", "noise=1"}
    assert shown("plain") == {"–"}
    assert shown("noise=1") == {"noise=1"}
    # what is not shown may differ
    write_record(make_record(n_timesteps=20_000, variant="noise=1", seed=9, noise=1.0), folder / "records")
    assert shown("plain") == {"–"}
    with pytest.raises(StudyError, match=r"20,000 \(uatrpo\) and 300,000 \(trpo_matched, uatrpo\) steps"):
        shown("noise=1")
    with pytest.raises(StudyError, match="no runs of the variant 'noise=2'; there are plain, noise=1"):
        page(folder, variants=("noise=2",))


def test_titles_are_broken_between_settings_and_a_dollar_is_one(tmp_path):
    variants = ("noise=1,trust_region_delta=0.03,layers=[64, 64]", "cost=$x^2$,y=$")
    records = [make_record(algo, variant=variant) for algo in ("uatrpo", "ppo") for variant in variants]
    text = report(write(tmp_path / "study", *records), tmp_path / "report").read_text(encoding="utf-8")
    assert "cost=$x^2$,y=$" in text
    results = Results(tabulate_runs(records), (), 0.2)
    titles = {ax.get_title() for ax in PICTURES["learning_curves"](results).axes}
    assert "Hopper-v4, noise=1,\ntrust_region_delta=0.03,\nlayers=[64, 64]" in titles


def test_evaluations_at_steps_that_all_runs_share():
    short = make_record(seed=1, final=10.0)
    short = dataclasses.replace(short, evaluations={"timesteps": [2000, 4000], "returns": [[1.0], [2.0, 4.0]]})
    timesteps, means = evaluations(tabulate_runs([make_record(seed=0, final=10.0), short]))
    np.testing.assert_array_equal(timesteps, [2000, 4000])
    np.testing.assert_array_equal(means, [[11.0, 11.0], [1.0, 3.0]])
    # no other step takes the place of one with a NaN
    broken = dataclasses.replace(short, evaluations={"timesteps": [2000, 4000], "returns": [[1.0], [np.nan]]})
    timesteps, means = evaluations(tabulate_runs([make_record(seed=0, final=10.0), broken]))
    np.testing.assert_array_equal(timesteps, [2000, 4000])
    np.testing.assert_array_equal(means, [[11.0, 11.0], [1.0, np.nan]])
    assert evaluations(tabulate_runs([make_record(eval_freq=0)]))[0].size == 0


def test_the_last_evaluation_is_each_runs_own(tmp_path, page):
    def last(*evaluated):
        records = [
            dataclasses.replace(make_record(seed=seed), evaluations={"timesteps": steps, "returns": returns})
            for seed, (steps, returns) in enumerate(evaluated)
        ]
        (row,) = rows(section(page(write(tmp_path / str(len(list(tmp_path.iterdir()))), *records)), "Returns"))
        return row[-1]

    assert last(([3, 6, 9], [[1.0], [2.0], [30.0]]), ([2, 4, 6, 8], [[1.0]] * 3 + [[40.0]])) == "35.00 ± 5.000"
    assert last(([3], [[5.0]]), ([], [])) == "5.000 (1 run)"
    assert last(([3, 6], [[1.0], [np.nan]]), ([3, 6], [[2.0], [4.0]]), ([3, 6], [[2.0], [6.0]])) == (
        "5.000 ± 1.000 (2 runs)"
    )
    assert last(([], []), ([], [])) == "–"


def test_several_folders_are_one_study(tmp_path, page):
    """A run that is in both counts once, and one that is done before one that failed."""
    ours = [make_record(seed=seed, status=status) for seed, status in ((0, "done"), (1, "failed"), (2, "failed"))]
    theirs = [make_record(seed=1), make_record("ppo"), make_record(seed=0), make_record(seed=2, status="failed")]
    folders = [write(tmp_path / name, *records) for name, records in (("a", ours), ("b", theirs))]
    text = page(folders)
    assert text.splitlines()[0] == "# Report on a, b"
    assert text.splitlines()[2].startswith("3 runs done, 1 failed, 0 left out")
    assert [row[2:4] for row in rows(section(text, "Returns"))] == [["uatrpo", "2"], ["ppo", "1"]]
    zoo_run(tmp_path / "logs", algo="a2c")
    assert len(read_folder(*folders, tmp_path / "logs")[0]) == 5
    with pytest.raises(StudyError, match="nowhere: no such folder"):
        page([*folders, tmp_path / "nowhere"])


def test_a_pair_of_ones_own(tmp_path, page):
    folder = write(tmp_path / "study", make_record("uatrpo"), make_record("ppo", final=90.0), make_record("trpo"))
    text = page(folder, algorithms=("ppo", "trpo"))
    assert [row[2] for row in rows(section(text, "Differences"))] == ["ppo − trpo"]
    text = page(folder)
    assert [row[2] for row in rows(section(text, "Differences"))] == ["uatrpo − ppo", "uatrpo − trpo"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithms": ("uatrpo", "sac")}, "no records of 'sac'; there are uatrpo"),
        ({"algorithms": ("uatrpo", "uatrpo")}, "'uatrpo' was given twice"),
        ({"kappa": 0.0}, r"kappa must be in \(0, 1\]"),
    ],
)
def test_bad_options(tmp_path, options, message):
    folder = write(tmp_path / "study", make_record())
    with pytest.raises(StudyError, match=message):
        report(folder, tmp_path / "report", **options)
    assert not (tmp_path / "report").exists()


def test_bad_folders(tmp_path):
    with pytest.raises(StudyError, match="no such folder"):
        report(tmp_path / "nowhere", tmp_path / "report")
    with pytest.raises(StudyError, match="neither a study"):
        report(tmp_path, tmp_path / "report")
    empty = write(tmp_path / "empty")
    with pytest.raises(StudyError, match=r"no records$"):
        report(empty, tmp_path / "report")
    (empty / "records").mkdir()
    (empty / "records" / "cut.json.gz").write_text("{")
    with pytest.raises(StudyError, match=r"no records \(1 unreadable, the first: "):
        report(empty, tmp_path / "report")
    failed = write(tmp_path / "failed", make_record(status="failed"))
    with pytest.raises(StudyError, match="no run is done"):
        report(failed, tmp_path / "report")


# ------------------------------------------------------------------------------------------------- folders of RL Zoo's


def zoo_run(logs, algo="uatrpo", number=1, seed=0, n_envs=1, final=100.0, n_timesteps=1000, taken=None, **settings):
    """A folder as rl_zoo3.train leaves it; ``taken`` steps of the run, 0 if it was killed."""
    run = logs / algo / f"CartPole-v1_{number}"
    (run / "CartPole-v1").mkdir(parents=True)
    dump = {
        "config.yml": {"n_envs": n_envs, "n_timesteps": 1e6, "policy": "MlpPolicy", **settings},
        "args.yml": {
            "algo": algo, "env": "CartPole-v1", "seed": seed, "n_timesteps": n_timesteps, "eval_freq": 500,
            "eval_episodes": 2, "env_kwargs": None, "trained_agent": "",
        },
    }  # fmt: skip
    for name, content in dump.items():
        pairs = yaml.safe_dump([[[key, value] for key, value in content.items()]])
        (run / "CartPole-v1" / name).write_text(f"!!python/object/apply:collections.OrderedDict\n{pairs}")
    for i in range(n_envs):
        lines = [f'#{{"t_start": {1.7e9 + i}, "env_id": "CartPole-v1"}}', "r,l,t"]
        lines += [f"{final + i},{100 // n_envs},{t}" for t in range(1, 11)]
        (run / f"{i}.monitor.csv").write_text("\n".join(lines) + "\n")
    np.savez(run / "evaluations.npz", timesteps=[500, 1000], results=[[1.0, 2.0], [3.0, 4.0]], ep_lengths=[[1, 1]] * 2)
    if taken != 0:
        with zipfile.ZipFile(run / "CartPole-v1.zip", "w") as archive:
            archive.writestr("data", json.dumps({"num_timesteps": n_timesteps if taken is None else taken}))
    return run


def test_a_folder_of_rl_zoos(tmp_path):
    zoo_run(tmp_path, n_envs=2, final=10.0)
    ((record,), bad) = read_zoo_folder(tmp_path)
    assert not bad
    assert (record.spec.algo, record.spec.env_id, record.spec.seed) == ("uatrpo", "CartPole-v1", 0)
    assert record.spec.n_timesteps == 1000
    assert record.spec.hyperparameters == {"n_envs": 2, "policy": "MlpPolicy"}
    # two environments of 50 steps each, stepped together
    assert record.episodes["timesteps"] == [t for t in range(100, 1001, 100) for _ in range(2)]
    assert sorted(set(record.episodes["returns"])) == [10.0, 11.0]
    assert record.evaluations == {"timesteps": [500, 1000], "returns": [[1.0, 2.0], [3.0, 4.0]]}
    assert record.started.startswith("2023-11-14")
    # a record like any other
    assert study.read_record(write_record(record, tmp_path / "records")) == record


def test_report_on_a_folder_of_rl_zoos(tmp_path, page):
    for seed in range(3):
        zoo_run(tmp_path / "logs", number=seed + 1, seed=seed, final=100.0 + seed)
        zoo_run(tmp_path / "logs", "ppo", number=seed + 1, seed=seed, final=80.0 + seed)
    zoo_run(tmp_path / "logs", number=4, seed=7, taken=400)
    zoo_run(tmp_path / "logs", number=5, seed=8, taken=0)
    zoo_run(tmp_path / "logs", number=6, seed=1)
    broken = zoo_run(tmp_path / "logs", number=7, seed=9)
    (broken / "0.monitor.csv").write_text("#{")
    zoo_run(tmp_path / "logs", number=8, seed=10, n_timesteps=900)
    text = page(tmp_path / "logs")
    assert text.splitlines()[2].startswith("6 runs done, 2 failed, 3 left out")
    said = section(text, "Runs")
    assert "stopped after 400 of 1,000 steps" in said
    assert "no CartPole-v1.zip: the run was killed, or is under way" in said
    assert "- `CartPole-v1_6`: the same run as CartPole-v1_2: equal settings and seed" in said
    assert "- `CartPole-v1_7`: JSONDecodeError" in said
    assert "- `CartPole-v1_8`: ValueError: its monitor files count 1,000 steps, but 900 were taken" in said
    (row,) = rows(section(text, "Differences"))
    assert row[2:5] == ["uatrpo − ppo", "3, 3", "20.00"]
    assert "No KL ratio in the records of ppo, uatrpo." in text
    # far above, it could be anybody's
    with pytest.raises(StudyError, match="neither a study"):
        page(tmp_path)
    # one algorithm's folder, and one run's
    assert len(read_folder(tmp_path / "logs" / "ppo")[0]) == 3
    assert len(read_folder(tmp_path / "logs" / "ppo" / "CartPole-v1_1")[0]) == 1


def test_a_run_counts_once():
    record = make_record()
    failed = dataclasses.replace(record, status="failed", traceback="why")
    # RL Zoo's folder of the same run
    without = dataclasses.replace(record, updates={"timesteps": []})
    for same in ([record, record], [failed, record], [without, record], [record, without]):
        (row,) = tabulate_runs(same).itertuples()
        assert row.record is record


def test_runs_of_rl_zoos_with_different_settings_have_the_name_of_a_folder(tmp_path, page):
    for number, gamma, seed in ((1, 0.9, 0), (2, 0.9, 1), (3, 0.99, 0), (10, 0.99, 1), (11, 0.5, 0)):
        zoo_run(tmp_path, number=number, seed=seed, gamma=gamma, taken=0 if gamma == 0.5 else None)
    zoo_run(tmp_path, "ppo", number=4)
    table = rows(section(page(tmp_path), "Returns"))
    assert [row[2:4] for row in table] == [
        ["uatrpo (CartPole-v1_1)", "2"], ["uatrpo (CartPole-v1_3)", "2"], ["ppo", "1"],
    ]  # fmt: skip


def test_a_run_that_was_repeated_after_a_failure_counts(tmp_path):
    zoo_run(tmp_path, number=1, taken=0)
    zoo_run(tmp_path, number=2)
    records, bad = read_zoo_folder(tmp_path)
    assert [record.status for record in records] == ["done"]
    assert not bad


def test_an_episode_without_a_return_counts_its_steps(tmp_path):
    run = zoo_run(tmp_path)
    lines = (run / "0.monitor.csv").read_text().splitlines()
    lines[2] = "nan,100,1"
    # the last one was being written
    (run / "0.monitor.csv").write_text("\n".join([*lines, "100.0,10"]) + "\n")
    ((record,), bad) = read_zoo_folder(tmp_path)
    assert not bad
    assert record.episodes["timesteps"] == list(range(100, 1001, 100))
    assert np.isnan(record.episodes["returns"][0])


def test_what_rl_zoo_knows_of_evaluations_and_tuples(tmp_path, page):
    run = zoo_run(tmp_path)
    shape = {"timesteps": [500, 1000], "ep_lengths": [[1, 1]] * 2}
    successes = [[True, False], [True, True]]
    np.savez(run / "evaluations.npz", results=[[1.0, 2.0], [3.0, np.inf]], successes=successes, **shape)
    (run / "CartPole-v1" / "config.yml").write_text(
        "!!python/object/apply:collections.OrderedDict\n"
        "- - - n_timesteps\n    - 1000.0\n"
        "  - - train_freq\n    - !!python/tuple\n      - 1\n      - episode\n"
    )
    ((record,), bad) = read_zoo_folder(tmp_path)
    assert not bad
    assert record.evaluations["is_success"] == [[1.0, 0.0], [1.0, 1.0]]
    assert record.spec.hyperparameters["train_freq"] == [1, "episode"]
    # an infinite return is no number to average
    (row,) = rows(section(page(tmp_path), "Returns"))
    assert row[-1] == "–"


def test_a_configuration_makes_no_objects(tmp_path):
    run = zoo_run(tmp_path)
    (run / "CartPole-v1" / "config.yml").write_text("!!python/object/apply:os.system ['touch made']")
    records, ((path, reason),) = read_zoo_folder(tmp_path)
    assert not records
    assert path == run
    assert "os.system" in reason


def test_runs_whose_settings_name_classes_are_read(tmp_path):
    """RL Zoo dumps a class given by -params or by a trial as a tag. It is read as text, and nothing is imported."""
    run = zoo_run(tmp_path)
    config = run / "CartPole-v1" / "config.yml"
    policy_kwargs = {"activation_fn": nn.ReLU, "net_arch": (64, 64), "unknown": "NAME"}
    settings = {"n_timesteps": 1e6, "policy_kwargs": policy_kwargs, "callback": os.path.join}
    text = yaml.dump(OrderedDict(settings)).replace("NAME", "!!python/name:not_installed.Module ''")
    assert "!!python/name:torch.nn.modules.activation.ReLU" in text
    config.write_text(text)
    (record,), bad = read_folder(tmp_path)
    assert bad == []
    assert record.spec.hyperparameters == {
        "policy_kwargs": {
            "activation_fn": "torch.nn.modules.activation.ReLU",
            "net_arch": [64, 64],
            "unknown": "not_installed.Module",
        },
        "callback": "posixpath.join",
    }


@pytest.mark.parametrize("value", ["2020-01-01", "!!binary aGVsbG8=", "!!set {a, b}", "{1: a, b: 2}"])
def test_settings_that_json_cannot_hold_leave_out_one_run(tmp_path, value):
    zoo_run(tmp_path, seed=1)
    run = zoo_run(tmp_path, number=2)
    (run / "CartPole-v1" / "config.yml").write_text(f"n_timesteps: 1000\nenv_kwargs: {value}\n")
    records, ((path, _),) = read_folder(tmp_path)
    assert [record.spec.seed for record in records] == [1]
    assert path == run


def test_settings_that_are_objects_of_python_are_read_as_text(tmp_path):
    """As from a configuration in Python."""
    run = zoo_run(tmp_path)
    config = run / "CartPole-v1" / "config.yml"
    config.write_text(yaml.dump({"n_timesteps": 1000, "gamma": np.float64(0.99), "schedule": functools.partial(abs)}))
    (record,), bad = read_folder(tmp_path)
    assert bad == []
    assert "multiarray.scalar" in record.spec.hyperparameters["gamma"]
    assert "functools.partial" in record.spec.hyperparameters["schedule"]


def test_a_small_p_is_not_printed_as_zero(tmp_path, page):
    for algo, final in (("uatrpo", 1000.0), ("ppo", 10.0)):
        for seed in range(5):
            write_record(make_record(algo, seed=seed, final=final + seed), tmp_path / "study" / "records")
    (row,) = rows(section(page(make_folder(tmp_path / "study")), "Differences"))
    assert row[7] == "< 0.001"


def test_the_aggregates(tmp_path, page):
    """The interquartile mean of five runs is not their mean, and of the scores it is that of all environments' runs."""
    folder = make_study(tmp_path / "study", n_seeds=5)
    by_group, by_variant, improvements = tables(section(page(folder), "Aggregates"))
    finals = final_returns(folder)
    for row in by_group:
        x = finals[tuple(row[:3])]
        assert row[3] == "5"
        assert number(row[4]) == pytest.approx(trimmed_mean(x), rel=1e-3)
    envs = ("HalfCheetah-v4", "Hopper-v4")
    scores = {}
    for variant in ("–", "noise=1"):
        for algo in ("uatrpo", "trpo_matched"):
            columns = []
            for env in envs:
                shown = np.concatenate([x for (env_id, *_), x in finals.items() if env_id == env])
                columns.append((finals[env, variant, algo] - shown.min()) / (shown.max() - shown.min()))
            scores[variant, algo] = np.array(columns)
    assert len(by_variant) == 4
    for variant, algo, shape, value, _ in by_variant:
        assert shape == "5 × 2"
        assert float(value) == pytest.approx(trimmed_mean(scores[variant, algo].flatten()), abs=6e-4)
    assert [row[1] for row in improvements] == ["uatrpo > trpo_matched"] * 2
    for variant, _, value, _ in improvements:
        x, y = scores[variant, "uatrpo"], scores[variant, "trpo_matched"]
        assert float(value) == pytest.approx((x[:, :, None] > y[:, None, :]).mean(), abs=0.006)


def trimmed_mean(x: np.ndarray) -> float:
    """The mean without the lowest and the highest quarter, whole runs."""
    n_cut = len(x) // 4
    return np.sort(x)[n_cut : len(x) - n_cut].mean()


def test_an_environment_without_a_finished_episode_is_read_without_a_warning(tmp_path):
    run = zoo_run(tmp_path, n_envs=2)
    (run / "1.monitor.csv").write_text('#{"t_start": 1.7e9, "env_id": "CartPole-v1"}\nr,l,t\n')
    assert read_folder(tmp_path)[1] == []


# ------------------------------------------------------------------------------------------------------------- imports


def test_the_public_names_are_there():
    for name in study.__all__:
        assert getattr(study, name).__module__.startswith("sb3_uatrpo.study.")


def test_importing_is_light():
    def loaded(code: str, modules: str) -> str:
        code = f"import sys; {code}; print(sorted(m for m in sys.modules if m.startswith({modules})))"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    heavy = "('scipy', 'rliable', 'seaborn', 'ray', 'pandas', 'matplotlib')"
    assert loaded("from sb3_uatrpo.study import Record, StudyError, cvar", heavy) == "[]\n"
    assert loaded("import sb3_uatrpo", "'sb3_uatrpo.study'") == "[]\n"


def test_labels_stand_above_the_panels(tmp_path):
    folder = make_study(tmp_path / "study", n_seeds=1)
    results = Results(tabulate_runs(read_folder(folder)[0]), (), 0.2)
    figure = PICTURES["kl_ratio"](results)
    (labels,) = figure.legends
    assert [text.get_text() for text in labels.get_texts()] == results.labels
    assert len(figure.axes) == 4
    for ax in figure.axes:
        assert ax.get_legend() is None
        assert len(ax.texts) == len(results.labels)


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        ([3, 4, 5], "3 to 5"),
        ([3, 4], "3, 4"),
        ([3, 4, 6], "3, 4, 6"),
        # RL Zoo's, unless it is given some: a list of all seeds between would take a terabyte
        ([17, 2**31, 2**32 - 1], "17, 2147483648, 4294967295"),
    ],
)
def test_seeds_that_follow_each_other_are_shown_as_a_range(seeds, expected):
    assert _seeds(seeds) == expected
