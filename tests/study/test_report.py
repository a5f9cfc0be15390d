"""Reports on made-up runs, whose numbers are known."""

import itertools
import re
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import seaborn as sns
from scipy import stats

from sb3_uatrpo.study import StudyError, read_study
from sb3_uatrpo.study.report import report
from sb3_uatrpo.study.results import tabulate
from tests.study.synthetic import write_run, write_study, write_table
from tests.tables import number, rows, section

PICTURES = {
    "learning_curves", "evaluations", "cvar", "cvar_over_training", "differences", "probability_of_improvement",
    "kl_ratio", "kl_ratio_over_training", "interquartile_means", "performance_profiles",
}  # fmt: skip


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The text of a report, without its pictures."""
    monkeypatch.setattr("sb3_uatrpo.study.plots.draw_pictures", lambda results, output, picture_format: [])

    def read(*folders: Path, **options) -> str:
        return report(folders, tmp_path / "report", **options).read_text(encoding="utf-8")

    return read


def test_pictures_are_those_with_data_and_the_same_each_time(tmp_path):
    folder, output = write_study(tmp_path / "study", 2, ["Hopper-v4"], ["", "noise=1"]), tmp_path / "report"
    text = report([folder], output).read_text(encoding="utf-8")
    assert {path.name for path in output.iterdir()} == {"report.md", *(f"{name}.png" for name in PICTURES)}
    assert set(re.findall(r"\]\((\w+)\.png\)", text)) == PICTURES
    first = {path.name: path.read_bytes() for path in output.iterdir()}
    with mock.patch.object(sns.FacetGrid, "savefig", autospec=True, side_effect=sns.FacetGrid.savefig) as save:
        report([folder], output)
    # a row for each environment, a column for each condition
    assert {tuple(ax.get_title() for ax in of.args[0].axes.flat) for of in save.call_args_list} == {
        ("Hopper-v4 (fewest runs: 2)", "Hopper-v4, noise=1 (fewest runs: 2)")
    }
    assert {path.name: path.read_bytes() for path in output.iterdir()} == first
    # without evaluations and KL ratios, earlier pictures go, and so do those in another format
    shutil.rmtree(folder)
    write_run(folder, "ppo", kl_ratio=None, eval_freq=0)
    text = report([folder], output, picture_format="svg").read_text(encoding="utf-8")
    kept = {"learning_curves", "cvar", "cvar_over_training", "interquartile_means", "performance_profiles"}
    assert {path.name for path in output.iterdir()} == {"report.md", *(f"{name}.svg" for name in kept)}
    assert set(re.findall(r"\]\((\w+)\.svg\)", text)) == kept
    assert "There are no KL ratios." in text


def test_pictures_name_algorithms_with_data_and_panels_with_few_runs(tmp_path):
    folder = tmp_path / "study"
    for seed in range(5):
        write_run(folder, "uatrpo", seed=seed)
        write_run(folder, "uatrpo", "HalfCheetah-v4", seed=seed)
        write_run(folder, "ppo", seed=seed, kl_ratio=None)
    write_run(folder, "ppo", "HalfCheetah-v4", kl_ratio=None)
    drawn = {}
    savefig = sns.FacetGrid.savefig

    def keep(grid, path, **options):
        drawn[path.stem] = grid
        savefig(grid, path, **options)

    with mock.patch.object(sns.FacetGrid, "savefig", keep):
        report([folder], tmp_path / "report")
    legends = {name: {text.get_text() for text in drawn[name].figure.legends[0].texts} for name in ("cvar", "kl_ratio")}
    assert legends == {"cvar": {"ppo", "uatrpo"}, "kl_ratio": {"uatrpo"}}
    titles = {ax.get_title() for ax in drawn["learning_curves"].axes.flat}
    assert titles == {"Hopper-v4", "HalfCheetah-v4 (fewest runs: 1)"}
    for ax in drawn["performance_profiles"].axes.flat:
        low, high = ax.get_xlim()
        labels = [label for label in ax.get_xticklabels() if low <= label.get_position()[0] <= high]
        extents = [label.get_window_extent() for label in labels]
        assert len(extents) > 1
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(extents))


def test_every_number_of_the_tables(tmp_path, page):
    folder = write_study(tmp_path / "study")
    shutil.rmtree(folder / "plain" / "trpo_matched" / "HalfCheetah-v4_4")
    text = page(folder)
    runs = tabulate(read_study(folder)).runs
    finals = {names: of.final_return.to_numpy() for names, of in runs.groupby(["env", "condition", "label"])}
    returns = rows(section(text, "Returns"))
    # of the plain condition, one label has fewer runs in one environment
    scores = [(row["variant"], row["algorithm"]) for row in returns if row["environment"].startswith("all")]
    assert scores == [("–", "uatrpo"), ("noise=1", "uatrpo"), ("noise=1", "trpo_matched")]
    assert len(returns) == 8 + len(scores)
    for row in (row for row in returns if not row["environment"].startswith("all")):
        x = finals[row["environment"], row["variant"].strip("–"), row["algorithm"]]
        assert row["runs"] == str(len(x))
        assert number(row["final return"]) == pytest.approx(x.mean(), rel=1e-3)
        assert number(row["±"]) == pytest.approx(stats.sem(x), rel=1e-3)
        # a fifth of four runs is a part of the worst
        assert number(row["20%-CVaR"]) == number(row["lowest"]) == pytest.approx(x.min(), rel=1e-3)
        assert number(row["IQM"]) == pytest.approx(stats.trim_mean(x, 0.25), rel=1e-3)
        assert number(row["last evaluation"]) == pytest.approx(x.mean() + 1, abs=30)
    *differences, over_all = rows(section(text, "Differences"))
    assert over_all["variant"] == "noise=1"
    for row in differences:
        assert row["algorithm"] == "uatrpo − trpo_matched"
        x, y = (finals[row["environment"], row["variant"].strip("–"), algo] for algo in ("uatrpo", "trpo_matched"))
        assert number(row["of means"]) == pytest.approx(x.mean() - y.mean(), rel=1e-3)
        assert number(row["p"]) == pytest.approx(stats.ttest_ind(x, y, equal_var=False).pvalue, rel=1e-3)
        better = np.mean(x[:, None] > y) + np.mean(x[:, None] == y) / 2
        assert number(row["probability of improvement"]) == pytest.approx(better, rel=1e-3)
    ratios = {row["algorithm"]: number(row["median KL ratio"]) for row in rows(section(text, "Proposed steps"))}
    assert ratios == {"uatrpo": pytest.approx(1.0, rel=0.02), "trpo_matched": pytest.approx(1.8, rel=0.05)}


def test_failed_damaged_and_empty_runs_are_named(tmp_path, page):
    for seed in range(2):
        write_run(tmp_path / "study", seed=seed)
    write_run(tmp_path / "study", seed=2, failed=True, hyperparameters={"gamma": 0.5})
    empty = write_run(tmp_path / "study", seed=3)
    write_table(empty, "episodes", {"step": [], "return": [], "length": []})
    (write_run(tmp_path / "study", seed=4) / "ended.json").unlink()
    text = page(tmp_path / "study")
    assert "3 runs done, 1 failed, 1 left out because of damaged files." in text
    assert "- failed: uatrpo on Hopper-v4, seed 2: `RuntimeError: the simulator | broke`\n" in text
    assert "Hopper-v4_5`: FileNotFoundError: " in text
    assert "- no episode ended, or one is not finite: uatrpo on Hopper-v4, seed 3\n" in text
    (row,) = rows(section(text, "Runs"))
    assert (row["done"], row["failed"], row["seeds"]) == ("3", "1", "0, 1, 2, 3")


def test_unlike_runs_are_not_averaged(tmp_path, page):
    for seed, gamma in ((0, 0.9), (1, 0.9), (2, 0.99)):
        write_run(tmp_path / "settings", seed=seed, hyperparameters={"gamma": gamma})
    with pytest.raises(StudyError, match=r"uatrpo has gamma=0\.9 and gamma=0\.99; they need names, as variants"):
        page(tmp_path / "settings")
    # a value that is given, and one that is not
    write_run(tmp_path / "given", seed=3, hyperparameters={"gamma": 0.9, "n_envs": 2})
    for folder in (tmp_path / "given", tmp_path / "equal"):
        write_run(folder, seed=4, hyperparameters={"gamma": 0.9})
    with pytest.raises(StudyError, match=r"n_envs=2.* and .*n_envs=nan"):
        page(tmp_path / "given")
    write_run(tmp_path / "float", seed=4, hyperparameters={"gamma": 1.0})
    write_run(tmp_path / "int", seed=4, hyperparameters={"gamma": 1})
    with pytest.raises(StudyError, match=r"gamma=1 and gamma=1\.0"):
        page(tmp_path / "float", tmp_path / "int")
    write_run(tmp_path / "length")
    write_run(tmp_path / "length", "ppo", n_timesteps=20_000)
    with pytest.raises(StudyError, match=r"on Hopper-v4, .* report on folders that have one length"):
        page(tmp_path / "length")
    # other evaluations are no other training, and no seed counts twice
    for seed, folder in ((0, "a"), (1, "b"), (0, "c")):
        write_run(tmp_path / folder, seed=seed, eval_freq=2000 if folder == "a" else 5000)
    assert "| uatrpo | 2 |" in page(*(tmp_path / folder for folder in "abc"))


def test_conditions_and_labels(tmp_path, page):
    """What is varied for several algorithms is a condition; for one alone, a part of its name."""
    variants = {
        "uatrpo": ["", "noise=1", "shrinkage=0.5", "long,noise=1"],
        "ppo": ["", "gamma=0.9"],
        "a2c": ["gamma=0.9"],
    }
    folder = tmp_path / "study"
    for algo, names in variants.items():
        for name in names:
            write_run(folder, algo, variant=name, hyperparameters={"gamma": 0.9 if "gamma" in name else 0.99})
    text = page(folder)
    assert {(row["variant"], row["algorithm"]) for row in rows(section(text, "Returns"))} == {
        ("–", "uatrpo"), ("–", "uatrpo (shrinkage=0.5)"), ("–", "ppo"), ("noise=1", "uatrpo"),
        ("noise=1", "uatrpo (long)"), ("gamma=0.9", "ppo"), ("gamma=0.9", "a2c"),
    }  # fmt: skip
    assert len(rows(section(text, "Differences"))) == 4
    shown = page(folder, variants=["gamma=0.9"])
    assert {row["algorithm"] for row in rows(section(shown, "Returns"))} == {"ppo", "a2c"}
    assert [row["algorithm"] for row in rows(section(shown, "Differences"))] == ["a2c − ppo"]
    (row,) = rows(section(page(folder, algorithms=["ppo", "uatrpo"]), "Differences"))
    assert row["algorithm"] == "ppo − uatrpo"
    with pytest.raises(StudyError, match=r"--algo takes two different ones of uatrpo, .*, but it is ppo sac"):
        page(folder, algorithms=["ppo", "sac"])
    with pytest.raises(StudyError, match=r"no runs of the variant 'noise=2'; there are gamma=0\.9, noise=1, plain"):
        page(folder, variants=["noise=2"])


def test_success_rates(tmp_path, page):
    for seed, success in ((0, [1, np.nan, 1]), (1, [0, np.nan, 1])):
        place = write_run(tmp_path, seed=seed, n_timesteps=1000)
        columns = {"step": [980, 990, 1000], "return": [1.0] * 3, "length": [10] * 3, "is_success": success}
        write_table(place, "episodes", columns)
        np.savez(place / "evaluations.npz", timesteps=[1000], results=[[1.0, 2.0]], successes=[[True, False]])
    (row,) = rows(section(page(tmp_path), "Success"))
    assert row["success"] == "0.7500 (0.5000 to 1.000)"
    assert row["last evaluation"] == "0.5000"
