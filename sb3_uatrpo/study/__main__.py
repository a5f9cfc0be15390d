"""
Studies from the command line: ``python -m sb3_uatrpo.study run|report``.

An error in the input, or in writing a file, is printed as one line, and the exit code is 2. ``run`` exits with 1 if
runs failed or have corrupted records, and with 130 after an interruption.
"""

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import click
except ImportError:
    sys.exit('the study tool needs more packages: run pip install ".[study]" in a clone of sb3_uatrpo')

from sb3_uatrpo.study.record import UNVARIED, StudyError

if TYPE_CHECKING:
    from sb3_uatrpo.study.driver import Executor

FOLDER = click.Path(file_okay=False, path_type=Path)
AT_LEAST_0, AT_LEAST_1 = click.IntRange(min=0), click.IntRange(min=1)
# How often a run that is lost starts again: on one machine, what has killed it is likely to kill it again
RETRIES, RETRIES_ON_RAY = 0, 3
# What earlier versions had, and what does it now
GONE = {
    "--shard": "a Ray cluster (--ray) shares a study among machines; without one, give each machine some of the seeds "
    "and a folder of its own, and all folders to report",
    "merge": "report takes several folders, and copying the files of one study's records/ and models/ into another's "
    "joins them",
    "--separate-settings": "runs with settings of their own get their names from a study file or --vary",
}


