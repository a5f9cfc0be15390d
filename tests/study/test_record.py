import json
import math
from dataclasses import replace

import pytest

from sb3_uatrpo.study.errors import StudyError
from sb3_uatrpo.study.record import Record, read_record, read_records, write_record
from sb3_uatrpo.study.specification import RunSpec

SPEC = RunSpec("uatrpo", "Hopper-v4", 3, 1000, "noise=1", {"gamma": 0.995, "adversarial_noise": 1.0}, 500, 2)
RECORD = Record(
    spec=SPEC,
    status="done",
    traceback=None,
    episodes={"timesteps": [10, 25], "returns": [1.5, -2.25], "lengths": [10, 15]},
    evaluations={"timesteps": [500], "returns": [[3.0, 4.0]]},
    updates={"timesteps": [500, 1000], "kl_ratio": [1.25, None], "n_updates": [1, 2]},
    versions={"python": "3.11"},
    machine={"cpus": "2"},
    wall_time=12.5,
    started="2026-01-01T00:00:00+00:00",
)


def test_what_was_written_is_read(tmp_path):
    path = write_record(RECORD, tmp_path / "new")
    assert path.name == f"uatrpo_Hopper-v4_noise=1_s3_{SPEC.key()}.json"
    assert read_record(path) == RECORD
    assert read_records(tmp_path / "new") == ([RECORD], [])
    assert read_records(tmp_path / "none") == ([], [])
    # nothing else is left, and a second write replaces the first
    write_record(replace(RECORD, status="failed", traceback="why"), tmp_path / "new")
    assert [file.name for file in (tmp_path / "new").iterdir()] == [path.name]
    assert read_record(path).traceback == "why"


def test_floats_are_short_and_settings_exact(tmp_path):
    spec = replace(SPEC, settings={"gamma": 0.123456789123})
    returns = [1234.56789, 1e-7 / 3, math.inf, math.nan]
    episodes = {"timesteps": [123456789, 2, 3, 4], "returns": returns, "lengths": [1, 1, 1, 1]}
    updates = {"timesteps": [1], "kl_ratio": [math.inf]}
    path = write_record(replace(RECORD, spec=spec, episodes=episodes, updates=updates), tmp_path)
    read = read_record(path)
    assert read.spec == spec
    assert read.episodes["timesteps"][0] == 123456789
    assert read.episodes["returns"][:2] == [1234.57, 3.33333e-08]
    assert all(math.isnan(value) for value in read.episodes["returns"][2:])
    assert read.updates["kl_ratio"] == [None]
    # readers of other languages know no NaN
    json.loads(path.read_text(), parse_constant=pytest.fail)


def test_a_write_that_fails_leaves_the_old_record(tmp_path, monkeypatch):
    path = write_record(RECORD, tmp_path)

    def no_space(*args):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="no space"):
        write_record(replace(RECORD, wall_time=1.0), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert read_record(path) == RECORD


def edited(**changes):
    content = json.loads(json.dumps({"format": 1, "key": SPEC.key(), **vars(RECORD), "spec": vars(SPEC)}))
    content.update(changes)
    return json.dumps({name: value for name, value in content.items() if value != "absent"})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        (edited()[:200], ""),
        (edited()[:-1], "delimiter"),
        ("\x00" * 100, ""),
        ("[]", "not a record"),
        ("{}", "not a record"),
        (edited(format=2), "its format is 2"),
        (edited(versions="absent"), "it lacks versions"),
        (edited(spec={}), "specification"),
        (edited(spec={**vars(SPEC), "seed": 4}), "key"),
        (edited(status="fine"), "its status is 'fine'"),
        (edited(episodes={}), "its episodes lack"),
        (edited(episodes={"timesteps": [1], "returns": [], "lengths": []}), "its episodes are not lists of one length"),
        (edited(updates={"timesteps": 1}), "its updates are not lists"),
    ],
)
def test_a_corrupted_record_is_named_and_skipped(tmp_path, text, reason):
    good = write_record(replace(RECORD, spec=replace(SPEC, seed=9)), tmp_path)
    bad = tmp_path / "bad.json"
    bad.write_text(text)
    with pytest.raises(StudyError, match=r"bad\.json: ") as caught:
        read_record(bad)
    assert reason in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    records, unreadable = read_records(tmp_path)
    assert records == [read_record(good)]
    assert unreadable == [(bad, str(caught.value).removeprefix(f"{bad}: "))]


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe\x00")
    assert len(read_records(tmp_path)[1]) == 1
