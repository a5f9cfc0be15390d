"""The tables that are committed: what they keep, and at how many digits."""

import gzip

import pandas as pd
import pytest
from save_tables import main

from sb3_uatrpo.study import read_study
from tests.study.synthetic import write_run, write_table


def test_tables_keep_what_reports_read(tmp_path):
    logged = {
        "kl_ratio": [1.99996, None],
        "kl_proposed": [0.0123456, 0.01],
        "std": [0.5, 12345.6],
        "explained_variance": [0.123456, None],
        "value_loss": [123.456, 1.0],
    }
    write_table(write_run(tmp_path / "study"), "updates", {"step": [500, 1000], **logged})
    for also in ([], ["--also", "explained_variance"]):
        main([str(tmp_path / "study"), str(tmp_path / "tables"), *also])
        saved = pd.read_csv(tmp_path / "tables" / "updates.csv.gz")
        expected = {"run": [0, 0], "step": [500, 1000], "kl_ratio": [1.99996, None], "kl_proposed": [0.01235, 0.01]}
        expected |= {"std": [0.5, 12350.0]} | ({"explained_variance": [0.1235, None]} if also else {})
        pd.testing.assert_frame_equal(saved, pd.DataFrame(expected))
    study, tables = read_study(tmp_path / "study"), read_study(tmp_path / "tables")
    pd.testing.assert_frame_equal(tables.episodes, study.episodes, check_dtype=False)
    pd.testing.assert_frame_equal(tables.evaluations, study.evaluations, check_dtype=False)


def test_a_study_that_cannot_be_read_is_not_saved(tmp_path):
    place = write_run(tmp_path / "study")
    (place / "updates.csv.gz").write_bytes(gzip.compress(b"step\nsoon\n"))
    with pytest.raises(SystemExit):
        main([str(tmp_path / "study"), str(tmp_path / "tables")])
    assert not (tmp_path / "tables").exists()
