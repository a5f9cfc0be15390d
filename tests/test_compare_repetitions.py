"""Which repetitions agree with the first runs, on made-up ones that differ in a known place."""

from compare_repetitions import main

from tests.study.synthetic import write_run, write_table
from tests.tables import rows


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
    printed = capsys.readouterr().out
    table = [list(row.values()) for row in rows(printed)]
    assert {row[1].removeprefix("uatrpo (")[:-1]: row[3:] for row in table if row[0] == "Hopper-v4"} == {
        "same": ["3, 3", "10,000", "agree"],
        "rounding": ["3, 3", "10,000", "agree"],
        "later": ["3, 3", "10,000", "agree"],
        "other return": ["3, 3", "200", "differ"],
        "other length": ["3, 3", "200", "differ"],
        "one more": ["3, 4", "400", "differ"],
    }
    assert printed.splitlines()[-1] == "Runs that agree: Hopper-v4 3"
