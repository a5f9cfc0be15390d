"""How an update of the actor ends, and that its log holds no more than it found."""

import io
import math

import pytest
from stable_baselines3.common.logger import HumanOutputFormat

from sb3_uatrpo import UATRPO, MatchedTRPO, diagnostics
from sb3_uatrpo.core.line_search import Evaluation, LineSearchResult
from tests.helpers import collect, logged, make_model

UNCHANGED = Evaluation(objective=0.5, kl=0.0)


def test_an_accepted_update():
    result = LineSearchResult(0.8, Evaluation(2.0, 0.04), Evaluation(1.0, 0.02))
    assert diagnostics.line_search(result, 0.02, UNCHANGED) == {
        "kl_estimated": 0.02,
        "kl_proposed": 0.04,
        "kl_ratio": 2.0,
        "policy_objective": 1.0,
        "kl_divergence_loss": 0.02,
        "step_fraction": 0.8,
        "is_line_search_success": 1.0,
    }


def test_a_line_search_that_failed():
    result = LineSearchResult(0.0, Evaluation(math.nan, math.inf), None)
    assert diagnostics.line_search(result, 0.02, UNCHANGED) == {
        "kl_estimated": 0.02,
        "policy_objective": UNCHANGED.objective,
        "kl_divergence_loss": 0.0,
        "step_fraction": 0.0,
        "is_line_search_success": 0.0,
    }


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_what_an_update_did_not_find_does_not_stay_from_an_earlier_one(cls):
    """As with a log interval of several updates: nothing is written, and so cleared, between the two."""
    model = make_model(cls, "box")
    collect(model)
    model.train()
    model.logger.record("train/of_somebody_else", 1.0)
    first = set(logged(model))
    assert {"kl_estimated", "kl_proposed", "kl_ratio", "value_loss"} <= first
    collect(model)
    model.rollout_buffer.advantages[:] = 0.1
    model.n_critic_updates = 0
    with pytest.warns(UserWarning, match="the update direction is zero"):
        model.train()
    found = logged(model)
    assert not {"kl_estimated", "kl_proposed", "kl_ratio", "value_loss"} & set(found)
    assert found["of_somebody_else"] == 1.0
    assert found["step_fraction"] == 0.0
    # the formats of Stable-Baselines3 refuse tables of different length
    written = io.StringIO()
    model.logger.output_formats = [HumanOutputFormat(written)]
    model.logger.dump()
    assert "of_somebody_else" in written.getvalue()
