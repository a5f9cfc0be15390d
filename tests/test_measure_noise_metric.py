"""How close Σ is to F on the committed agents."""

import measure_noise_metric as module
import pytest
import torch as th

from sb3_uatrpo import RECOMMENDED
from sb3_uatrpo.core.subspace import subspace_direction


@pytest.mark.filterwarnings("ignore:.*out of date.*:DeprecationWarning")
def test_only_what_varies_turns_the_direction(monkeypatch):
    monkeypatch.setattr(module, "ROLLOUTS_TO_FILL_THE_SKETCH", 1)
    monkeypatch.setattr(module, "REFERENCE_STEPS", 200)
    found = module.measure("uatrpo/Hopper-v4", 100, 2, 2)
    assert 0.2 < found["traces"] < 5
    assert found["own"] > 0 < found["fresh"]
    assert min(found["angle"], found["other"]) > 1
    # with one random matrix, one subsample and no term anywhere, all directions are one
    monkeypatch.setattr(module, "VARIANTS", [(0, {"uncertainty_coef": 0.0})] * 3)
    same = module.measure("uatrpo/Hopper-v4", 100, 2, 2)
    assert same["c·R_n²"] == 0
    assert max(same["angle"], same["other"]) < 0.1


def test_a_sigma_proportional_to_f_does_not_change_the_direction_of_the_preset():
    """And the length comes from F̂ alone."""
    assert RECOMMENDED["target_kl"]
    root, gradient = th.randn(30, 12, dtype=th.float64), th.randn(30, dtype=th.float64)
    fisher, omega = root @ root.T, th.randn(30, 8, dtype=th.float64)
    plain, with_term = (
        subspace_direction(weight * fisher @ omega, omega, gradient, "least_squares", RECOMMENDED["shrinkage"]).vector
        for weight in (1.0, 4.6)
    )
    th.testing.assert_close(4.6 * with_term, plain)
