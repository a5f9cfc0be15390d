import gzip
import json
import math
from dataclasses import replace

import pytest

from sb3_uatrpo.study.record import (
    OUTPUT_HEADING,
    Record,
    RunSpec,
    StudyError,
    each_run_once,
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
    assert path.name == f"uatrpo_Hopper-v4_noise=1_s3_{SPEC.key()}.json.gz"
    assert read_record(path) == RECORD
    assert read_records(tmp_path / "new") == ([RECORD], [])
    with pytest.raises(StudyError, match="none: no such folder"):
        read_records(tmp_path / "none")
    # nothing else is left, and a second write replaces the first
    write_record(replace(RECORD, status="failed", traceback="why"), tmp_path / "new")
    assert [file.name for file in (tmp_path / "new").iterdir()] == [path.name]
    assert read_record(path).traceback == "why"


def test_of_equal_records_the_first_counts_and_otherwise_the_one_worth_more():
    again = replace(RECORD, wall_time=1.0)
    failed, of_the_zoo = replace(RECORD, status="failed"), replace(RECORD, updates={"timesteps": []})
    for records, expected in (
        ([RECORD, again], RECORD),
        ([again, RECORD], again),
        ([failed, of_the_zoo], of_the_zoo),
        ([of_the_zoo, RECORD, failed], RECORD),
    ):
        assert each_run_once(records) == [expected]
    other = replace(RECORD, spec=replace(SPEC, seed=4))
    assert each_run_once([RECORD, other]) == [RECORD, other]


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
    json.loads(gzip.decompress(path.read_bytes()), parse_constant=pytest.fail)


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
    content = json.loads(json.dumps({"format": 3, "key": SPEC.key(), **vars(RECORD), "spec": SPEC.to_json()}))
    content.update(changes)
    return json.dumps({name: value for name, value in content.items() if value != "absent"})


def episodes(**changes):
    return {**RECORD.episodes, **changes}


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
        (edited(format=2), "format: 3 was expected"),
        (edited(format=4), "format: 3 was expected"),
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
        (edited(updates={"timesteps": [1], "kl_proposed": ["x"]}), "updates.kl_proposed[0]: 'x' is not of type"),
        (edited(updates={"timesteps": ["x" * 1000]}), "xxx' is not of type 'integer'"),
        (edited(updates={"timesteps": [1], "kl_ratio": []}), "its updates are not lists of equal length"),
    ],
)
def test_a_corrupted_record_is_named_and_skipped(tmp_path, text, reason):
    good = write_record(replace(RECORD, spec=replace(SPEC, seed=9)), tmp_path)
    bad = tmp_path / "bad.json.gz"
    bad.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(StudyError, match=r"bad\.json\.gz: ") as caught:
        read_record(bad)
    assert reason in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < len(str(bad)) + 250
    records, unreadable = read_records(tmp_path)
    assert records == [read_record(good)]
    assert unreadable == [(bad, str(caught.value).removeprefix(f"{bad}: "))]


# the name of a test may not depend on the time at which it is collected
CONTENT = gzip.compress(edited().encode(), mtime=0)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "Expecting value"),
        (b"{}", "Not a gzipped file"),
        (CONTENT[:100], "end-of-stream marker"),
        (CONTENT[:-8] + b"\x00" * 8, "CRC check failed"),
        (CONTENT[:30] + b"\xff" * 30 + CONTENT[60:], "Error -3 while decompressing"),
        (gzip.compress(b"\xff\xfe\x00", mtime=0), "can't decode byte"),
    ],
)
def test_a_file_that_is_damaged(tmp_path, data, reason):
    (tmp_path / "bad.json.gz").write_bytes(data)
    ((_, said),) = read_records(tmp_path)[1]
    assert reason in said


def test_a_small_file_of_a_huge_text_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("sb3_uatrpo.study.record.MAX_SIZE", 10_000)
    path = write_record(RECORD, tmp_path)
    assert read_record(path) == RECORD
    path.write_bytes(gzip.compress(b" " * 10_001))
    with pytest.raises(StudyError, match="its text is longer than 10000 bytes"):
        read_record(path)


def test_equal_records_are_equal_files(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1e9)
    first = write_record(RECORD, tmp_path).read_bytes()
    monkeypatch.setattr("time.time", lambda: 2e9)
    assert write_record(RECORD, tmp_path).read_bytes() == first


def test_a_record_of_an_older_version_is_named(tmp_path):
    (tmp_path / "old.json").write_text(edited(format=2))
    assert [path.name for path, _ in read_records(tmp_path)[1]] == ["old.json"]


def test_a_copy_is_named_and_does_not_count(tmp_path):
    path = write_record(RECORD, tmp_path)
    copy = tmp_path / "zz_copy.json.gz"
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
