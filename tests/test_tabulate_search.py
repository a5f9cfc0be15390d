"""The table of a search, on runs whose results are plain."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from tabulate_search import main

from sb3_uatrpo.study import write_record
from tests.study.synthetic import make_record

ROOT = Path(__file__).parents[1]


def test_each_setting_has_a_row_the_best_area_first(tmp_path, capsys):
    for variant, final in (("", 1000.0), ("less noise", 2000.0)):
        for seed in (100, 101):
            write_record(make_record("uatrpo", seed=seed, final=final + seed, variant=variant), tmp_path / "records")
    main(["--folder", str(tmp_path)])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert [row[1] for row in rows[2:]] == ["less noise", "base"]
    best = dict(zip(rows[0], rows[2], strict=True))
    assert best["of each run"] == "2,100, 2,101"
    assert best["runs"] == "2"
    # it rises linearly over four fifths of the run; each point is the mean over the tenth of the run before it
    area, _, error = best["area"].partition(" ± ")
    assert 0.5 * 2100 < float(area.replace(",", "")) < 0.62 * 2100
    assert error == "0"
    assert best["explained variance"] == "–"


def test_means_have_standard_errors_where_there_are_several_runs(tmp_path, capsys):
    write_runs(tmp_path, "four runs", {"Hopper-v4": 1000})
    write_runs(tmp_path, "one run", {"Hopper-v4": 1000}, seeds=[100])
    main(["--folder", str(tmp_path)])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    returns = {row[1]: row[3] for row in rows[2:]}
    # the standard error of -15, -5, 5 and 15 is 6.45
    assert returns == {"four runs": "1,000 ± 6", "one run": "985"}


def test_a_folder_without_runs_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--folder", str(tmp_path)])
    assert "--folder: there are no finished runs in" in capsys.readouterr().err


def write_runs(folder, variant: str, finals: dict[str, float], seeds=range(100, 104), algo: str = "uatrpo") -> None:
    for env_id, final in finals.items():
        for seed in seeds:
            # the mean over the four seeds is ``final``
            record = make_record(algo, env_id=env_id, seed=seed, final=final + 10 * (seed - 101.5), variant=variant)
            write_record(record, folder / "records")


def test_the_objective_ranks_settings_that_have_four_runs_on_each_task(tmp_path, capsys):
    search, rivals = tmp_path / "search", tmp_path / "rivals"
    write_runs(search, "", {"Hopper-v4": 1000, "Ant-v4": 900})
    write_runs(search, "less noise", {"Hopper-v4": 1100, "Ant-v4": 500})
    write_runs(search, "on one task", {"Hopper-v4": 9000})
    write_runs(search, "three runs", {"Hopper-v4": 9000, "Ant-v4": 9000}, seeds=range(100, 103))
    write_runs(rivals, "", {"Hopper-v4": 2000, "Ant-v4": 100}, algo="ppo")
    write_runs(rivals, "", {"Hopper-v4": 500, "Ant-v4": 1000}, algo="trpo")
    main(["--folder", str(search), "--rivals", str(rivals), "--env", "Hopper-v4", "Ant-v4"])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows[2:]] == ["base", "less noise"]
    best = dict(zip(rows[0], rows[2], strict=True))
    # the best rivals have 2,000 on Hopper and 1,000 on Ant: (1000 / 2000 + 900 / 1000) / 2
    assert best["objective"] == "0.700"
    # the standard error of -15, -5, 5 and 15 is 6.45
    returns, _, area = best["Hopper-v4"].partition("; ")
    assert returns == "1,000 ± 6"
    assert 500 < float(area.replace(",", "")) < 620
    assert 0.35 < float(best["by area"]) < 0.44


@pytest.mark.parametrize(
    ("tasks", "rivals", "message"),
    [
        (["Hopper-v4"], "rivals", "--env: no setting has 4 runs on each of Hopper-v4"),
        (["Ant-v4"], "rivals", "--env: no rival has runs on Ant-v4"),
        (["Hopper-v4"], "none", "--rivals: there are no finished runs in"),
    ],
)
def test_what_cannot_be_ranked_is_named(tmp_path, capsys, tasks, rivals, message):
    write_runs(tmp_path, "", {"Hopper-v4": 1000}, seeds=[100])
    write_runs(tmp_path / "rivals", "", {"Hopper-v4": 2000}, algo="ppo")
    with pytest.raises(SystemExit):
        main(["--folder", str(tmp_path), "--rivals", str(tmp_path / rivals), "--env", *tasks])
    assert message in capsys.readouterr().err


def test_the_pages_show_the_committed_runs():
    """The tables of the pages are those printed now."""
    results = ROOT / "docs" / "results"
    page = (results / "search" / "README.md").read_text(encoding="utf-8")
    million, settings = (main(["--folder", str(results / "search" / folder)]) for folder in ("million", ""))
    assert million in page
    assert settings in page
    objective = main(["--folder", str(results / "search"), "--rivals", str(results / "rivals")])
    overview = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert objective in overview
    # a cell of its other tables is "final return; area", with the number of runs where it is below four
    rows = [re.split(r" *\| *", re.sub(" ± [0-9,]+", "", line).strip("| ")) for line in settings.splitlines()[2:]]
    printed = {f"{row[3]}; {row[5]}" + (f" [{row[2]}]" if row[2] != "4" else "") for row in rows}
    shown = re.findall(r"\| (−?[\d,]+; −?[\d,]+(?: \[\d\])?)(?= \|)", overview)
    assert len(shown) > 30
    assert {cell.replace("−", "-") for cell in shown} <= printed
