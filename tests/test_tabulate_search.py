"""The table of a search, on runs whose results are plain."""

from pathlib import Path

from tabulate_search import SEEDS, finished_runs, main, report, tabulate_changes, tabulate_objective

from tests.study.synthetic import write_run
from tests.tables import rows


def ranked(search, baselines, tasks, seeds=SEEDS, base="") -> list[dict[str, str]]:
    """The ranking of a folder's runs."""
    return rows(tabulate_objective(finished_runs(search).runs, finished_runs(baselines).runs, tasks, seeds, base))


def write_runs(folder, variant: str, finals: dict[str, float], seeds=range(100, 104), algo: str = "uatrpo") -> None:
    for env_id, final in finals.items():
        for seed in seeds:
            # the mean over the four seeds is ``final``, and its standard error that of -15, -5, 5 and 15, which is 6.45
            write_run(folder, algo, env=env_id, seed=seed, final=final + 10 * (seed - 101.5), variant=variant)


def test_each_setting_has_a_row_the_best_area_first(tmp_path):
    for variant, final in (("", 1000.0), ("less noise", 2000.0)):
        for seed in (100, 101):
            write_run(tmp_path, "uatrpo", seed=seed, final=final + seed, variant=variant)
    best, base = rows(main(["--folder", str(tmp_path)]))
    assert (best["setting"], base["setting"]) == ("less noise", "base")
    assert best["of each run"] == "2,100, 2,101"
    assert best["runs"] == "2"
    # it rises linearly over four fifths of the run; each point is the mean over the tenth of the run before it
    area, _, error = best["area"].partition(" ± ")
    assert 0.5 * 2100 < float(area.replace(",", "")) < 0.62 * 2100
    assert error == "0"
    assert best["explained variance"] == "–"


def test_means_have_standard_errors_where_there_are_several_runs(tmp_path):
    write_runs(tmp_path, "four runs", {"Hopper-v4": 1000})
    write_runs(tmp_path, "one run", {"Hopper-v4": 1000}, seeds=[100])
    table = rows(main(["--folder", str(tmp_path)]))
    assert {row["setting"]: row["final return"] for row in table} == {"four runs": "1,000 ± 6", "one run": "985"}


def test_the_objective_ranks_settings_that_have_all_seeds_on_each_task(tmp_path):
    search, rivals = tmp_path / "search", tmp_path / "rivals"
    write_runs(search, "", {"Hopper-v4": 1000, "Ant-v4": 900})
    write_runs(search, "less noise", {"Hopper-v4": 1100, "Ant-v4": 500})
    write_runs(search, "on one task", {"Hopper-v4": 9000})
    write_runs(search, "three runs", {"Hopper-v4": 9000, "Ant-v4": 9000}, seeds=range(100, 103))
    write_runs(rivals, "", {"Hopper-v4": 2000, "Ant-v4": 100}, algo="ppo")
    write_runs(rivals, "", {"Hopper-v4": 500, "Ant-v4": 1000}, algo="trpo")
    best, second = ranked(search, rivals, ["Hopper-v4", "Ant-v4"])
    assert (best["setting"], second["setting"]) == ("base", "less noise")
    # the best rivals have 2,000 on Hopper and 1,000 on Ant: the mean of 1000 / 2000 and 900 / 1000, and half the square
    # root of the sum of the squares of 6.45 / 2000 and 6.45 / 1000
    assert best["normalised score"] == "0.700 ± 0.004"
    returns, _, area = best["Hopper-v4"].partition("; ")
    assert returns == "1,000 ± 6"
    assert 500 < float(area.replace(",", "")) < 620
    assert 0.35 < float(best["by area"].split(" ± ")[0]) < 0.44


def test_the_objective_can_be_that_of_some_seeds(tmp_path):
    search, rivals = tmp_path / "search", tmp_path / "rivals"
    write_runs(search, "two runs", {"Hopper-v4": 1000}, seeds=[100, 103])
    write_runs(search, "other runs", {"Hopper-v4": 3000}, seeds=[102, 103])
    write_runs(rivals, "", {"Hopper-v4": 1000}, algo="ppo")
    scores = {
        seeds: [(row["setting"], row["normalised score"]) for row in ranked(search, rivals, ["Hopper-v4"], list(seeds))]
        for seeds in ((103,), (100, 103))
    }
    # 3,015 and 1,015 with seed 103
    assert scores[103,] == [("other runs", "3.015"), ("two runs", "1.015")]
    assert scores[100, 103] == [("two runs", "1.000 ± 0.015")]


def test_nothing_is_ranked_without_all_runs(tmp_path):
    write_runs(tmp_path / "search", "", {"Hopper-v4": 1000}, seeds=[100])
    write_runs(tmp_path / "rivals", "", {"Hopper-v4": 2000}, algo="ppo")
    runs, rivals = (finished_runs(tmp_path / name).runs for name in ("search", "rivals"))
    assert tabulate_objective(runs, rivals, ["Hopper-v4"], SEEDS) == ""
    assert "| base | " in tabulate_objective(runs, rivals, ["Hopper-v4"], [100])


def test_what_is_behind_is_marked(tmp_path):
    search, baselines = tmp_path / "search", tmp_path / "baselines"
    for variant, final in (("", 1000), ("as good", 990), ("worse", 900)):
        write_runs(search, variant, {"Hopper-v4": final})
    write_runs(baselines, "", {"Hopper-v4": 1000}, algo="ppo")
    ranking = ranked(search, baselines, ["Hopper-v4"], base="base")
    # a standard error of 6.45 each, so 9.1 of the difference
    assert [row["setting"] for row in ranking] == ["base", "as good", "worse †"]


def test_changes_are_differences_from_the_base(tmp_path):
    write_runs(tmp_path, "the base", {"Hopper-v4": 1000, "Ant-v4": 500})
    write_runs(tmp_path, "less noise", {"Hopper-v4": 1100})
    write_runs(tmp_path, "one run", {"Hopper-v4": 1000}, seeds=[100])
    write_runs(tmp_path, "elsewhere", {"Swimmer-v4": 1000})
    write_runs(tmp_path, "another start", {"Hopper-v4": 0})
    table = tabulate_changes(finished_runs(tmp_path).runs, "the base", ["another start"])
    assert table.splitlines()[0] == "| change | Ant-v4 | Hopper-v4 |"
    assert table.splitlines()[2:] == ["| less noise | – | +100 ± 9 [4] |", "| one run | – | -15 [1] |"]


def test_the_report_is_that_of_the_committed_runs():
    results = Path(__file__).parents[1] / "benchmarks" / "results"
    assert (results / "search" / "report.md").read_text("utf-8") == report(results / "search", results / "rivals")
