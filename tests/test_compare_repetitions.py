"""Which repetitions agree with the first runs, on made-up ones that differ in a known place."""

import pandas as pd
import pytest
from compare_repetitions import main

from tests.study.synthetic import write_run, write_table


def test_repetitions_agree_if_early_episodes_do(tmp_path, capsys):
    ends = [100, 200, 300, 12_000]
    changes = {
        "same": ([100.0, -50.0, 0.0, 10.0], ends),
        "rounding": ([100.5, -50.4, 0.0, 10.0], ends),
        "later": ([100.0, -50.0, 0.0, 99.0], ends),
        "other return": ([100.0, -51.0, 0.0, 10.0], ends),
        "other length": ([100.0, -50.0, 0.0, 10.0], [100, 250, 300, 12_000]),
        "one more": ([100.0, -50.0, 0.0, 10.0], [100, 200, 300, 400]),
    }
    for variant, (returns, steps) in changes.items():
        for folder, (values, at) in {"old": changes["same"], "new": (returns, steps)}.items():
            place = write_run(tmp_path / folder, variant=variant)
            write_table(place, "episodes", {"step": at, "return": values, "length": 100})
    write_run(tmp_path / "new", variant="not repeated")
    write_run(tmp_path / "new", env="Walker2d-v4", variant="same", failed=True)
    write_run(tmp_path / "old", env="Walker2d-v4", variant="same")
    main(["--folder", str(tmp_path / "old"), "--repeated", str(tmp_path / "new")])
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| Hopper-v4")]
    found = pd.DataFrame(rows).set_index(1)[[3, 4, 5]].T.to_dict("list")
    assert {name.removeprefix("uatrpo (")[:-1]: cells for name, cells in found.items()} == {
        "same": ["3, 3", "10,000", "agree"],
        "rounding": ["3, 3", "10,000", "agree"],
        "later": ["3, 3", "10,000", "agree"],
        "other return": ["3, 3", "200", "differ"],
        "other length": ["3, 3", "200", "differ"],
        "one more": ["3, 4", "400", "differ"],
    }
    assert lines[-1] == "Runs that agree: Hopper-v4 3"


def test_folders_without_a_run_in_common_are_refused(tmp_path, capsys):
    write_run(tmp_path / "old", seed=0)
    write_run(tmp_path / "new", seed=1)
    for repeated, words in (("new", "no finished run of"), ("nowhere", "no such folder")):
        with pytest.raises(SystemExit):
            main(["--folder", str(tmp_path / "old"), "--repeated", str(tmp_path / repeated)])
        assert words in capsys.readouterr().err
