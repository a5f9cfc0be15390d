"""The tables and figures of the preset, on runs whose results are plain."""

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
from benchmark_recommended import main as measure_minutes
from show_recommended import main

from sb3_uatrpo.study import read_study
from tests.forked import runs_of_studies
from tests.study.synthetic import write_run
from tests.tables import by_first, rows

RETURNS, DIFFERENCES = "Final returns", "Differences of final returns"


def write_runs(folder: Path, algo: str, env: str, final: float, seeds=range(5), variant: str = "", **options) -> None:
    """Their mean over five seeds is 20 higher, with a standard error of 7; evaluations are one higher."""
    kl_ratio = {"uatrpo": (1.0, 0.0), "trpo_matched": (1.8, 0.0)}.get(algo)
    for i, seed in enumerate(seeds):
        write_run(folder, algo, env, seed, final + 10 * i, variant=variant, kl_ratio=kl_ratio, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    write_runs(folder, "uatrpo", "Hopper-v4", 3000.0)
    write_runs(folder, "uatrpo", "Hopper-v4", 9000.0, variant="uncertainty_coef=0")
    write_runs(folder, "trpo_matched", "Hopper-v4", 2500.0, range(3), "same settings")
    write_runs(folder, "ppo", "Hopper-v4", 800.0)
    write_runs(folder, "ppo", "Hopper-v4", 2000.0, variant="defaults")
    write_runs(folder, "trpo", "Hopper-v4", 4000.0)
    write_runs(folder, "uatrpo", "Hopper-v5", 3100.0, [0])
    for algo in ("uatrpo", "trpo"):
        write_runs(folder, algo, "Walker2d-v4", 100.0, [0], eval_freq=0)
        write_runs(folder, algo, "Ant-v4", 1500.0)
    for seed, final in enumerate([2800.0, 2900.0, 3000.0, 2850.0, 2950.0]):
        write_run(folder, "ppo", "Swimmer-v4", seed, final + seed)
        write_run(folder, "uatrpo", "Swimmer-v4", seed, 3000.0 + seed)
    write_runs(folder, "uatrpo", "Humanoid-v4", 700.0)
    write_runs(folder, "trpo", "Humanoid-v4", 700.0, range(4))
    times = [("uatrpo", "Hopper-v4", 5.0), ("uatrpo", "Hopper-v4", 7.0), ("ppo (defaults)", "Hopper-v4", 20.0)]
    minutes = [{"algorithm": algo, "task": task, "minutes": time} for algo, task, time in times]
    (folder / "minutes.json").write_text(json.dumps({"minutes": minutes}))
    return folder


@pytest.fixture(scope="module")
def tables(folder):
    with redirect_stdout(io.StringIO()) as printed:
        options = ["--minutes", str(folder / "minutes.json"), "--output", str(folder / "figures")]
        tables = main(["--folder", str(folder), *options])
    assert printed.getvalue() == "\n\n".join(f"{name}\n\n{table}" for name, table in tables.items()) + "\n"
    for name in ("recommended", "controls", "minutes"):
        assert (folder / "figures" / f"{name}.png").stat().st_size > 10_000
    return tables


def shown(*args) -> dict[str, dict[str, dict[str, str]]]:
    """The rows of each table by its heading and their first cell, without figures."""
    with mock.patch.multiple("show_recommended", draw_recommended=mock.DEFAULT, draw_controls=mock.DEFAULT):
        return {name: by_first(table) for name, table in main([*map(str, args), "--minutes", "none"]).items()}


def cells(table: str) -> list[str]:
    """Those of each row in one line, without intervals."""
    return [re.sub(r" \([^()]* to [^()]*\)", "", " | ".join(row.values())) for row in rows(table)]


def test_returns_have_marks_where_ours_is_significantly_ahead(tables):
    # neither the variant of ours nor the worse PPO counts, and a difference needs all runs
    assert cells(tables[RETURNS]) == [
        r"Hopper-v4 | 3,020 ± 7 | 2,020 ± 7 \* † | 4,020 ± 7 | 6, 20, –",
        "Walker2d-v4 | 100 [1] | – | 100 [1] | –, –, –",
        "Swimmer-v4 | 3,002 ± 1 | 2,902 ± 36 | – | –, –, –",
        "Ant-v4 | 1,520 ± 7 | – | 1,520 ± 7 | –, –, –",
        "Humanoid-v4 | 720 ± 7 | – | 715 ± 6 [4] | –, –, –",
    ]
    # TRPO is significantly ahead on Hopper, not behind
    differences = cells(tables[DIFFERENCES])
    assert differences[0] == "Hopper-v4 | 5, 5, 5 | **+1,000**, p < 0.001 | **-1,000**, p < 0.001"
    assert differences[1] == "Walker2d-v4 | 1, 0, 1 | – | –"
    assert differences[3:] == ["Ant-v4 | 5, 0, 5 | – | +0, p = 1.000", "Humanoid-v4 | 5, 0, 4 | – | –"]
    # Welch's test of the means confirms less than the interval does
    low, p = re.fullmatch(
        r"\+100 \((\d+) to \d+\), p = (.*)", by_first(tables[DIFFERENCES])["Swimmer-v4"]["minus PPO"]
    ).groups()
    assert int(low) > 0
    assert float(p) > 0.05


def test_last_evaluations_are_means_of_their_episodes(tables):
    hopper, walker, *_ = cells(tables["Last deterministic evaluations"])
    assert hopper == r"Hopper-v4 | 3,021 ± 7 | 2,021 ± 7 \* † | 4,021 ± 7"
    assert walker == "Walker2d-v4 | – | – | –"
    assert cells(tables["Differences of the last evaluations"])[0] == cells(tables[DIFFERENCES])[0]


def test_controls_show_what_is_due_to_the_method(tables):
    hopper, *_, ant, _ = cells(tables["Controls"])
    assert hopper == (
        "Hopper-v4 | 3,020 ± 7 | 2,510 ± 6 [3] | **+510**, p < 0.001 | 9,020 ± 7 | **-6,000**, p < 0.001 | 1.00, 1.80"
    )
    assert ant == "Ant-v4 | 1,520 ± 7 | – | – | – | – | 1.00, –"
    evaluated = by_first(tables["Controls by the last evaluations"])["Hopper-v4"]
    assert evaluated["TRPO, same hyperparameters"] == "2,511 ± 6 [3]"
    assert evaluated["minus TRPO, same hyperparameters"] == "**+510**, p < 0.001"
    versions = cells(tables["Versions"])
    assert (versions[0], versions[3]) == ("Hopper | 3,020 ± 7 | 3,100 [1]", "Ant | 1,520 ± 7 | –")


def test_p_values_are_corrected_for_six_tasks_and_for_twelve_comparisons(tables):
    p_values = {tuple(cells[:2]): cells[2:] for cells in map(list, (row.values() for row in rows(tables["p values"])))}
    assert set(list(p_values)[:2]) == {("Hopper-v4", "PPO"), ("Hopper-v4", "TRPO")}
    assert list(p_values)[2:] == [("Swimmer-v4", "PPO"), ("Ant-v4", "TRPO")]
    # in training and in evaluations, where returns are one higher for all
    assert p_values["Hopper-v4", "PPO"] == ["< 0.001"] * 6
    assert p_values["Ant-v4", "TRPO"] == ["1.000"] * 6
    alone, six, twelve, *evaluated = map(float, p_values["Swimmer-v4", "PPO"])
    assert evaluated == [alone, six, twelve]
    # second of six, third of twelve; p is rounded
    assert six == pytest.approx(5 * alone, abs=0.003)
    assert twelve == pytest.approx(10 * alone, abs=0.006)
    assert alone < 0.1
    # over Hopper's PPO; Hopper's TRPO is ahead of ours
    assert [line.split(" | ")[1:] for line in cells(tables["Significant leads"])] == [["1", "1"], ["1", "1"]]


def test_the_environments_of_a_newer_folder_replace_those_of_the_others(folder, tmp_path):
    newer = tmp_path / "newer"
    for algo, final in (("uatrpo", 2000.0), ("ppo", 1000.0)):
        write_runs(newer, algo, "Ant-v4", final, range(5, 10))
    tables = shown("--folder", folder, "--newer", newer)
    # TRPO's older runs count, and ours do not
    ant = {"UATRPO": "2,020 ± 7", "PPO": r"1,020 ± 7 \*", "TRPO": r"1,520 ± 7 \*"}
    assert tables[RETURNS]["Ant-v4"].items() >= ant.items()
    assert tables[DIFFERENCES]["Ant-v4"]["runs"] == "5, 5, 5"
    assert tables[RETURNS]["Hopper-v4"]["UATRPO"] == "3,020 ± 7"
    # and so do tables, wherever they were saved
    for name, study in (("older", folder), ("newest", newer)):
        read_study(study).save(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").rename(tmp_path / name)
    assert shown("--folder", tmp_path / "older", "--newer", tmp_path / "newest") == tables


def test_some_environments_are_shown_with_the_correction_for_all(folder, tables):
    some = shown("--folder", folder, "--env", "Hopper-v4")
    assert [set(some[name]) for name in (RETURNS, DIFFERENCES, "Controls", "Versions")] == [{"Hopper-v4"}] * 3 + [
        {"Hopper"}
    ]
    assert some[DIFFERENCES]["Hopper-v4"] == by_first(tables[DIFFERENCES])["Hopper-v4"]


def test_aggregates_are_over_the_seeds_that_all_methods_have_everywhere(tmp_path):
    """PPO wins in one environment with its seeds alone, and loses everywhere with those in common."""
    for env_id in ("Hopper-v4", "Ant-v4"):
        for seed in range(4):
            write_run(tmp_path, "uatrpo", env_id, seed, 1000.0 + seed)
            write_run(tmp_path, "trpo", env_id, seed + 1, 500.0 + seed)
            write_run(tmp_path, "ppo", env_id, seed + 2, 9000.0 if seed > 1 else 0.0)
    values = {name: row["value"] for name, row in shown("--folder", tmp_path)["Over all environments"].items()}
    # seeds 2 and 3, on which all of ours are near 1,000, TRPO's near 500, PPO's 0 and the highest of all is ours
    assert values.pop("IQM of TRPO").startswith("0.50 (")
    assert values == {
        "IQM of UATRPO": "1.00 (1.00 to 1.00)",
        "IQM of PPO": "0.00 (0.00 to 0.00)",
        "probability of improvement over PPO": "1.00 (1.00 to 1.00)",
        "probability of improvement over TRPO": "1.00 (1.00 to 1.00)",
    }


def test_runs_without_baselines_are_shown_alone(tmp_path):
    write_runs(tmp_path, "uatrpo", "Ant-v4", 1000.0)
    tables = shown("--folder", tmp_path)
    assert tables[DIFFERENCES]["Ant-v4"]["runs"] == "5, 0, 0"
    assert tables.keys().isdisjoint({"p values", "Significant leads", "Over all environments"})


def test_the_report_is_that_of_the_committed_runs(tmp_path):
    main(["--report", "--output", str(tmp_path)])
    committed = Path(__file__).parents[1] / "benchmarks" / "results" / "recommended"
    assert (tmp_path / "report.md").read_text("utf-8") == (committed / "report.md").read_text("utf-8")
    assert all((committed / figure.name).exists() for figure in tmp_path.glob("*.png"))


def test_minutes_are_those_of_a_million_steps(tmp_path):
    output = tmp_path / "minutes.json"
    with runs_of_studies():
        table = measure_minutes(["--env", "Hopper-v4", "--n-timesteps", "100", "--output", str(output)])
    # three algorithms and the second PPO
    assert set(table.columns) == {"uatrpo", "trpo", "ppo", "ppo (defaults)"}
    assert (table > 0).all().all()
    content = json.loads(output.read_text())
    assert {row["task"] for row in content["minutes"]} == {"Hopper-v4"}
    assert content["versions"]["torch"]
