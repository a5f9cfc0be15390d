"""The tables and figures of the preset, on runs whose results are plain."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
from benchmark_recommended import main as measure_minutes
from show_recommended import main

from sb3_uatrpo.study import read_study
from tests.forked import runs_of_studies
from tests.study.synthetic import write_run

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path):
    finals = {
        ("uatrpo", "Hopper-v4", ""): 3000.0,
        ("uatrpo", "Hopper-v4", "uncertainty_coef=0"): 9000.0,
        ("trpo_matched", "Hopper-v4", "same settings"): 2500.0,
        ("ppo", "Hopper-v4", ""): 800.0,
        ("ppo", "Hopper-v4", "defaults"): 2000.0,
        ("trpo", "Hopper-v4", ""): 4000.0,
        ("uatrpo", "Ant-v4", ""): 1500.0,
        ("trpo", "Ant-v4", ""): 1500.0,
    }
    for (algo, env_id, variant), final in finals.items():
        for seed in range(5):
            kl_ratio = {"uatrpo": (1.0, 0.0), "trpo_matched": (1.8, 0.0)}.get(algo)
            write_run(tmp_path, algo, env_id, seed, final + 10 * seed, variant=variant, kl_ratio=kl_ratio)
    rows = [("uatrpo", "Hopper-v4", 5.0), ("uatrpo", "Hopper-v4", 7.0), ("ppo (defaults)", "Hopper-v4", 20.0)]
    minutes = [{"algorithm": algo, "task": task, "minutes": time} for algo, task, time in rows]
    (tmp_path / "minutes.json").write_text(json.dumps({"minutes": minutes}))
    return tmp_path


def by_task_of(table):
    names, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
    return {row[0]: dict(zip(names[1:], row[1:], strict=True)) for row in rows}


def shown(*args) -> dict[str, dict[str, dict[str, str]]]:
    """The cells of each table, by its heading."""
    return {name: by_task_of(table) for name, table in main(list(map(str, args))).items()}


def without_minutes(folder, *args):
    """And without figures, which another test draws."""
    with mock.patch.multiple("show_recommended", draw_recommended=mock.DEFAULT, draw_controls=mock.DEFAULT):
        return shown("--folder", folder, "--minutes", "none", "--output", folder / "figures", *args)


RETURNS, DIFFERENCES = "Final returns", "Differences of final returns"


def test_each_environment_has_returns_differences_and_minutes(folder, capsys):
    output = folder / "figures"
    tables = main(["--folder", str(folder), "--minutes", str(folder / "minutes.json"), "--output", str(output)])
    assert capsys.readouterr().out == "\n\n".join(f"{name}\n\n{table}" for name, table in tables.items()) + "\n"
    returns, differences = by_task_of(tables[RETURNS]), by_task_of(tables[DIFFERENCES])
    hopper, ant = returns["Hopper-v4"], returns["Ant-v4"]
    # neither the variant of ours nor the worse PPO counts
    assert hopper["UATRPO"] == "3,020 ± 7"
    assert hopper["PPO"] == r"2,020 ± 7 \* †"
    # TRPO is significantly ahead, not behind
    assert hopper["TRPO"] == "4,020 ± 7"
    assert differences["Hopper-v4"]["minus PPO"].startswith("**+1,000** (")
    assert differences["Hopper-v4"]["minus TRPO"].startswith("**-1,000** (")
    assert differences["Hopper-v4"]["runs"] == "5, 5, 5"
    assert hopper["minutes"] == "6, 20, –"
    assert differences["Ant-v4"]["minus TRPO"].startswith("+0 (")
    assert (ant["PPO"], differences["Ant-v4"]["minus PPO"]) == ("–", "–")
    assert ant["minutes"] == "–, –, –"
    # environments without our runs have no row
    assert set(returns) == {"Hopper-v4", "Ant-v4"}
    for name in ("recommended", "controls", "minutes"):
        assert (output / f"{name}.png").stat().st_size > 10_000


def test_differences_that_the_test_of_the_means_does_not_confirm_have_no_mark(folder):
    """Ours is always ahead, but PPO's runs are far apart."""
    for seed, final in enumerate([2900.0, 2900.0, 2900.0, 2900.0, 500.0]):
        write_run(folder, "ppo", "Swimmer-v4", seed, final)
        write_run(folder, "uatrpo", "Swimmer-v4", seed, 3000.0 + seed)
    tables = without_minutes(folder)
    against = tables[DIFFERENCES]["Swimmer-v4"]["minus PPO"]
    assert against.startswith("+582 (")
    assert float(against.rpartition(" = ")[2]) >= 0.05
    assert "*" not in tables[RETURNS]["Swimmer-v4"]["PPO"]


