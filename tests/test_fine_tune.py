"""``examples/fine_tune.py``: cloning, the warm-up of the critic, and what it prints of its runs."""

import numpy as np
import pytest
import torch as th
from fine_tune import clone, demonstrations, evaluate, frozen_actor, main, make_env, summary

from sb3_uatrpo import UATRPO

loads_agent = pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="NumPy 2 saved this agent")


@loads_agent
def test_a_clone_is_better_and_stays_while_the_critic_learns():
    observations, actions, statistics = demonstrations(n_episodes=1, seed=0)
    env, eval_env = make_env(seed=0, like=statistics), make_env(4, like=statistics)
    model = UATRPO("MlpPolicy", env, seed=0, device="cpu")
    untrained = evaluate(model, eval_env)
    losses = clone(model.policy, observations, actions, n_epochs=20)
    # the noise becomes smaller, too
    assert losses[-1] < losses[0] - 1.0
    cloned = evaluate(model, eval_env)
    assert cloned > 2 * untrained > 0.0

    before = {name: param.clone() for name, param in model.policy.named_parameters()}
    with frozen_actor(model.policy):
        model.learn(2000)
    changed = {name for name, param in model.policy.named_parameters() if not th.equal(param, before[name])}
    assert changed == {name for name in before if "value_net" in name}
    assert evaluate(model, eval_env) == cloned
    model.learn(1000)
    assert evaluate(model, eval_env) != cloned


@loads_agent
def test_the_script_fine_tunes(capsys):
    ((curve,),) = main(["--n-timesteps", "14000", "--n-epochs", "1"]).values()
    # the clone after the warm-up, and two updates
    assert [timesteps for timesteps, _ in curve] == [10_000, 14_000]
    assert f"UATRPO, warm-up: {curve[0][1]:.0f} {curve[1][1]:.0f}\n" in capsys.readouterr().out


def test_the_summary():
    falls = [(0, 10.0), (4, 5.0), (8, 20.0), (12, 10.0), (16, 11.0), (20, 12.0), (24, 13.0)]
    assert summary([falls]).split() == ["50", "50", "16", "[1]", "132"]
    # a run that ends at the clone's return has not passed it
    assert summary([falls, falls[:4], falls[:2]]).split() == ["50", "50", "–", "[1]", "117"]
