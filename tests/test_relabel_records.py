"""The names that records from before the renaming get."""

from dataclasses import replace
from pathlib import Path

import pytest
from relabel_records import relabel

from sb3_uatrpo.study import read_records, write_record
from tests.study.synthetic import make_record

ROOT = Path(__file__).parents[1]
SHRINKAGE = {"shrinkage": 0.75, "target_kl": 0.01}


@pytest.mark.parametrize(
    ("algo", "variant", "hyperparameters", "new_algo", "new_variant"),
    [
        ("uatrpo", "", {"gamma": 0.99}, "uatrpo_paper", ""),
        ("uatrpo", "noise=1", {"gamma": 0.99}, "uatrpo_paper", "noise=1"),
        ("uatrpo", "", {"shrinkage": 0.75}, "uatrpo_paper", ""),
        ("uatrpo_shrinkage", "", SHRINKAGE, "uatrpo", "paper-batches"),
        ("uatrpo_shrinkage", "noise=1,c=0", SHRINKAGE, "uatrpo", "paper-batches,noise=1,c=0"),
        # today's names
        ("uatrpo", "", SHRINKAGE, "uatrpo", ""),
        ("uatrpo", "paper-batches", SHRINKAGE, "uatrpo", "paper-batches"),
        ("uatrpo_paper", "", {"gamma": 0.99}, "uatrpo_paper", ""),
        ("trpo_matched", "noise=1", {"gamma": 0.99}, "trpo_matched", "noise=1"),
        ("ppo", "", {"gamma": 0.99}, "ppo", ""),
    ],
)
def test_old_names_become_new_ones(tmp_path, algo, variant, hyperparameters, new_algo, new_variant):
    record = make_record(algo, variant=variant, hyperparameters=hyperparameters)
    path = write_record(record, tmp_path / "records")
    # what reading makes of it: floats are rounded
    (record,), _ = read_records(tmp_path / "records")
    renamed = (algo, variant) != (new_algo, new_variant)
    assert relabel(tmp_path) == renamed
    (found,), bad = read_records(tmp_path / "records")
    assert not bad
    assert path.exists() != renamed
    assert found == replace(record, spec=replace(record.spec, algo=new_algo, variant=new_variant))
    # once is enough
    assert relabel(tmp_path) == 0


def test_a_folder_with_an_unreadable_record_stays_as_it_is(tmp_path):
    path = write_record(make_record("uatrpo"), tmp_path / "records")
    bad = tmp_path / "records" / "bad.json.gz"
    bad.write_bytes(b"")
    with pytest.raises(SystemExit, match=r"bad\.json\.gz: "):
        relabel(tmp_path)
    assert sorted((tmp_path / "records").iterdir()) == sorted([path, bad])


def test_the_committed_records_have_todays_names():
    names = {path.name for path in (ROOT / "docs" / "results").rglob("records/*")}
    assert names
    assert {name.partition("_")[0] for name in names} == {"uatrpo", "trpo", "ppo"}
    assert not [name for name in names if name.startswith("uatrpo_shrinkage")]