def test_last_evaluations_are_means_of_their_episodes(folder):
    for algo in ("uatrpo", "trpo"):
        write_run(folder, algo, "Swimmer-v4", eval_freq=0)
    tables = without_minutes(folder)
    by_task = tables["Last deterministic evaluations"]
    # one above the final return, see write_run
    expected = {"UATRPO": "3,021 ± 7", "PPO": r"2,021 ± 7 \* †", "TRPO": "4,021 ± 7"}
    assert by_task["Hopper-v4"] == expected
    assert by_task["Swimmer-v4"] == {"UATRPO": "–", "PPO": "–", "TRPO": "–"}
    assert tables["Differences of the last evaluations"]["Hopper-v4"]["minus PPO"].startswith("**+1,000** (")


def test_controls_show_what_is_due_to_the_method(folder):
    for seed in (3, 4):
        shutil.rmtree(folder / "same-settings" / "trpo_matched" / f"Hopper-v4_{seed + 1}")
    tables = without_minutes(folder)
    by_task = tables["Controls"]
    hopper, ant = by_task["Hopper-v4"], by_task["Ant-v4"]
    assert hopper["TRPO, same hyperparameters"] == "2,510 ± 6 [3]"
    assert hopper["minus TRPO, same hyperparameters"] == "**+510**, p < 0.001"
    assert hopper["minus without the uncertainty term"] == "**-6,000**, p < 0.001"
    assert (ant["without the uncertainty term"], ant["minus without the uncertainty term"]) == ("–", "–")
    assert (hopper["median KL ratio"], ant["median KL ratio"]) == ("1.00, 1.80", "1.00, –")
    evaluated = tables["Controls by the last evaluations"]["Hopper-v4"]
    assert evaluated["TRPO, same hyperparameters"] == "2,511 ± 6 [3]"
    assert evaluated["minus TRPO, same hyperparameters"] == "**+510**, p < 0.001"


def test_versions_of_an_environment_stand_side_by_side(folder):
    write_run(folder, "uatrpo", "Hopper-v5", final=3100.0)
    by_task = without_minutes(folder)["Versions"]
    assert by_task["Hopper"] == {"version 4": "3,020 ± 7", "version 5": "3,100 [1]"}
    assert by_task["Ant"] == {"version 4": "1,520 ± 7", "version 5": "–"}


