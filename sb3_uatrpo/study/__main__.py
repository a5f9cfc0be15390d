"""
Studies from the command line: ``python -m sb3_uatrpo.study run|merge|report``.

What is wrong with the input, or with a place to write to, is said in one line, and the exit code is 2. That of ``run``
is 1 if runs failed or have a corrupted record, and 130 if it was interrupted.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import click
except ImportError:
    sys.exit('this needs what pip install "sb3_uatrpo[study]" brings')

from sb3_uatrpo.study.record import StudyError

if TYPE_CHECKING:
    from sb3_uatrpo.study.driver import Executor

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
@click.option("--study", "study_file", type=click.Path(), help="A YAML file that says what is run.")
@click.option("--algo", "algos", multiple=True, help="Names that RL Zoo knows.")
@click.option("--env", "env_ids", multiple=True, help="Gymnasium's names, or module:name.")
@click.option("--seeds", multiple=True, help="Seeds and ranges such as 0-49; default 0.")
@click.option("--n-timesteps", type=click.IntRange(min=1), help="Steps of each run; default: as RL Zoo's file says.")
@click.option(
    "--noise",
    type=click.FloatRange(min=0),
    multiple=True,
    help="Variants with adversarial gradient noise, in standard errors; 0 is the plain algorithm.",
)
@click.option("--vary", multiple=True, help="Variants: name:value for each value of a hyperparameter.")
@click.option("--params", multiple=True, help="Overridden hyperparameters: name:value, or algo.name:value for one.")
@click.option("--conf", "conf_files", multiple=True, help="Hyperparameter files: file, or algo:file for one.")
@click.option("--eval-freq", type=click.IntRange(min=0), help="0 for none; default 25000.")
@click.option("--eval-episodes", "n_eval_episodes", type=click.IntRange(min=1), help="Default 5.")
@click.option("--jobs", type=click.IntRange(min=1), help="Most runs at a time; default: one for each core.")
@click.option("--ray", "address", help="Run on a Ray cluster: its host:port, or auto.")
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="On Ray: how often a lost run is started again.",
)
@click.option("--shard", "part", default="1/1", metavar="I/N", help="Only the i-th of n parts, from 1.")
@click.option("--save-models", is_flag=True, help="Keep what each run learned, in FOLDER/models, for RL Zoo's enjoy.")
@click.option("--retry-failed", is_flag=True, help="Run again what has failed.")
@click.option("--retry-corrupted", is_flag=True, help="Run again what has a record that cannot be read.")
def run(
    folder: Path,
    study_file: str | None,
    seeds: tuple[str, ...],
    noise: tuple[float, ...],
    vary: tuple[str, ...],
    jobs: int | None,
    address: str | None,
    retries: int,
    part: str,
    save_models: bool,
    retry_failed: bool,
    retry_corrupted: bool,
    **others: Any,
) -> None:
    """
    Run algorithms × environments × seeds × variants, one process for each.

    Options may be given several values: --seeds 0 1 2. They replace what a file says. The same command goes on where
    it stopped.
    """
    from sb3_uatrpo.study.driver import ProcessExecutor, run_study
    from sb3_uatrpo.study.plan import NOISE, parse_seeds, plan, read_study_file, shard, split_assignment
    from sb3_uatrpo.study.study_folder import StudyFolder

    varied: dict[str, list] = {NOISE: list(dict.fromkeys(noise))} if noise else {}
    for name, value in map(split_assignment, vary):
        if noise and name == NOISE:
            raise StudyError(f"the values of {NOISE} come from --noise or from --vary, not from both")
        varied.setdefault(name, []).append(value)
    study = {"algos": (), "seeds": [0], **(read_study_file(study_file) if study_file else {})}
    given = {"seeds": parse_seeds(seeds), "vary": study.get("vary", {}) | varied, **others}
    study |= {name: value for name, value in given.items() if value not in (None, (), [], {})}
    for option, name in (("--algo", "algos"), ("--env", "env_ids")):
        if not study.get(name) and not (name == "algos" and study.get("variants")):
            raise StudyError(f"nothing to run: give {option}, or a file that says it with --study")
        study[name] = list(dict.fromkeys(study[name]))
    specs = shard(plan(**study), part)
    target = StudyFolder(folder, create=True)

    def make_executor(say: Callable[[str], None]) -> "Executor":
        if address is not None:
            from sb3_uatrpo.study.ray_executor import RayExecutor

            return RayExecutor(address, say, jobs, retries, save_models)
        n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return ProcessExecutor(jobs or n_cores, save_models)

    before = {number: signal.signal(number, signal.default_int_handler) for number in ending_signals()}
    try:
        outcome = run_study(specs, target, make_executor, retry_failed, retry_corrupted)
    except KeyboardInterrupt:
        click.echo("interrupted: finished runs are kept, and the same command goes on", err=True)
        sys.exit(130)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for record in outcome.failed:
        click.echo(f"failed: {record.spec}: {record.reason} ({target.records_path / record.spec.file_name})")
    click.echo(f"{outcome.done} done, {len(outcome.failed)} failed, {outcome.n_skipped} skipped: {target.records_path}")
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
