"""
A pytest plugin that runs Stable-Baselines3's own tests with one of our classes in place of A2C.

``make conformance`` unpacks the tests of the installed version and loads this plugin. Tests that do not involve the
class are left out. Tests that it cannot pass are expected to fail, each with its reason.
"""

import os
from functools import partialmethod

import pytest
import stable_baselines3

import sb3_uatrpo

CLASS = getattr(sb3_uatrpo, os.environ["CONFORMANCE_CLASS"])
IS_UATRPO = CLASS is sb3_uatrpo.UATRPO
if N_REUSED := int(os.environ.get("CONFORMANCE_REUSED", "0")):
    # the same class with another default
    CLASS = type(CLASS.__name__, (CLASS,), {"__init__": partialmethod(CLASS.__init__, n_reused_rollouts=N_REUSED)})
stable_baselines3.A2C = CLASS

ONE_STEP = "uses n_steps=1 with one environment, which is refused: a covariance needs two samples"
TWO_ROLLOUTS = "its budget of 2,000 steps is 400 updates of A2C, and two of this class"
ONE_ROLLOUT = "its budget of 500 steps is 100 updates of A2C's critic, and less than one rollout of this class"
TWO_UPDATES = "its budget of 1,200 steps is 240 updates of A2C, and two of this class, which end at 87 of 100, not 90"
ROUNDING = (
    "products are layer by layer for Box observations and general for Dict: actions differ by 1e-4 of their size after "
    "two updates, and may differ by 1e-5"
)
NAME = "expects a log folder called A2C; ours has the name of the class"
EXPECTED_FAILURES = {
    "test_callbacks_can_cancel_runs": ONE_STEP,
    "test_continuous": TWO_ROLLOUTS,
    "test_infinite_horizon[True": ONE_ROLLOUT,
    "test_tensorboard": NAME,
}
if IS_UATRPO:
    EXPECTED_FAILURES |= {"test_consistency[": ROUNDING} | ({} if N_REUSED else {"test_discrete[env2-": TWO_UPDATES})
#: Tests of A2C that are not parametrised with the class
BY_NAME = {"test_a2c[CartPole-v1]", "test_a2c[Pendulum-v1]", "test_tensorboard[a2c]"}


def pytest_collection_modifyitems(config, items):
    def involves_class(item):
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        return any(value is CLASS for value in parameters.values()) or item.name in BY_NAME

    config.hook.pytest_deselected(items=[item for item in items if not involves_class(item)])
    items[:] = [item for item in items if involves_class(item)]
    for item in items:
        for name, reason in EXPECTED_FAILURES.items():
            if item.name.startswith(name):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
