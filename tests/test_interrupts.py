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
from sb3_uatrpo import UATRPO, MatchedTRPO
from tests.helpers import actor_vector, collect, make_model

PACKAGE = sb3_uatrpo.__file__.removesuffix("__init__.py")


def traced(run, interrupt_at: tuple[str, int] | None = None) -> list[tuple[str, int]]:
    """The files and numbers of this package's lines that a function runs; it is interrupted before the given one."""
    lines = []

    def line(frame, event, arg):
        if event == "line":
            lines.append((frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_lineno))
            if lines[-1] == interrupt_at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return line

    def call(frame, event, arg):
        return line if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    # nothing on the way may catch it
    arrives = nullcontext() if interrupt_at is None else pytest.raises(KeyboardInterrupt)
    with arrives:
        sys.settrace(call)
        try:
            run()
        finally:
            sys.settrace(before)
    return lines


@cache
def clean_up(file: str) -> set[int]:
    """Lines of ``finally`` clauses, which nothing can protect from an interrupt."""
    tree = ast.parse(Path(PACKAGE, file).read_text(encoding="utf-8"))
    return {
        inner.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        for statement in node.finalbody
        for inner in ast.walk(statement)
        if hasattr(inner, "lineno")
    }


def hooked(cls):
    """A model with a rollout, and the numbers of calls of a hook."""
    kwargs = {"n_projections": 4} if cls is UATRPO else {}
    model = make_model(cls, "box", n_steps=8, batch_size=4, n_critic_updates=1, **kwargs)
    calls = []
    model.policy.action_net.weight.register_hook(lambda gradient: calls.append(1))
    collect(model)
    th.manual_seed(0)
    np.random.seed(0)
    return model, calls


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_an_interrupted_update_leaves_the_model_whole(cls):
    model, _ = hooked(cls)
    before, distribution = actor_vector(model), type(model.policy.action_dist)
    lines = traced(model.train)
    after = actor_vector(model)
    assert not np.array_equal(before, after)

    # all lines where state changes hands, and some of the others
    lines = sorted({line for line in lines if line[1] not in clean_up(line[0])})
    chosen = {line for line in lines if line[0] in ("core/sketch.py", "plain.py", "actor.py")}
    others = np.random.default_rng(0).choice(len(lines), size=30, replace=False)
    for at in sorted({*chosen, *(lines[i] for i in others)}):
        model, calls = hooked(cls)
        traced(model.train, interrupt_at=at)
        # a tracer, unlike a signal, can interrupt a with statement between its body and its end
        th.set_grad_enabled(True)
        found = actor_vector(model)
        assert np.array_equal(found, before) or np.array_equal(found, after), at
        assert type(model.policy.action_dist) is distribution, at
        file = io.BytesIO()
        model.save(file)
        file.seek(0)
        assert np.array_equal(actor_vector(cls.load(file)), found), at
        calls.clear()
        collect(model)
        model.train()
        assert calls, at
        assert not np.array_equal(actor_vector(model), found), at


def test_an_interrupted_rollout_ends_with_the_interrupt_and_can_be_repeated():
    def fresh():
        model = make_model(UATRPO, "box", n_envs=2, n_steps=4, batch_size=8, n_projections=4, double=False)
        callback = model._setup_learn(8)[1]
        callback.on_training_start({}, {})
        return model, lambda: model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)

    lines = sorted({line for line in traced(fresh()[1]) if line[1] not in clean_up(line[0])})
    # the lines of a rollout, and some of those that they call
    chosen = {line for line in lines if line[0] in ("policies.py", "buffers.py", "plain.py", "plain_mlp.py")}
    assert {name for name, *_ in chosen} == {"policies.py", "buffers.py", "plain.py", "plain_mlp.py"}
    others = np.random.default_rng(0).choice(len(lines), size=30, replace=False)
    for at in sorted({*chosen, *(lines[i] for i in others)}):
        model, rollout = fresh()
        # raises no other error than the interrupt
        traced(rollout, interrupt_at=at)
        th.set_grad_enabled(True)
        assert rollout(), at
        assert model.rollout_buffer.full, at
        assert model.rollout_buffer.log_probs.all(), at
