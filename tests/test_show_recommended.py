"""The table and the picture of the recommended settings, on runs whose results are plain."""

import json
import re
import shutil
from pathlib import Path

import pytest
from benchmark_recommended import main as measure_minutes
from show_recommended import main

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


def test_each_task_has_returns_verdicts_and_minutes(folder, capsys):
    output = folder / "pictures" / "recommended.png"
    tables = main(["--folder", str(folder), "--minutes", str(folder / "minutes.json"), "--output", str(output)])
    assert capsys.readouterr().out == "\n\n".join(tables) + "\n"
    by_task = by_task_of(tables[0])
    hopper, ant = by_task["Hopper-v4"], by_task["Ant-v4"]
    # neither the variant of ours nor the worse PPO counts; both PPOs are shown
    assert hopper["UATRPO"] == "3,020 ± 7"
    assert hopper["PPO"] == "2,020 ± 7 (defaults); 820 ± 7"
    assert hopper["against PPO"].startswith("**better**: +1,000 (")
    assert hopper["against TRPO"].startswith("**worse**: -1,000 (")
    assert hopper["minutes"] == "6.0, 20.0, –"
    assert ant["against TRPO"].startswith("no worse: +0 (")
    assert (ant["PPO"], ant["against PPO"], ant["minutes"]) == ("–", "–", "–, –, –")
    # tasks without our runs have no row
    assert set(by_task) == {"Hopper-v4", "Ant-v4"}
    assert output.stat().st_size > 10_000


def test_verdicts_that_the_test_of_the_means_does_not_confirm_are_not_bold(folder):
    """Ours is always ahead, but the rival's runs are far apart."""
    for seed, final in enumerate([2900.0, 2900.0, 2900.0, 2900.0, 500.0]):
        write_run(folder, "ppo", "Swimmer-v4", seed, final)
        write_run(folder, "uatrpo", "Swimmer-v4", seed, 3000.0 + seed)
    table, *_ = main(["--folder", str(folder), "--minutes", "none", "--output", str(folder / "picture.png")])
    against = by_task_of(table)["Swimmer-v4"]["against PPO"]
    assert against.startswith("better: +582 (")
    assert float(against.rpartition(" = ")[2]) >= 0.05


def test_last_evaluations_are_means_of_their_episodes(folder):
    for algo in ("uatrpo", "trpo"):
        write_run(folder, algo, "Swimmer-v4", eval_freq=0)
    _, table, *_ = main(["--folder", str(folder), "--minutes", "none", "--output", str(folder / "picture.png")])
    by_task = by_task_of(table)
    # one above the final return, see make_record
    expected = {"UATRPO": "3,021 ± 7", "PPO": "2,021 ± 7 (defaults); 821 ± 7", "TRPO": "4,021 ± 7"}
    assert by_task["Hopper-v4"] == expected
    assert by_task["Swimmer-v4"] == {"UATRPO": "–", "PPO": "–", "TRPO": "–"}


def test_controls_show_what_is_due_to_the_method(folder):
    for seed in (3, 4):
        shutil.rmtree(folder / "same-settings" / "trpo_matched" / f"Hopper-v4_{seed + 1}")
    _, _, table, *_ = main(["--folder", str(folder), "--minutes", "none", "--output", str(folder / "picture.png")])
    by_task = by_task_of(table)
    hopper, ant = by_task["Hopper-v4"], by_task["Ant-v4"]
    assert hopper["TRPO, same settings"] == "2,510 ± 6 [3]"
    assert hopper["difference from TRPO, same settings"] == "+510, p < 0.001"
    assert hopper["difference from without Σ"] == "-6,000, p < 0.001"
    assert (ant["without Σ"], ant["difference from without Σ"]) == ("–", "–")
    assert (hopper["median KL ratio"], ant["median KL ratio"]) == ("1.00, 1.80", "1.00, –")


def test_versions_of_a_task_stand_side_by_side(folder):
    write_run(folder, "uatrpo", "Hopper-v5", final=3100.0)
    *_, table, _ = main(["--folder", str(folder), "--minutes", "none", "--output", str(folder / "picture.png")])
    by_task = by_task_of(table)
    assert by_task["Hopper"] == {"version 4": "3,020 ± 7", "version 5": "3,100 [1]"}
    assert by_task["Ant"] == {"version 4": "1,520 ± 7", "version 5": "–"}


def test_the_tasks_of_a_newer_folder_replace_those_of_the_others(folder, tmp_path, capsys):
    newer = tmp_path / "newer"
    for algo, final in (("uatrpo", 2000.0), ("ppo", 1000.0)):
        for seed in range(5, 10):
            write_run(newer, algo, "Ant-v4", seed, final + 10 * (seed - 7))
    options = ["--folder", str(folder), "--minutes", "none", "--output", str(tmp_path / "picture.png")]
    by_task = by_task_of(main([*options, "--newer", str(newer)])[0])
    assert {by_task["Ant-v4"][name] for name in ("UATRPO", "PPO")} == {"2,000 ± 7", "1,000 ± 7"}
    # the rival's older runs count, and ours do not
    assert by_task["Ant-v4"]["TRPO"] == "1,520 ± 7"
    assert by_task["Ant-v4"]["runs"] == "5, 5, 5"
    assert by_task["Hopper-v4"]["UATRPO"] == "3,020 ± 7"
    with pytest.raises(SystemExit):
        main([*options, "--newer", str(tmp_path / "none")])
    assert "none: no such folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit):
        main([*options, "--newer", str(tmp_path / "empty")])
    assert "empty: neither a study nor a folder that RL Zoo wrote" in capsys.readouterr().err


