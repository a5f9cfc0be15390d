"""Matrix-free estimates against dense matrices from loops over samples, in float64."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_uatrpo import UATRPO
from sb3_uatrpo.actor import Actor
from sb3_uatrpo.batch import Batch
from sb3_uatrpo.core import estimates as module
from sb3_uatrpo.core.estimates import SampleEstimates
from tests.helpers import ACTION_SPACES, DICT, IMAGE, SmallCNN, SmallCombined, collect, env_major, make_model
from tests.reference import (
    DoubleMultiInputPolicy,
    covariance_matrix,
    fisher_matrix,
    gradient_samples,
    policy_gradient,
    standard_error,
    take,
)

GSDE = {"use_sde": True}
VECTORS = spaces.Dict({"one": spaces.Box(-1.0, 1.0, (2,), np.float32), "other": spaces.Discrete(3)})
CASES = {
    **{name: {"action_space": name} for name in ACTION_SPACES},
    "deep": {"action_space": "box", "policy_kwargs": {"net_arch": [4, 3, 2]}},
    "relu": {"action_space": "multi_discrete", "policy_kwargs": {"net_arch": [5, 4], "activation_fn": th.nn.ReLU}},
    "no_hidden_layer": {"action_space": "box_matrix", "policy_kwargs": {"net_arch": []}},
    "dict_of_vectors": {
        "action_space": "box",
        "observation_space": VECTORS,
        "policy": DoubleMultiInputPolicy,
    },
    # parameters of an activation belong to no linear layer
    "prelu": {"action_space": "box", "policy_kwargs": {"net_arch": [4], "activation_fn": th.nn.PReLU}},
    "gsde": {"action_space": "box", **GSDE},
    "gsde_squashed": {"action_space": "box", **GSDE, "policy_kwargs": {"net_arch": [4], "squash_output": True}},
    "gsde_expln": {"action_space": "box", **GSDE, "policy_kwargs": {"net_arch": [4], "use_expln": True}},
    "gsde_one_std": {"action_space": "box", **GSDE, "policy_kwargs": {"net_arch": [4], "full_std": False}},
    "image": {
        "action_space": "discrete",
        "observation_space": IMAGE,
        "policy_kwargs": {"net_arch": [], "features_extractor_class": SmallCNN},
    },
    "separate_extractors": {
        "action_space": "box",
        "observation_space": IMAGE,
        "policy_kwargs": {"net_arch": [], "features_extractor_class": SmallCNN, "share_features_extractor": False},
    },
    "dict": {
        "action_space": "multi_discrete",
        "observation_space": DICT,
        "policy": DoubleMultiInputPolicy,
        "policy_kwargs": {"net_arch": [3], "features_extractor_class": SmallCombined},
    },
}


def estimates_and_reference(name: str, n: int = 40):
    model = make_model(UATRPO, n_projections=8, **CASES[name])
    collect(model)
    obs, actions, advantages = env_major(model)
    obs, actions, advantages = take(obs, slice(n)), actions[:n], advantages[:n]
    batch = Batch(obs, actions, advantages, returns=th.zeros_like(advantages))
    actor = Actor(model.policy)
    with actor.evaluation_mode():
        actor.find_params(obs, n)
    estimates = actor.estimates(batch)
    d = actor.n_params
    samples = gradient_samples(model.policy, obs, actions, advantages)
    assert samples.shape == (n, d)
    dense = {
        "g": policy_gradient(model.policy, obs, actions, advantages),
        "F": fisher_matrix(model.policy, obs),
        "Sigma": covariance_matrix(samples),
        "se": standard_error(samples),
        "samples": samples,
    }
    return estimates, dense


@pytest.fixture(scope="module", params=list(CASES))
def case(request):
    return estimates_and_reference(request.param)


def close(tensor: th.Tensor, expected: np.ndarray) -> None:
    scale = np.abs(expected).max()
    assert tensor.numpy() == pytest.approx(expected, rel=1e-8, abs=1e-9 * scale)


def test_gradient(case):
    estimates, dense = case
    close(estimates.gradient(), dense["g"])
    close(estimates.gradient(), dense["samples"].mean(axis=0))


def test_standard_error(case):
    estimates, dense = case
    close(estimates.standard_error(estimates.gradient()), dense["se"])


def test_products(case):
    estimates, dense = case
    d = estimates.n_params
    X = th.randn(d, 7, generator=th.Generator().manual_seed(0), dtype=th.float64)
    fisher, covariance = estimates.products(X)
    close(fisher, dense["F"] @ X.numpy())
    close(covariance, dense["Sigma"] @ X.numpy())
    close(estimates.fisher_product(X[:, 0]), dense["F"] @ X[:, 0].numpy())


def test_products_with_the_identity_are_the_matrices(case):
    estimates, dense = case
    fisher, covariance = estimates.products(th.eye(estimates.n_params, dtype=th.float64))
    close(fisher, dense["F"])
    close(covariance, dense["Sigma"])


def test_quadratic_forms(case):
    estimates, dense = case
    v = th.randn(estimates.n_params, generator=th.Generator().manual_seed(1), dtype=th.float64)
    fisher, covariance = estimates.quadratic_forms(v)
    assert fisher == pytest.approx(v.numpy() @ dense["F"] @ v.numpy())
    assert covariance == pytest.approx(v.numpy() @ dense["Sigma"] @ v.numpy())


@settings(max_examples=15, deadline=None)
@given(steps=st.integers(1, 60), product_steps=st.integers(1, 60), columns=st.integers(1, 12))
def test_chunks_do_not_matter(steps, product_steps, columns):
    """The memory bounds decide how the work is cut up, never what comes out."""
    whole, _ = CHUNK_CASE
    v = th.randn(whole.n_params, 5, generator=th.Generator().manual_seed(2), dtype=th.float64)
    limits = ("GRAPH_BYTES", "COLUMN_BYTES", "PRODUCT_STEPS", "PRODUCT_GRAPH_BYTES")
    kept = {name: getattr(module, name) for name in limits}
    uncut = whole.products(v)
    try:
        module.GRAPH_BYTES = steps * whole._bytes_per_step
        module.COLUMN_BYTES = columns * (8 * whole.n_params + product_steps * whole._bytes_per_step)
        module.PRODUCT_STEPS, module.PRODUCT_GRAPH_BYTES = product_steps, 0
        cut = SampleEstimates(whole._linearize, whole.n_steps, whole.n_params, whole._bytes_per_step)
        assert len(cut.parts) == -(-whole.n_steps // min(steps, whole.n_steps))
        for found, expected in zip(cut.products(v), uncut, strict=True):
            close(found, expected.numpy())
        close(cut.gradient(), whole.gradient().numpy())
        close(cut.head(), whole.head().numpy())
        close(cut.standard_error(cut.gradient()), whole.standard_error(whole.gradient()).numpy())
        close(cut.fisher_product(v[:, 0]), whole.fisher_product(v[:, 0]).numpy())
        assert cut.quadratic_forms(v[:, 0]) == pytest.approx(whole.quadratic_forms(v[:, 0]))
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


CHUNK_CASE = estimates_and_reference("box")


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_both_matrices_are_symmetric_and_positive_semidefinite(seed):
    estimates, _ = CHUNK_CASE
    x = th.randn(estimates.n_params, 2, generator=th.Generator().manual_seed(seed), dtype=th.float64)
    for product in estimates.products(x):
        gram = x.T @ product
        assert gram[0, 1].item() == pytest.approx(gram[1, 0].item(), rel=1e-8, abs=1e-10)
        assert gram[0, 0] >= -1e-12
    assert min(estimates.quadratic_forms(x[:, 0])) >= 0.0
