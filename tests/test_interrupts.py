"""An interrupt may come between any two lines of an update. Whoever catches it can save the model and go on."""

import ast
import io
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch as th

import sb3_uatrpo
from tests.helpers import BOTH, actor_vector, collect, small, update

PACKAGE = sb3_uatrpo.__file__.removesuffix("__init__.py")


def traced(run, interrupt_at: tuple[str, int] | None = None) -> set[tuple[str, int]]:
    """The files and numbers of this package's lines that a function runs; it is interrupted before the given one."""
    lines = set()

    def line(frame, event, arg):
        if event == "line":
            at = frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_lineno
            lines.add(at)
            if at == interrupt_at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return line

    def call(frame, event, arg):
        return line if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    # nothing on the way may catch it
    with nullcontext() if interrupt_at is None else pytest.raises(KeyboardInterrupt):
        sys.settrace(call)
        try:
            run()
        finally:
            sys.settrace(before)
            # a tracer, unlike a signal, can interrupt a with statement between its body and its end
            th.set_grad_enabled(True)
    return lines


@cache
def clean_up(file: str) -> set[int]:
    """Lines of ``finally`` clauses, which nothing can protect from an interrupt."""
    tries = (node for node in ast.walk(ast.parse(Path(PACKAGE, file).read_text("utf-8"))) if isinstance(node, ast.Try))
    inner = (node for part in tries for statement in part.finalbody for node in ast.walk(statement))
    return {node.lineno for node in inner if hasattr(node, "lineno")}


def lines_of(run, *files: str) -> list[tuple[str, int]]:
    """The lines of these files, all of which a function runs into."""
    lines = {(file, number) for file, number in traced(run) if file in files and number not in clean_up(file)}
    assert {file for file, _ in lines} == set(files)
    return sorted(lines)


@BOTH
def test_an_interrupted_update_leaves_the_model_whole(cls):
    def hooked():
        model = small(cls, double=True, n_steps=8, batch_size=4, n_critic_updates=1)
        calls = []
        model.policy.action_net.weight.register_hook(lambda gradient: calls.append(1))
        collect(model)
        th.manual_seed(0)
        np.random.seed(0)
        return model, calls

    model, _ = hooked()
    before, distribution = actor_vector(model), type(model.policy.action_dist)
    # where state changes hands
    files = ["plain.py", "actor.py", "trust_region_algorithm.py"]
    lines = lines_of(model.train, *files, *(["core/sketch.py"] if hasattr(model, "sketch") else []))
    after = actor_vector(model)
    assert not np.array_equal(before, after)
    for at in lines:
        model, calls = hooked()
        traced(model.train, interrupt_at=at)
        found = actor_vector(model)
        assert np.array_equal(found, before) or np.array_equal(found, after), at
        assert type(model.policy.action_dist) is distribution, at
        file = io.BytesIO()
        model.save(file)
        file.seek(0)
        assert np.array_equal(actor_vector(cls.load(file)), found), at
        calls.clear()
        update(model)
        assert calls, at
        assert not np.array_equal(actor_vector(model), found), at


def test_an_interrupted_rollout_ends_with_the_interrupt_and_can_be_repeated():
    def fresh():
        model = small(n_envs=2, n_steps=4, batch_size=8)
        return model, lambda: collect(model)

    for at in lines_of(fresh()[1], "policies.py", "buffers.py", "plain.py", "plain_mlp.py"):
        model, rollout = fresh()
        # raises no other error than the interrupt
        traced(rollout, interrupt_at=at)
        rollout()
        assert model.rollout_buffer.full, at
        assert model.rollout_buffer.log_probs.all(), at
