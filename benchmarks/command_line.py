"""What the command lines of all scripts share."""

import argparse


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """:return: a parser whose help is a script's docstring"""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def refuse_below(parser: argparse.ArgumentParser, options: argparse.Namespace, **least: int) -> None:
    """End with an error if an option is below its least value, such as ``n_envs=1``."""
    for name, low in least.items():
        if (value := getattr(options, name)) < low:
            parser.error(f"--{name.replace('_', '-')} must be at least {low}, but it is {value}")
