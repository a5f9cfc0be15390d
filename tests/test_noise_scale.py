"""How noisy is ĝ? On Gaussian gradients, where the answer is known, and over an agent's life."""

import math

import numpy as np
import pytest
import torch as th

from sb3_uatrpo import UATRPO
from sb3_uatrpo.core.estimates import GRAPH_BYTES, Linearization, SampleEstimates
from sb3_uatrpo.core.subspace import subspace_direction
from tests.core.test_estimates import close, estimates_and_reference
from tests.reference import noise_vector, projected_direction


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize(("n", "in_one_part"), [(40, 40), (39, 39), (39, 3)])
def test_the_noise_vector_is_the_references(layered, n, in_one_part):
    estimates, dense = estimates_and_reference("box", layered=layered)
    size = GRAPH_BYTES // in_one_part
    cut = SampleEstimates(estimates._linearize, n, estimates.n_params, size, th.device("cpu"))
    assert cut.parts[0] == slice(0, in_one_part)
    close(cut.noise(), noise_vector(dense["samples"][:n]))


@pytest.mark.parametrize("shrinkage", [0.0, 0.5])
@pytest.mark.parametrize("m", [6, 12])
def test_signal_and_noise_are_unbiased(m, shrinkage):
    """n = 31 Gaussian gradients of mean g and covariance Σ: the true values are g'v(g) and tr(U·Σ)/n with Ux = v(x)."""
    d, n, n_draws = 12, 31, 2000
    rng = np.random.default_rng(m)
    M, root, g = np.diag(np.logspace(0, -2, d)), rng.normal(size=(d, d)) / 4, rng.normal(size=d) / 6
    omega = np.eye(d) if m == d else rng.normal(size=(d, m))
    U = np.stack([projected_direction(M @ omega, omega, x, shrinkage=shrinkage)[0] for x in np.eye(d)])
    theta = th.zeros(d, dtype=th.float64, requires_grad=True)
    found = []
    for _ in range(n_draws):
        scores = th.as_tensor(g + rng.normal(size=(n, d)) @ root.T)
        samples = SampleEstimates(
            lambda part, s=scores: Linearization(theta.expand(len(s[part]), d) * 1.0, (theta,), lambda P: P, s[part]),
            n, d, 1, th.device("cpu"),
        )  # fmt: skip
        gradient = samples.gradient()
        direction = subspace_direction(
            *map(th.as_tensor, (M @ omega, omega)), gradient, shrinkage=shrinkage, noise=samples.noise()
        )
        total = gradient.dot(direction.vector).item()
        found.append((total - direction.noise_form, direction.noise_form))
    mean, error = np.mean(found, axis=0), np.std(found, axis=0) / np.sqrt(n_draws)
    expected = np.array([g @ U @ g, np.trace(U @ root @ root.T) / n])
    assert np.all(error < 0.1 * expected)
    assert np.all(np.abs(mean - expected) < 4 * error)


def test_the_averages_outlive_a_file_and_refuse_what_is_not_finite(tmp_path):
    model = UATRPO("MlpPolicy", "Pendulum-v1", n_steps=200, n_projections=20, seed=0).learn(600)
    assert "train/gradient_snr" in model.logger.name_to_value
    model.save(tmp_path / "model")
    loaded = UATRPO.load(tmp_path / "model")
    averages = (model._signal, model._noise)
    assert (loaded._signal, loaded._noise) == averages
    for total, noise in ((math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (0.0, 0.0)):
        assert loaded._noise_scale(total, noise, 200) == {}
    assert (loaded._signal, loaded._noise) == averages
    loaded._signal, loaded._noise = 0.0, 0.0
    assert loaded._noise_scale(1.0, 2.0, 200) == {"gradient_snr": pytest.approx(-0.5)}
    loaded._signal, loaded._noise = 0.0, 0.0
    assert loaded._noise_scale(3.0, 1.0, 200) == pytest.approx({"gradient_snr": 2.0, "noise_scale": 100.0})
