"""The table of a search, on runs whose results are plain."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from tabulate_search import main

from sb3_uatrpo.study import write_record
from tests.study.synthetic import make_record


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
    assert 0.5 * 2100 < float(best["area"].replace(",", "")) < 0.62 * 2100
    assert best["explained variance"] == "–"


def test_a_folder_without_runs_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--folder", str(tmp_path)])
    assert "--folder: there are no finished runs in" in capsys.readouterr().err
