import json
import math
from dataclasses import replace

import pytest

from sb3_uatrpo.study.record import (
    OUTPUT_HEADING,
    Record,
    RunSpec,
    StudyError,
    pack_table,
    read_record,
    read_records,
    write_record,
)

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
    spec = replace(SPEC, hyperparameters={"gamma": 0.123456789123})
    returns = [1234.56789, 1e-7 / 3, math.inf, math.nan]
    episodes = {"timesteps": [1, 2, 3, 123456789], "returns": returns, "lengths": [1, 1, 1, 1]}
    updates = {"timesteps": [1], "kl_ratio": [math.inf]}
    path = write_record(replace(RECORD, spec=spec, episodes=episodes, updates=updates), tmp_path)
    read = read_record(path)
    assert read.spec == spec
    assert read.episodes["timesteps"][-1] == 123456789
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


def test_what_no_reader_would_take_is_not_written(tmp_path):
    with pytest.raises(StudyError, match=r"is not written: updates\.kl_ratio\[0\]: 'x' is not of type"):
        write_record(replace(RECORD, updates={"timesteps": [1], "kl_ratio": ["x"]}), tmp_path)
    assert not list(tmp_path.iterdir())


def edited(**changes):
    content = json.loads(json.dumps({"format": 2, "key": SPEC.key(), **vars(RECORD), "spec": SPEC.to_json()}))
    content.update(changes)
    return json.dumps({name: value for name, value in content.items() if value != "absent"})


def episodes(**changes):
    return {**RECORD.episodes, **changes}


PACKED = pack_table({"timesteps": list(range(1000, 1_001_000, 1000))})["timesteps"]


def updates(**changes):
    return {"timesteps": {**PACKED, **changes}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        (edited()[:200], ""),
        (edited()[:-1], "delimiter"),
        ("\x00" * 100, ""),
        ("[" * 100_000, "recursion"),
        ("[]", "[] is not of type 'object'"),
        ("{}", "'format' is a required property"),
        (edited(format=1), "format: 2 was expected"),
        (edited(format=3), "format: 2 was expected"),
        (edited(versions="absent"), "'versions' is a required property"),
        (edited(versions=[]), "versions: [] is not of type 'object'"),
        (edited(versions={"numpy": 2}), "versions.numpy: 2 is not of type 'string'"),
        (edited(wall_time="long"), "wall_time: 'long' is not of type 'number'"),
        (edited(spec={}), "spec: 'algo' is a required property"),
        (edited(spec={**SPEC.to_json(), "colour": "red"}), "'colour' was unexpected"),
        (edited(spec={**SPEC.to_json(), "seed": 4}), "key"),
        (edited(status="fine"), "status: 'fine' is not one of ['done', 'failed']"),
        (edited(episodes={}), "episodes: 'timesteps' is a required property"),
        (edited(episodes=episodes(timesteps=[])), "its episodes are not lists of equal length"),
        (edited(episodes=episodes(timesteps=[25, 10])), "the timesteps of its episodes do not ascend"),
        (edited(episodes=episodes(timesteps=[10, None])), "episodes.timesteps[1]: None is not of type 'integer'"),
        (edited(episodes=episodes(returns=[1.5, "12"])), "episodes.returns[1]: '12' is not of type 'number', 'null'"),
        (edited(evaluations={"timesteps": [1, 2], "returns": ["x", "y"]}), "evaluations.returns[0]: 'x' is not of"),
        (edited(evaluations={"timesteps": [1], "returns": [[]]}), "evaluations.returns[0]: [] should be non-empty"),
        (edited(updates={"timesteps": 1}), "updates.timesteps: 1 is not of type 'array'"),
        (edited(updates={"timesteps": [1], "kl_ratio": ["x"]}), "updates.kl_ratio[0]: 'x' is not of type"),
        (edited(updates={"timesteps": ["x" * 1000]}), "xxx' is not of type 'integer'"),
        (edited(updates={"timesteps": {}}), "updates.timesteps: 'encoding' is a required property"),
        (edited(updates=updates(encoding="float32")), "updates.timesteps.encoding: 'float32' is not one of"),
        (edited(updates=updates(length=10**9)), "updates.timesteps.length: 1000000000 is greater than the maximum"),
        (edited(updates=updates(length=-1)), "updates.timesteps.length: -1 is less than the minimum of 1"),
        (edited(updates=updates(length=999)), "updates: timesteps cannot be unpacked: its data are not those of 999"),
        (edited(updates=updates(data="x")), "updates: timesteps cannot be unpacked: "),
        (edited(updates=updates(data=PACKED["data"][:-8])), "updates: timesteps cannot be unpacked: its data are not"),
        (edited(updates=updates(data="é")), "updates: timesteps cannot be unpacked: "),
        (edited(updates=updates(data=None)), "updates.timesteps.data: None is not of type 'string'"),
        (edited(updates=updates() | {"kl_ratio": [1.0]}), "its updates are not lists of equal length"),
        (edited(episodes=episodes(returns=PACKED)), "its episodes are not lists of equal length"),
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
    assert len(str(caught.value)) < len(str(bad)) + 250
    records, unreadable = read_records(tmp_path)
    assert records == [read_record(good)]
    assert unreadable == [(bad, str(caught.value).removeprefix(f"{bad}: "))]


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe\x00")
    assert len(read_records(tmp_path)[1]) == 1


def test_a_copy_is_named_and_does_not_count(tmp_path):
    path = write_record(RECORD, tmp_path)
    copy = tmp_path / "zz_copy.json"
    copy.write_bytes(path.read_bytes())
    assert read_records(tmp_path) == ([RECORD], [(copy, f"a copy: the file of this record is called {path.name}")])


FRAMES = """\
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
    ~^^
ZeroDivisionError: first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 2, in f
    raise ValueError(text)
"""


@pytest.mark.parametrize(
    ("traceback", "reason"),
    [
        (None, ""),
        ("the process ended with exit code -9", "the process ended with exit code -9"),
        (f"{FRAMES}ValueError: one\nand two\n  and three\n", "ValueError: one"),
        (f'{FRAMES}ValueError: one\n{OUTPUT_HEADING}Traceback:\n  File "c.py"\nprinted\n', "ValueError: one"),
    ],
)
def test_the_reason_of_a_failure_is_the_errors_first_line(traceback, reason):
    assert replace(RECORD, status="failed", traceback=traceback).reason == reason
