"""
Do the tests notice small errors? Mutants of the package, drawn with a fixed seed, and which of them the tests kill.

    python .ci/mutants.py draw 150 > .ci/mutants.json
    python .ci/mutants.py run .ci/mutants.json --killed killed.json --pytest "-x -q tests"

A mutant is one change of one line: another comparison, operator or constant, or a condition that is negated. It is
found again by its text, so the list outlives other changes of the file. ``run`` works on a copy of the checkout, goes
on where it was stopped, and passes ``--pytest`` on to it; a mutant is killed if pytest fails.
"""

import argparse
import ast
import json
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "sb3_uatrpo"
#: seconds after which a mutant counts as killed, since it does not end
TIMEOUT = 3600
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult
}  # fmt: skip


def mutations(node: ast.AST) -> Iterator[ast.expr]:
    """:return: what may stand in a node's place"""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.IfExp | ast.If | ast.While):
        yield ast.UnaryOp(ast.Not(), node.test)


def mutants_of(path: Path) -> Iterator[dict[str, str | int]]:
    """:return: the mutants of a file whose text is within one line, each with the old and the new line"""
    source = path.read_text("utf-8")
    lines = source.splitlines()
    annotations = {
        id(inner)
        for node in ast.walk(ast.parse(source))
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if isinstance(annotation, ast.AST)
        for inner in ast.walk(annotation)
    }
    for node in ast.walk(ast.parse(source)):
        place = node.test if isinstance(node, ast.IfExp | ast.If | ast.While) else node
        for mutation in mutations(node):
            if id(node) in annotations or not isinstance(place, ast.expr) or place.lineno != place.end_lineno:
                continue
            line = lines[place.lineno - 1].encode()
            new = line[: place.col_offset] + f"({ast.unparse(mutation)})".encode() + line[place.end_col_offset :]
            earlier = lines[: place.lineno - 1].count(line.decode())
            yield {
                "file": path.relative_to(ROOT).as_posix(), "old": line.decode(), "new": new.decode(), "earlier": earlier
            }  # fmt: skip


def is_killed(mutant: dict[str, str | int], checkout: Path, options: list[str]) -> str:
    """:return: the last line of pytest's output if it fails, empty if it passes"""
    path = checkout / str(mutant["file"])
    source = path.read_text("utf-8")
    lines = source.splitlines()
    places = [i for i, line in enumerate(lines) if line == mutant["old"]]
    if len(places) <= int(mutant["earlier"]):
        return "its line is gone"
    lines[places[int(mutant["earlier"])]] = str(mutant["new"])
    path.write_text("\n".join(lines) + "\n", "utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    try:
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return "it did not end"
    finally:
        path.write_text(source, "utf-8")
    return (
        ""
        if done.returncode == 0
        else next((x for x in done.stdout.splitlines() if x.startswith("FAILED")), "an error")
    )


def main() -> None:
    """Draw mutants, or run the tests on them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("draw").add_argument("number", type=int)
    run = commands.add_parser("run")
    run.add_argument("mutants", type=Path)
    run.add_argument("--killed", type=Path, required=True, help="JSON file of the results")
    run.add_argument("--pytest", type=shlex.split, default=["-x"], help="its options")
    options = parser.parse_args()
    if options.command == "draw":
        mutants = [mutant for path in sorted((ROOT / PACKAGE).rglob("*.py")) for mutant in mutants_of(path)]
        json.dump(random.Random(0).sample(mutants, options.number), sys.stdout, indent=1, ensure_ascii=False)
        return
    killed = json.loads(options.killed.read_text()) if options.killed.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder, "checkout")
        shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".venv*", ".git", "results"))
        # tests read results, and do not write them
        (checkout / "benchmarks" / "results").symlink_to(ROOT / "benchmarks" / "results")
        for i, mutant in enumerate(json.loads(options.mutants.read_text("utf-8"))):
            if str(i) not in killed:
                killed[str(i)] = is_killed(mutant, checkout, options.pytest)
                options.killed.write_text(json.dumps(killed, indent=1))
                print(f"{i}: {killed[str(i)] or 'lives'}", flush=True)
    print(f"{sum(map(bool, killed.values()))} of {len(killed)} are killed")


if __name__ == "__main__":
    main()
