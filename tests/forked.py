"""
Python programs in processes of their own, started from one that has Stable-Baselines3's imports behind it: most of the
time of a start. ``sb3_uatrpo`` itself is not imported yet.
"""

import multiprocessing
import os
import runpy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE, STDOUT
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import IO, Any, NamedTuple
from unittest import mock

import torch as th

# torch imports the second one with the first optimizer
multiprocessing.set_forkserver_preload(["stable_baselines3", "torch._dynamo"])


class Ended(NamedTuple):
    """Exit status of a process, and what it printed."""

    code: int
    stdout: str
    stderr: str


def run_script(path: Path, *args: str, cwd: Path, **environment: str) -> Ended:
    """What ``python path args...`` does; a ``UserWarning`` is an error."""
    return _run([str(path), *args], None, cwd, environment)


def run_code(code: str, *args: str, cwd: Path, **environment: str) -> Ended:
    """What ``python -W ignore -c code args...`` does."""
    return _run(["-c", *args], code, cwd, environment)


def runs_of_studies() -> Any:
    """Within this context, RL Zoo starts like this for each run of a study."""
    return mock.patch("sb3_uatrpo.study.run.subprocess", SimpleNamespace(PIPE=PIPE, STDOUT=STDOUT, Popen=_ended))


def _ended(words: Sequence[str], env: dict[str, str], stdout: IO[bytes], **pipes: Any) -> mock.Mock:
    """As much of a ``subprocess.Popen`` as a study asks for; tests that kill a study's processes start real ones."""
    ended = _run(words[1:], None, Path.cwd(), env)
    stdout.write((ended.stdout + ended.stderr).encode())
    return mock.Mock(returncode=ended.code, poll=lambda: ended.code)


def _run(argv: Sequence[str], code: str | None, cwd: Path, environment: dict[str, str]) -> Ended:
    with TemporaryDirectory() as folder:
        process = multiprocessing.get_context("forkserver").Process(
            target=_program, args=(argv, code, cwd, {**os.environ, **environment}, Path(folder))
        )
        process.start()
        process.join()
        assert process.exitcode is not None
        return Ended(process.exitcode, *(Path(folder, name).read_text() for name in ("stdout", "stderr")))


def _program(argv: list[str], code: str | None, cwd: Path, environment: dict[str, str], folder: Path) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    th.set_num_threads(1)
    sys.argv = list(argv)
    if code is not None:
        warnings.simplefilter("ignore")
        sys.path.insert(0, "")
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        return
    if argv[0] == "-m":
        # a run of a study goes on as long as its standard input
        os.dup2(os.pipe()[0], 0)
        sys.argv = list(argv[1:])
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    warnings.simplefilter("error", UserWarning)
    sys.path.insert(0, str(Path(argv[0]).parent))
    runpy.run_path(argv[0], run_name="__main__")