def test_some_tasks_are_shown_with_the_correction_for_all(folder, tmp_path):
    options = ["--folder", str(folder), "--minutes", "none", "--output", str(tmp_path / "picture.png")]
    tables = main([*options, "--env", "Hopper-v4"])
    assert [set(by_task_of(table)) for table in tables[:4]] == [{"Hopper-v4"}] * 3 + [{"Hopper"}]
    assert by_task_of(tables[0])["Hopper-v4"] == by_task_of(main(options)[0])["Hopper-v4"]


def test_a_verdict_needs_all_runs_and_is_corrected_for_all_tasks(folder, capsys):
    shutil.rmtree(folder / "plain" / "trpo" / "Ant-v4_5")
    main(["--folder", str(folder), "--minutes", "none", "--output", str(folder / "picture.png")])
    table, *_ = capsys.readouterr().out.split("\n\n")
    (ant,) = (line for line in table.splitlines() if line.startswith("| Ant"))
    assert ant == "| Ant-v4 | 1,520 ± 7 | – | 1,515 ± 6 [4] | 5, –, 4 | – | – |"


def test_the_pages_show_the_committed_runs(tmp_path):
    """The tables of docs/results.md are those printed now; README and hyperparameters have their means."""
    picture = ["--output", str(tmp_path / "picture.png")]
    recommended, rivals, more_seeds, ant = (
        str(ROOT / "benchmarks" / "results" / name) for name in ("recommended", "rivals", "more_seeds", "ant")
    )
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    newest = main(picture)
    for each in newest:
        assert each in page
    # the first comparison, Ant with its new λ, and the seeds that were added. Minutes are those of today's settings
    earlier = [*picture, "--minutes", "none"]
    assert main(["--folder", recommended, rivals, *earlier])[0] in page
    assert main(["--folder", ant, *earlier])[0] in page
    assert main(["--folder", more_seeds, *earlier])[0] in page
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    hyperparameters = (ROOT / "sb3_uatrpo" / "hyperparams" / "uatrpo.yml").read_text(encoding="utf-8")
    settings = by_task_of(newest[0])
    assert len(settings) == 6
    for task, cells in settings.items():
        returns = [cells["UATRPO"]]
        for rival in ("PPO", "TRPO"):
            better = cells[f"against {rival}"].startswith("**better**")
            returns.append(re.sub(r"( ± [\d,]+)", r"\1\\*", cells[rival], count=1) if better else cells[rival])
        minutes = [f"{float(each) + 1e-9:.0f}" for each in cells["minutes"].split(", ")]
        assert f"| {' | '.join([task, *returns, *minutes])} |" in readme
        assert f"# {cells['UATRPO'].partition(' ')[0]}\n{task}:" in hyperparameters
    for task, versions in by_task_of(newest[3]).items():
        assert f"# {versions['version 5']}\n{task}-v5:" in hyperparameters


def test_p_values_are_corrected_for_six_tasks_and_for_twelve_comparisons(folder):
    finals = {"uatrpo": [3000.0] * 5, "ppo": [2800.0, 2900.0, 3000.0, 2850.0, 2950.0]}
    for algo, returns in finals.items():
        for seed, final in enumerate(returns):
            write_run(folder, algo, "Swimmer-v4", seed, final + seed)
    *_, table = main(["--folder", str(folder), "--minutes", "none", "--output", str(folder / "picture.png")])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    by_comparison = {(task, rival): cells for task, rival, *cells in rows}
    assert set(by_comparison) == {
        ("Hopper-v4", "PPO"),
        ("Hopper-v4", "TRPO"),
        ("Swimmer-v4", "PPO"),
        ("Ant-v4", "TRPO"),
    }
    assert list(by_comparison)[2:] == [("Swimmer-v4", "PPO"), ("Ant-v4", "TRPO")]
    assert by_comparison["Hopper-v4", "PPO"] == ["< 0.001"] * 3
    assert by_comparison["Ant-v4", "TRPO"] == ["1.000"] * 3
    alone, six, twelve = map(float, by_comparison["Swimmer-v4", "PPO"])
    # second of six, third of twelve; p is rounded
    assert six == pytest.approx(5 * alone, abs=0.003)
    assert twelve == pytest.approx(10 * alone, abs=0.006)
    assert alone < 0.1


def test_runs_without_rivals_are_shown_without_verdicts(tmp_path):
    for seed in range(5):
        write_run(tmp_path, "uatrpo", "Ant-v4", seed, 1000.0 + 10 * seed)
    options = ["--folder", str(tmp_path), "--minutes", "none", "--output", str(tmp_path / "picture.png")]
    first, *_, p_values = main(options)
    assert by_task_of(first)["Ant-v4"]["runs"] == "5, –, –"
    assert p_values == ""


def test_folders_without_our_runs_are_refused(tmp_path, capsys):
    write_run(tmp_path, "ppo")
    with pytest.raises(SystemExit):
        main(["--folder", str(tmp_path)])
    assert "--folder: there are no finished runs of uatrpo" in capsys.readouterr().err


def test_minutes_are_those_of_a_million_steps(tmp_path, capsys):
    output = tmp_path / "minutes.json"
    table = measure_minutes(["--env", "Hopper-v4", "--n-timesteps", "2100", "--output", str(output)])
    # three algorithms and the second PPO
    assert set(table.columns) == {"uatrpo", "trpo", "ppo", "ppo (defaults)"}
    assert (table > 0).all().all()
    content = json.loads(output.read_text())
    assert {row["task"] for row in content["minutes"]} == {"Hopper-v4"}
    assert content["versions"]["torch"]
    with pytest.raises(SystemExit):
        measure_minutes(["--rounds", "0"])
    assert "--rounds must be at least 1, but it is 0" in capsys.readouterr().err