def test_the_environments_of_a_newer_folder_replace_those_of_the_others(folder, tmp_path, capsys):
    newer = tmp_path / "newer"
    for algo, final in (("uatrpo", 2000.0), ("ppo", 1000.0)):
        for seed in range(5, 10):
            write_run(newer, algo, "Ant-v4", seed, final + 10 * (seed - 7))
    tables = without_minutes(folder, "--newer", newer)
    ant = tables[RETURNS]["Ant-v4"]
    assert (ant["UATRPO"], ant["PPO"]) == ("2,000 ± 7", r"1,000 ± 7 \*")
    # TRPO's older runs count, and ours do not
    assert ant["TRPO"] == r"1,520 ± 7 \*"
    assert tables[DIFFERENCES]["Ant-v4"]["runs"] == "5, 5, 5"
    assert tables[RETURNS]["Hopper-v4"]["UATRPO"] == "3,020 ± 7"
    # and so do tables, wherever they were saved
    for name in (older := tmp_path / "older", newest := tmp_path / "newest"):
        read_study(folder if name == older else newer).save(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").rename(name)
    assert without_minutes(older, "--newer", newest) == tables
    options = ["--folder", str(folder), "--output", str(tmp_path / "figures")]
    with pytest.raises(SystemExit):
        main([*options, "--newer", str(tmp_path / "none")])
    assert "none: no such folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit):
        main([*options, "--newer", str(tmp_path / "empty")])
    assert "empty: neither a study nor a folder that RL Zoo wrote" in capsys.readouterr().err


def test_some_environments_are_shown_with_the_correction_for_all(folder):
    some, every = without_minutes(folder, "--env", "Hopper-v4"), without_minutes(folder)
    assert {name: set(some[name]) for name in (RETURNS, DIFFERENCES, "Controls", "Versions")} == {
        **{name: {"Hopper-v4"} for name in (RETURNS, DIFFERENCES, "Controls")},
        "Versions": {"Hopper"},
    }
    assert some[DIFFERENCES]["Hopper-v4"] == every[DIFFERENCES]["Hopper-v4"]


def test_a_difference_needs_all_runs(folder):
    shutil.rmtree(folder / "plain" / "trpo" / "Ant-v4_5")
    tables = without_minutes(folder)
    assert tables[RETURNS]["Ant-v4"] == {"UATRPO": "1,520 ± 7", "PPO": "–", "TRPO": "1,515 ± 6 [4]"}
    assert tables[DIFFERENCES]["Ant-v4"] == {"runs": "5, 0, 4", "minus PPO": "–", "minus TRPO": "–"}


def test_aggregates_are_over_the_seeds_that_all_methods_have_everywhere(tmp_path):
    """PPO wins in one environment with its seeds alone, and loses everywhere with those in common."""
    for env_id in ("Hopper-v4", "Ant-v4"):
        for seed in range(4):
            write_run(tmp_path, "uatrpo", env_id, seed, 1000.0 + seed)
            write_run(tmp_path, "trpo", env_id, seed + 1, 500.0 + seed)
            write_run(tmp_path, "ppo", env_id, seed + 2, 9000.0 if seed > 1 else 0.0)
    by_name = {key: cells["value"] for key, cells in without_minutes(tmp_path)["Over all environments"].items()}
    # seeds 2 and 3, on which all of ours are near 1,000, TRPO's near 500, PPO's 0 and the highest of all is ours
    assert by_name["IQM of UATRPO"] == "1.00 (1.00 to 1.00)"
    assert by_name["IQM of TRPO"].startswith("0.50 (")
    assert by_name["IQM of PPO"] == "0.00 (0.00 to 0.00)"
    for baseline in ("PPO", "TRPO"):
        assert by_name[f"probability of improvement over {baseline}"] == "1.00 (1.00 to 1.00)"


def test_the_pages_show_the_committed_runs(tmp_path):
    """The committed report is the one written now; README, docs/results.md and hyperparameters have its figures."""
    tables = main(["--report", "--output", str(tmp_path)])
    committed = ROOT / "benchmarks" / "results" / "recommended"
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == (committed / "report.md").read_text(encoding="utf-8")
    for figure in tmp_path.glob("*.png"):
        assert (committed / figure.name).exists()
    readme, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/results.md"))

    def rows(name: str) -> list[str]:
        return tables[name].splitlines()[2:]

    assert len(rows(RETURNS)) == 6
    assert {row for row in rows(RETURNS) if row not in readme} == set()
    for name in (DIFFERENCES, "Last deterministic evaluations", "Controls", "Significant leads"):
        assert {row for row in rows(name) if row not in page} == set(), name
    for name, cells in by_task_of(tables["Over all environments"]).items():
        assert cells["value"] in (page if name.startswith("IQM") else readme), name
    # "on four environments, MatchedTRPO closes more than half of the gap between RL Zoo's TRPO and UATRPO, or is ahead"
    shares = {}
    for task, cells in by_task_of(tables["Controls"]).items():
        cells |= {"TRPO": by_task_of(tables[RETURNS])[task]["TRPO"]}
        names = ("UATRPO", "TRPO, same hyperparameters", "TRPO")
        ours, control, trpo = (float(cells[name].split()[0].replace(",", "")) for name in names)
        shares[task] = (control - trpo) / (ours - trpo)
    assert sum(share > 0.5 for share in shares.values()) == 4, shares
    assert all("on four environments, " in text.lower() for text in (readme, page))
    humanoid = by_task_of(tables["Last deterministic evaluations"])["Humanoid-v4"]
    assert f"({humanoid['UATRPO'].split()[0]} and {humanoid['TRPO'].split()[0]})" in readme
    # that of RL Zoo's PPO on Hopper, which has a second one
    assert "627 ± 178" in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "627 ± 178" in readme

    hyperparameters = (ROOT / "sb3_uatrpo" / "hyperparams" / "uatrpo.yml").read_text(encoding="utf-8")
    for task, cells in by_task_of(tables[RETURNS]).items():
        assert f"# {cells['UATRPO'].partition(' ')[0]}\n{task}:" in hyperparameters
    for task, versions in by_task_of(tables["Versions"]).items():
        assert f"# {versions['version 5']}\n{task}-v5:" in hyperparameters


def test_published_returns_stand_beside_our_evaluations():
    report = (ROOT / "benchmarks" / "results" / "recommended" / "report.md").read_text("utf-8")
    evaluated = by_task_of(report.split("\n## Last deterministic evaluations\n\n")[1].split("\n\n")[0])
    page = (ROOT / "docs" / "results.md").read_text("utf-8").split("\n## Published returns")[1]
    published = by_task_of(next(part for part in page.split("\n\n") if part.startswith("|")))
    ours = {f"{task}-v4": value for task, value in published.pop("UATRPO").items()}
    assert ours == {task: cells["UATRPO"].split()[0] for task, cells in evaluated.items()}
    highest = {
        task: max(float(cells[task].split()[0].replace(",", "")) for cells in published.values() if cells[task])
        / float(ours[f"{task}-v4"].replace(",", ""))
        for task in ("HalfCheetah", "Hopper", "Walker2d", "Swimmer", "Ant", "Humanoid")
    }
    assert {task for task, ratio in highest.items() if ratio > 1} == {"Walker2d", "Swimmer", "Ant", "Humanoid"}
    assert round(highest["Humanoid"]) == 2
    in_words = f"by up to {highest['Ant'] - 1:.0%} and {highest['Walker2d'] - 1:.0%}"
    assert f"{in_words}) and Swimmer (by {highest['Swimmer'] - 1:.0%})" in " ".join(page.split())
    assert in_words in " ".join((ROOT / "README.md").read_text("utf-8").split())


def test_p_values_are_corrected_for_six_tasks_and_for_twelve_comparisons(folder):
    finals = {"uatrpo": [3000.0] * 5, "ppo": [2800.0, 2900.0, 3000.0, 2850.0, 2950.0]}
    for algo, returns in finals.items():
        for seed, final in enumerate(returns):
            write_run(folder, algo, "Swimmer-v4", seed, final + seed)
    tables = main(["--folder", str(folder), "--minutes", "none", "--output", str(folder / "figures")])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables["p values"].splitlines()[2:]]
    by_comparison = {(task, against): cells for task, against, *cells in rows}
    assert set(list(by_comparison)[:2]) == {("Hopper-v4", "PPO"), ("Hopper-v4", "TRPO")}
    assert list(by_comparison)[2:] == [("Swimmer-v4", "PPO"), ("Ant-v4", "TRPO")]
    # in training and in evaluations, where returns are one higher for all
    assert by_comparison["Hopper-v4", "PPO"] == ["< 0.001"] * 6
    assert by_comparison["Ant-v4", "TRPO"] == ["1.000"] * 6
    alone, six, twelve, *evaluated = map(float, by_comparison["Swimmer-v4", "PPO"])
    assert evaluated == [alone, six, twelve]
    # second of six, third of twelve; p is rounded
    assert six == pytest.approx(5 * alone, abs=0.003)
    assert twelve == pytest.approx(10 * alone, abs=0.006)
    assert alone < 0.1
    # over Hopper's PPO; Hopper's TRPO is ahead of ours
    counts = by_task_of(tables["Significant leads"])
    assert counts == {
        "corrected for six environments": {"training": "1", "evaluation": "1"},
        "corrected for twelve comparisons": {"training": "1", "evaluation": "1"},
    }


