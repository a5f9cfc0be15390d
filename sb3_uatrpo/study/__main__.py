"""
Studies from the command line: ``python -m sb3_uatrpo.study run|merge|report``.

What is wrong with the input, or with a place to write to, is said in one line, and the exit code is 2. That of ``run``
is 1 if runs failed or have a corrupted record, and 130 if it was interrupted.
"""

import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import click
except ImportError:
    sys.exit('this needs what pip install "sb3_uatrpo[study]" brings')

from sb3_uatrpo.study.errors import StudyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sb3_uatrpo.study.executors import Executor, Say

FOLDER = click.Path(file_okay=False, path_type=Path)


class ManyValues(click.Command):
    """A command whose repeatable options take several values at once: ``--seeds 0 1`` is ``--seeds 0 --seeds 1``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """
        :param ctx: click's context
        :param args: words of the command line
        :return: what click could not place
        """
        options = [param for param in self.params if isinstance(param, click.Option)]
        repeatable = {name for option in options if option.multiple for name in option.opts}
        expanded: list[str] = []
        current, first = "", False
        for word in args:
            if word in repeatable:
                current, first = word, True
            elif word.startswith("-") and not first:
                current = ""
            elif current and not first:
                expanded.append(current)
            else:
                first = False
            expanded.append(word)
        return super().parse_args(ctx, expanded)


class Seeds(click.ParamType):
    """A seed, or several such as ``0-49``."""

    name = "seed"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """
        :param value: what was typed
        :param param: the option
        :param ctx: click's context
        :return: the seeds
        """
        match = re.fullmatch(r"(\d{1,10})(?:-(\d{1,10}))?", str(value))
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < 2**32:
            self.fail(
                f"a seed is an integer from 0 to 2**32-1, or a range such as 0-49, but it is {value!r}", param, ctx
            )
        return list(range(first, last + 1))


class Shard(click.ParamType):
    """A part such as ``1/4``."""

    name = "i/n"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """
        :param value: what was typed
        :param param: the option
        :param ctx: click's context
        :return: the number of the part, from 1, and the number of parts
        """
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\d+)/(\d+)", str(value))
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            self.fail(f"a part is written i/n with 1 <= i <= n, but it is {value!r}", param, ctx)
        return int(match[1]), int(match[2])


def executor_factory(address: str | None, jobs: int | None, retries: int) -> "Callable[[Say], Executor]":
    """
    :param address: of a Ray cluster, ``None`` for this machine
    :param jobs: most runs at a time, ``None`` for as many as there is room for
    :param retries: how often a run is started again that a Ray cluster has lost
    :return: what makes the executor, from a function that says a line to the user
    """
    if address is not None:
        from sb3_uatrpo.study.executors_ray import RayExecutor

        return lambda say: RayExecutor(address, say, jobs, retries)
    from sb3_uatrpo.study.executors import ProcessExecutor

    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return lambda say: ProcessExecutor(jobs or n_cores)


def ending_signals() -> list[signal.Signals]:
    """:return: what ends a study as Ctrl-C does: the end of a job on a cluster, or of a connection without nohup"""
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        return [signal.SIGTERM, signal.SIGHUP]
    return [signal.SIGTERM]


@click.group()
def cli() -> None:
    """Many runs, their statistics, and their pictures."""


@cli.command(cls=ManyValues)
@click.option("--folder", type=FOLDER, required=True, help="The study's folder. What it holds is not run again.")
@click.option("--algo", "algos", multiple=True, required=True, help="Names that RL Zoo knows.")
@click.option("--env", "env_ids", multiple=True, required=True, help="Gymnasium's names, or module:name.")
@click.option("--seeds", type=Seeds(), multiple=True, default=["0"], help="Seeds and ranges such as 0-49; default 0.")
@click.option("--n-timesteps", type=click.IntRange(min=1), help="Steps of each run; default: as the settings say.")
@click.option(
    "--noise",
    type=click.FloatRange(min=0),
    multiple=True,
    help="Variants with adversarial gradient noise, in standard errors; 0 is the plain algorithm.",
)
@click.option("--vary", multiple=True, help="Variants: name:value for each value of a hyperparameter.")
@click.option("--params", multiple=True, help="Overridden hyperparameters: name:value, or algo.name:value for one.")
@click.option("--conf", "conf_files", multiple=True, help="Hyperparameter files: file, or algo:file for one.")
@click.option("--eval-freq", type=click.IntRange(min=0), default=25_000, show_default=True, help="0 for none.")
@click.option("--eval-episodes", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--jobs", type=click.IntRange(min=1), help="Most runs at a time; default: one for each core.")
@click.option("--ray", "address", help="Run on a Ray cluster: its host:port, or auto.")
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="On Ray: how often a lost run is started again.",
)
@click.option("--shard", type=Shard(), default="1/1", help="Only the i-th of n parts, from 1.")
@click.option("--retry-failed", is_flag=True, help="Run again what has failed.")
@click.option("--retry-corrupted", is_flag=True, help="Run again what has a record that cannot be read.")
def run(
    folder: Path,
    algos: tuple[str, ...],
    env_ids: tuple[str, ...],
    seeds: tuple[list[int], ...],
    n_timesteps: int | None,
    noise: tuple[float, ...],
    vary: tuple[str, ...],
    params: tuple[str, ...],
    conf_files: tuple[str, ...],
    eval_freq: int,
    eval_episodes: int,
    jobs: int | None,
    address: str | None,
    retries: int,
    shard: tuple[int, int],
    retry_failed: bool,
    retry_corrupted: bool,
) -> None:
    """
    Run algorithms × environments × seeds × variants, one process for each.

    Options may be given several values: --seeds 0 1 2. The same command goes on where it stopped.
    """
    from sb3_uatrpo.study.runner import run_study
    from sb3_uatrpo.study.runner import shard as part_of
    from sb3_uatrpo.study.settings import NOISE, plan, split_assignment
    from sb3_uatrpo.study.study_folder import StudyFolder

    varied: dict[str, list] = {NOISE: list(dict.fromkeys(noise))} if noise else {}
    for name, value in map(split_assignment, vary):
        if noise and name == NOISE:
            raise StudyError(f"the values of {NOISE} come from --noise or from --vary, not from both")
        varied.setdefault(name, []).append(value)
    specs = plan(
        list(dict.fromkeys(algos)),
        list(dict.fromkeys(env_ids)),
        list(dict.fromkeys(seed for group in seeds for seed in group)),
        n_timesteps,
        params,
        varied,
        conf_files,
        eval_freq,
        eval_episodes,
    )
    study = StudyFolder(folder, create=True)
    before = {number: signal.signal(number, signal.default_int_handler) for number in ending_signals()}
    try:
        make_executor = executor_factory(address, jobs, retries)
        outcome = run_study(part_of(specs, *shard), study, make_executor, retry_failed, retry_corrupted)
    except KeyboardInterrupt:
        click.echo("interrupted: finished runs are kept, and the same command goes on", err=True)
        sys.exit(130)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for record in outcome.failed:
        click.echo(f"failed: {record.spec}: {record.reason} ({study.records_path / record.spec.file_name})")
    click.echo(f"{outcome.done} done, {len(outcome.failed)} failed, {outcome.n_skipped} skipped: {study.records_path}")
    if outcome.failed or outcome.n_skipped:
        sys.exit(1)


@cli.command(cls=ManyValues)
@click.option("--folder", type=FOLDER, required=True, help="A study's folder, or one that RL Zoo wrote itself.")
@click.option("--output", type=FOLDER, help="Where the report goes; default: FOLDER/report.")
@click.option("--algo", "algos", multiple=True, help="The two that are compared, the first minus the second.")
@click.option("--kappa", type=float, default=0.2, show_default=True, help="Share of worst runs in tables, in (0, 1].")
@click.option("--separate-settings", is_flag=True, help="Tell runs of one algorithm with other settings apart.")
def report(folder: Path, output: Path | None, algos: tuple[str, ...], kappa: float, separate_settings: bool) -> None:
    """Write a Markdown report with its pictures."""
    from sb3_uatrpo.study.report import report as write_report

    if len(algos) not in (0, 2):
        raise StudyError(f"--algo takes the two algorithms to compare, but it is {' '.join(algos)}")
    pair = (algos[0], algos[1]) if algos else None
    click.echo(write_report(folder, output or folder / "report", pair, kappa, separate_settings))


@cli.command()
@click.option("--folder", type=FOLDER, required=True, help="The study that takes in the others.")
@click.argument("sources", nargs=-1, required=True, type=FOLDER)
def merge(folder: Path, sources: tuple[Path, ...]) -> None:
    """Copy the records of other studies into one. A run that is done there already stays as it is."""
    from sb3_uatrpo.study.study_folder import StudyFolder, merge_studies

    n_copied, bad = merge_studies([StudyFolder(source) for source in sources], StudyFolder(folder, create=True))
    for path, reason in bad:
        click.echo(f"skipped corrupted record {path}: {reason}", err=True)
    click.echo(f"{n_copied} records copied to {folder}")
    if bad:
        sys.exit(1)


def main() -> None:
    """Run a command, and say in one line what is wrong with it."""
    try:
        cli.main(prog_name="python -m sb3_uatrpo.study", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        click.echo(f"Error: {' '.join(error.format_message().split())}", err=True)
        sys.exit(2)
    # the latter of files and folders that cannot be written
    except (StudyError, OSError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    except ModuleNotFoundError as error:
        click.echo(f'Error: {error}; pip install "sb3_uatrpo[study]" brings what a study needs', err=True)
        sys.exit(2)
    except click.Abort:
        sys.exit(130)


if __name__ == "__main__":
    main()