class ManyValues(click.Command):
    """A command whose repeatable options take several values at once: ``--seeds 0 1`` is ``--seeds 0 --seeds 1``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        repeatable = {name for param in self.params if param.multiple for name in param.opts}
        expanded: list[str] = []
        option = ""
        for word in args:
            # what follows an option is its value, even if it begins with a dash
            is_value = expanded[-1:] == [option]
            if (name := word.partition("=")[0]) in repeatable:
                option = name
            elif word.startswith("-") and not is_value:
                option = ""
            elif option and not is_value:
                expanded.append(option)
            expanded.append(word)
        return super().parse_args(ctx, expanded)


def ending_signals() -> list[signal.Signals]:
    """:return: signals that end a study as Ctrl-C does: the end of a cluster job, or a lost connection without nohup"""
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        return [signal.SIGTERM, signal.SIGHUP]
    return [signal.SIGTERM]


@click.group()
def cli() -> None:
    """Many runs, their statistics, and their pictures."""


@cli.command(cls=ManyValues)
@click.option("--folder", type=FOLDER, required=True, help="The study's folder. Runs recorded there are not repeated.")
@click.option("--study", "study_file", type=click.Path(), help="A YAML file that describes the runs.")
@click.option("--algo", "algos", multiple=True, help="Algorithms, by RL Zoo's names.")
@click.option("--env", "env_ids", multiple=True, help="Environments, by Gymnasium's names, or module:name.")
@click.option("--seeds", multiple=True, help="Seeds and ranges such as 0-49; default 0.")
@click.option("--n-timesteps", type=AT_LEAST_1, help="Steps of each run; default: as in RL Zoo's file.")
@click.option("--noise", type=click.FloatRange(min=0), multiple=True, help="Values of adversarial_noise; 0: none.")
@click.option("--vary", multiple=True, help="Variants: name:value for each value to try.")
@click.option("--params", multiple=True, help="Hyperparameters: name:value, or algo.name:value for one algorithm.")
@click.option("--conf", "conf_files", multiple=True, help="Hyperparameter files: file, or algo:file for one algorithm.")
@click.option("--eval-freq", type=AT_LEAST_0, help="Steps between evaluations, 0 for none; default 25000.")
@click.option("--eval-episodes", "n_eval_episodes", type=AT_LEAST_1, help="Evaluation episodes; default 5.")
@click.option("--jobs", type=AT_LEAST_1, help="Maximum number of concurrent runs; default: one per core.")
@click.option("--ray", "address", help="Run on a Ray cluster: its host:port, or auto.")
@click.option("--retries", type=AT_LEAST_0, help="How often to restart a lost run; default 0, on Ray 3.")
@click.option("--save-models", is_flag=True, help="Save trained models in FOLDER/models, for RL Zoo's enjoy.")
@click.option("--retry-failed", is_flag=True, help="Repeat runs that failed.")
@click.option("--retry-corrupted", is_flag=True, help="Repeat runs whose record cannot be read.")
def run(
    folder: Path,
    jobs: int | None,
    address: str | None,
    retries: int | None,
    save_models: bool,
    retry_failed: bool,
    retry_corrupted: bool,
    **study: Any,
) -> None:
    """
    Run algorithms × environments × seeds × variants, each run in its own process.

    Options may have several values: --seeds 0 1 2. Options replace the values in a study file. To resume a study,
    repeat the command.
    """
    from sb3_uatrpo.study.driver import ProcessExecutor, run_study
    from sb3_uatrpo.study.folders import StudyFolder
    from sb3_uatrpo.study.plan import plan

    specs = plan(**_study(**study))
    target = StudyFolder(folder, create=True)
    if save_models:
        done = {record.spec for record in target.read_all(series=False)[0] if record.status == "done"}
        if n_without := sum(spec in done and not target.model_path(spec).exists() for spec in specs):
            click.echo(f"{n_without} of {len(specs)} runs are done without their model; they are not repeated")

    def make_executor() -> "Executor":
        if address is not None:
            from sb3_uatrpo.study.ray_executor import RayExecutor

            return RayExecutor(address, jobs, save_models)
        n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return ProcessExecutor(jobs or n_cores, save_models)

    if retries is None:
        retries = RETRIES if address is None else RETRIES_ON_RAY
    before = {number: signal.signal(number, signal.default_int_handler) for number in ending_signals()}
    try:
        outcome = run_study(specs, target, make_executor, retries, retry_failed, retry_corrupted)
    except KeyboardInterrupt:
        click.echo("interrupted: finished runs are kept, and the same command resumes the study", err=True)
        sys.exit(130)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for record in outcome.failed:
        click.echo(f"failed: {record.spec}: {record.reason} ({target.records_path / record.spec.file_name})")
    click.echo(f"{outcome.done} done, {len(outcome.failed)} failed, {outcome.n_skipped} skipped: {target.records_path}")
    if outcome.failed or outcome.n_skipped:
        sys.exit(1)


def _study(
    study_file: str | None, seeds: tuple[str, ...], noise: tuple[float, ...], vary: tuple[str, ...], **others: Any
) -> dict[str, Any]:
    """The arguments of ``plan``: what the study file says, and what was typed in its place."""
    from sb3_uatrpo.study.plan import NOISE, read_study_file, split_assignment

    varied: dict[str, list] = {NOISE: list(noise)} if noise else {}
    for name, value in map(split_assignment, vary):
        if noise and name == NOISE:
            raise StudyError(f"the values of {NOISE} come from --noise or from --vary, not from both")
        varied.setdefault(name, []).append(value)
    study: dict[str, Any] = read_study_file(study_file) if study_file else {"seeds": [0]}
    typed = {"seeds": seeds, "vary": study.get("vary", {}) | varied, **others}
    study |= {name: value for name, value in typed.items() if value not in (None, (), {})}
    for option, names in (("--algo", ("algos", "variants")), ("--env", ("env_ids",))):
        if not any(map(study.get, names)):
            raise StudyError(f"nothing to run: give {option}, or a --study file that contains it")
    return {"algos": (), **study}


@cli.command(cls=ManyValues)
@click.option(
    "--folder", "folders", type=FOLDER, required=True, multiple=True, help="Studies, or RL Zoo's log folders."
)
@click.option("--output", type=FOLDER, help="Where to write the report; default: FOLDER/report, in the first folder.")
@click.option("--algo", "algos", multiple=True, help="Two algorithms to compare, the first minus the second.")
@click.option("--variant", "variants", multiple=True, help=f"Show only these variants: noise=1, {UNVARIED}, …")
@click.option("--kappa", type=float, default=0.2, show_default=True, help="Share of worst runs in a CVaR, in (0, 1].")
def report(folders: tuple[Path, ...], output: Path | None, algos: tuple[str, ...], **options: Any) -> None:
    """Write a Markdown report with its pictures. Several folders are reported on as one study."""
    from sb3_uatrpo.study.report import report as write_report

    if len(algos) not in (0, 2):
        raise StudyError(f"--algo takes two algorithms to compare, but {len(algos)} are given: {' '.join(algos)}")
    pair = (algos[0], algos[1]) if algos else None
    click.echo(write_report(folders, output or folders[0] / "report", pair, **options))


def main() -> None:
    """Run a command, and print its errors in one line."""
    try:
        cli.main(prog_name="python -m sb3_uatrpo.study", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        message = " ".join(error.format_message().split())
        if message.startswith("No such"):
            message = next(
                (f"{name} was removed: {now}" for name, now in GONE.items() if f"'{name}'" in message), message
            )
    except ModuleNotFoundError as error:
        message = f'{error}; run pip install ".[study]" in a clone of sb3_uatrpo'
    # OSError: a file or folder cannot be written
    except (StudyError, OSError) as error:
        message = str(error)
    else:
        return
    click.echo(f"Error: {message}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
