"""
Studies from the command line: ``python -m sb3_uatrpo.study run|report``.

An error in the input, or in writing a file, is printed as one line, and the exit code is 2. ``run`` exits with 1 if
runs failed, and with 130 after an interruption.
"""

import argparse
import inspect
import sys
from pathlib import Path
from typing import Any, NoReturn

from sb3_uatrpo.study.plan import NOISE, PLAIN, REPORT, StudyError, plan, read_study_file, split_assignment


class Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise StudyError(f"{message}; see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """:return: the parser of the command line"""
    main = Parser(prog="python -m sb3_uatrpo.study", description="Many runs, their statistics, and their pictures.")
    commands = main.add_subparsers(dest="command", required=True)
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}

    description = "Run algorithms × environments × seeds × variants. To resume a study, repeat the command."
    run = commands.add_parser("run", allow_abbrev=False, help=description, description=description)
    run.add_argument("--folder", type=Path, required=True, help="the study's folder; runs in it are not repeated")
    run.add_argument("--study", help="a YAML file that describes the runs; options replace its values")
    run.add_argument("--algo", dest="algos", **several, help="algorithms, by RL Zoo's names")
    run.add_argument("--env", dest="env_ids", **several, help="environments, by Gymnasium's names, or module:name")
    run.add_argument("--seeds", **several, help="seeds and ranges such as 0-49; default 0")
    run.add_argument("--n-timesteps", help="steps of each run; default: as in RL Zoo's file")
    run.add_argument("--noise", type=float, **several, help="values of adversarial_noise; 0: none")
    run.add_argument("--vary", dest="varied", **several, help="variants: name:value for each value to try")
    run.add_argument("--params", **several, help="hyperparameters: name:value, or algo.name:value for one algorithm")
    run.add_argument("--conf", dest="conf_files", **several, help="hyperparameter files: file, or algo:file for one")
    run.add_argument("--eval-freq", type=int, help="steps between evaluations, 0 for none; default 25000")
    run.add_argument("--eval-episodes", dest="n_eval_episodes", type=int, help="evaluation episodes; default 5")
    run.add_argument("--jobs", type=int, help="maximum number of concurrent runs; default: one per core")
    run.add_argument("--ray", metavar="ADDRESS", help="run on a Ray cluster: its host:port, or auto")
    run.add_argument("--save-models", action="store_true", help="keep the trained models, for RL Zoo's enjoy")
    run.add_argument("--retry-failed", action="store_true", help="repeat runs that failed")

    description = "Write a Markdown report with its pictures. Several folders are reported on as one study."
    report = commands.add_parser("report", allow_abbrev=False, help=description, description=description)
    report.add_argument("--folder", required=True, **several, help="studies, or RL Zoo's log folders")
    report.add_argument("--output", help="where to write; default: FOLDER/report, in the first folder")
    report.add_argument("--algo", **several, help="two algorithms to compare, the first minus the second")
    report.add_argument("--variant", **several, help=f"show only these variants: noise=1, {PLAIN}, …")
    report.add_argument("--kappa", type=float, default=0.2, help="share of worst runs in a CVaR; default 0.2")
    report.add_argument("--format", default="png", help="of the pictures: png, which is the default, or svg")
    return main


def run(options: argparse.Namespace) -> int:
    """:return: the exit code"""
    from sb3_uatrpo.study.run import run_study

    varied: dict[str, list[Any]] = {NOISE: options.noise} if options.noise else {}
    for name, value in map(split_assignment, options.varied):
        varied.setdefault(name, []).append(value)
    study: dict[str, Any] = {"algos": (), "seeds": [0], **(read_study_file(options.study) if options.study else {})}
    study["vary"] = study.get("vary", {}) | varied
    given = {name: value for name, value in vars(options).items() if value not in (None, [])}
    study |= {name: given[name] for name in given.keys() & inspect.signature(plan).parameters}
    if not (study["algos"] or study.get("variants")) or not study.get("env_ids") or not study["seeds"]:
        raise StudyError("nothing to run: give --algo and --env, or a --study file that contains them, and seeds")
    runs = plan(**study)
    try:
        failed = run_study(runs, options.folder, options.jobs, options.ray, options.save_models, options.retry_failed)
    except KeyboardInterrupt:
        print("interrupted: finished runs are kept, and the same command resumes the study", file=sys.stderr)
        return 130
    for each, path in failed:
        print(f"failed: {each}: {path.read_text().strip().splitlines()[-1]} ({path})")
    print(f"{len(runs) - len(failed)} done, {len(failed)} failed: {options.folder}")
    return 1 if failed else 0


def main() -> None:
    """Run a command, and print its errors in one line."""
    try:
        options = parser().parse_args()
        if options.command == "run":
            sys.exit(run(options))
        from sb3_uatrpo.study.report import report

        output = options.output or Path(options.folder[0], REPORT)
        print(report(options.folder, output, options.algo, options.kappa, options.variant, options.format))
    except (StudyError, OSError, ModuleNotFoundError) as error:
        is_extra_missing = isinstance(error, ModuleNotFoundError)
        remedy = '; run pip install ".[study,ray]" in a clone of sb3_uatrpo' if is_extra_missing else ""
        print(f"Error: {error}{remedy}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