def test_runs_without_baselines_are_shown_alone(tmp_path):
    for seed in range(5):
        write_run(tmp_path, "uatrpo", "Ant-v4", seed, 1000.0 + 10 * seed)
    tables = shown("--folder", tmp_path, "--minutes", "none", "--output", tmp_path / "figures")
    assert tables[DIFFERENCES]["Ant-v4"]["runs"] == "5, 0, 0"
    assert tables.keys().isdisjoint({"p values", "Significant leads", "Over all environments"})


def test_folders_without_our_runs_are_refused(tmp_path, capsys):
    write_run(tmp_path, "ppo")
    with pytest.raises(SystemExit):
        main(["--folder", str(tmp_path)])
    assert "there are no finished runs of uatrpo" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--report", "--folder", str(tmp_path)])
    assert "--report is about all runs" in capsys.readouterr().err


def test_minutes_are_those_of_a_million_steps(tmp_path, capsys):
    output = tmp_path / "minutes.json"
    with runs_of_studies():
        table = measure_minutes(["--env", "Hopper-v4", "--n-timesteps", "100", "--output", str(output)])
    # three algorithms and the second PPO
    assert set(table.columns) == {"uatrpo", "trpo", "ppo", "ppo (defaults)"}
    assert (table > 0).all().all()
    content = json.loads(output.read_text())
    assert {row["task"] for row in content["minutes"]} == {"Hopper-v4"}
    assert content["versions"]["torch"]
    with pytest.raises(SystemExit):
        measure_minutes(["--rounds", "0"])
    assert "--rounds must be at least 1, but it is 0" in capsys.readouterr().err
