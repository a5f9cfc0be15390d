"""From specifications to records in a folder: only what is missing is run."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sb3_uatrpo.study.executors import Executor, Say
from sb3_uatrpo.study.progress import StudyProgress
from sb3_uatrpo.study.record import Record
from sb3_uatrpo.study.specification import RunSpec
from sb3_uatrpo.study.study_folder import Claims, StudyFolder

# Seconds between looks at what the runs have done
POLL = 0.5


@dataclass(frozen=True)
class Outcome:
    """
    What a study's folder holds after ``run_study``.

    :param done: number of runs that are done
    :param failed: records of the runs that failed, without their series
    :param n_skipped: number of runs whose record is corrupted and was not asked for anew
    """

    done: int
    failed: list[Record]
    n_skipped: int


def shard(specs: Sequence[RunSpec], index: int, count: int) -> list[RunSpec]:
    """
    :param specs: all runs, in an order that every part of the study knows
    :param index: number of the part, from 1
    :param count: number of parts
    :return: its runs; the parts are disjoint and together are everything
    """
    return list(specs[index - 1 :: count])


def run_study(
    specs: Sequence[RunSpec],
    folder: StudyFolder,
    make_executor: Callable[[Say], Executor],
    retry_failed: bool = False,
    retry_corrupted: bool = False,
) -> Outcome:
    """
    Run what has no record yet, and write each record as soon as its run has ended. Several may do so on one folder at a
    time: none repeats what another has under way, and each waits for what the others do.

    :param specs: the runs of the study
    :param folder: where the records are
    :param make_executor: makes what computes the runs, from a function that says a line to the user
    :param retry_failed: whether to run again what has failed
    :param retry_corrupted: whether to run again what has a record that cannot be read
    :return: what the folder holds of the study afterwards
    """
    records, corrupted = folder.read_all(series=False)
    before = {record.spec: record for record in records}
    unreadable = {path.name for path, _ in corrupted}
    settled, skipped, missing = [], [], []
    for spec in specs:
        record = before.get(spec)
        if record is not None and not (retry_failed and record.status == "failed"):
            settled.append(record)
        elif record is None and spec.file_name in unreadable and not retry_corrupted:
            skipped.append(spec)
        else:
            missing.append(spec)
    with StudyProgress(
        len(specs),
        n_steps=sum(spec.n_timesteps for spec in missing),
        n_done=sum(record.status == "done" for record in settled),
        n_failed=sum(record.status == "failed" for record in settled),
    ) as progress:
        for path, reason in corrupted:
            progress.say(f"skipped corrupted record {path}: {reason}")
        if settled:
            progress.say(f"{len(settled)} of {len(specs)} runs have a record already")
        new: list[Record] = []
        if missing:
            with folder.claims() as claims:
                executor = make_executor(progress.say)
                if all(spec.eval_freq > spec.n_timesteps for spec in missing):
                    progress.say("no evaluations: runs have fewer steps than there are between two of them")
                try:
                    new = _run_all(missing, before, folder, claims, executor, progress)
                finally:
                    executor.stop()
    ended = [*settled, *new]
    return Outcome(
        done=sum(record.status == "done" for record in ended),
        failed=[record for record in ended if record.status == "failed"],
        n_skipped=len(skipped),
    )


def _run_all(
    missing: Iterable[RunSpec],
    before: dict[RunSpec, Record],
    folder: StudyFolder,
    claims: Claims,
    executor: Executor,
    progress: StudyProgress,
) -> list[Record]:
    ended: list[Record] = []
    waiting = deque(missing)
    announced = False
    while waiting or claims.held:
        # those that somebody else has under way go to the end of the queue
        for _ in range(len(waiting)):
            if len(claims.held) >= executor.capacity:
                break
            spec = waiting.popleft()
            if not claims.take(spec):
                waiting.append(spec)
                continue
            current = folder.read(spec)
            if current is None or current.without_series() == before.get(spec):
                executor.submit(spec)
                continue
            claims.release(spec)
            progress.skipped(current)
            ended.append(current.without_series())
        if claims.held:
            for record in executor.collect(POLL):
                folder.write(record)
                claims.release(record.spec)
                progress.ended(record)
                ended.append(record.without_series())
        elif waiting:
            if not announced:
                progress.say(f"waiting for {len(waiting)} runs that another driver has under way")
                announced = True
            time.sleep(POLL)
        steps = executor.steps()
        progress.update(len(steps), sum(steps.values()))
    return ended
