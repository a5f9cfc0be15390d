"""
Save the runs of a study as the four tables that are committed.

    python benchmarks/save_tables.py runs/small_batches benchmarks/results/small_batches
    python benchmarks/save_tables.py runs/search benchmarks/results/search --also explained_variance

Of what an update logs, it keeps what a page or a report here shows, at four significant digits; KL ratios keep the six
that a study has, since reports count those from 2 on.
"""

from dataclasses import replace
from pathlib import Path

from command_line import parser_of

from sb3_uatrpo.study import Study, StudyError, read_study

# As they are logged under train/
ROUNDED = ["kl_proposed", "kl_divergence_loss", "step_fraction", "uncertainty_share", "radius_squared", "std"]
DIGITS = 4


def shortened(study: Study, further: list[str]) -> Study:
    """:return: the study with the columns of its updates that are kept and these further ones, as text of few digits"""
    updates = study.updates.filter(["run", "step", "kl_ratio", *ROUNDED, *further])
    for name in updates.columns.intersection([*ROUNDED, *further]):
        updates[name] = updates[name].map(f"{{:.{DIGITS}g}}".format, na_action="ignore")
    return replace(study, updates=updates)


def main(args: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="the study, all of whose runs can be read")
    parser.add_argument("output", type=Path, help="the folder of the tables; it may be the same")
    parser.add_argument("--also", nargs="+", default=[], help="further columns of the updates to keep")
    options = parser.parse_args(args)
    try:
        study = read_study(options.folder)
    except StudyError as error:
        parser.error(str(error))
    if study.left_out:
        parser.error("; ".join(f"{path} cannot be read: {reason}" for path, reason in study.left_out))
    shortened(study, options.also).save(options.output)
    print(f"{len(study.runs)} runs, {len(study.episodes):,} episodes, {len(study.updates):,} updates: {options.output}")


if __name__ == "__main__":
    main()
