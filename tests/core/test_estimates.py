"""Matrix-free estimates against dense matrices from loops over samples, in float64."""

from functools import cache

import numpy as np
import pytest
import torch as th
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.function import once_differentiable

from sb3_uatrpo import UATRPO
from sb3_uatrpo.actor import Actor
from sb3_uatrpo.batch import Batch
from sb3_uatrpo.core import estimates as module
from sb3_uatrpo.core import layers
from sb3_uatrpo.core.estimates import Linearization, SampleEstimates
from sb3_uatrpo.core.layers import LayeredLinearization
from tests.helpers import (
    PLAIN,
    POLICIES,
    actor_vector,
    collect,
    count_calls,
    env_major,
    extractor,
    make_model,
    small,
    take_apart,
    with_extractor,
)
from tests.reference import (
    covariance_matrix,
    fisher_matrix,
    gradient_samples,
    policy_gradient,
    standard_error,
    take,
)

#: layer by layer, observations in float64 are not rounded to float32 first
LAYERED = [name for name in PLAIN if name != "matrices"]


def estimates_and_reference(name: str, layered: bool = False, n: int = 40):
    model = collect(make_model(**POLICIES[name]))
    obs, actions, advantages = env_major(model)
    obs, actions, advantages = take(obs, slice(n)), actions[:n], advantages[:n]
    batch = Batch(obs, actions, advantages, advantages)
    with pytest.MonkeyPatch.context() as patch:
        if layered:
            take_apart(patch)
        actor = Actor(model.policy)
    with actor.update_mode():
        actor.find_params(batch)
    estimates = actor.estimates(batch)
    assert isinstance(estimates._whole, LayeredLinearization) == layered
    samples = gradient_samples(model.policy, obs, actions, advantages)
    assert samples.shape == (n, actor.n_params)
    dense = {
        "g": policy_gradient(model.policy, obs, actions, advantages),
        "F": fisher_matrix(model.policy, obs),
        "Sigma": covariance_matrix(samples),
        "se": standard_error(samples),
        "samples": samples,
    }
    return estimates, dense


@pytest.fixture(scope="module", params=[*POLICIES, *(f"{name}, layered" for name in LAYERED)])
def case(request):
    name, _, layered = request.param.partition(", ")
    return estimates_and_reference(name, bool(layered))


def close(tensor: th.Tensor, expected: np.ndarray) -> None:
    scale = np.abs(expected).max()
    assert tensor.numpy() == pytest.approx(expected, rel=1e-8, abs=1e-9 * scale)


def test_gradient(case):
    estimates, dense = case
    close(estimates.gradient(), dense["g"])
    close(estimates.gradient(), dense["samples"].mean(axis=0))


def test_standard_error(case):
    estimates, dense = case
    close(estimates.standard_error(), dense["se"])


def test_products(case):
    estimates, dense = case
    d = estimates.n_params
    # products with the identity are the matrices themselves
    for X in (th.randn(d, 7, generator=th.Generator().manual_seed(0), dtype=th.float64), th.eye(d, dtype=th.float64)):
        fisher, covariance = estimates.products(X)
        close(fisher, dense["F"] @ X.numpy())
        close(covariance, dense["Sigma"] @ X.numpy())
        close(estimates.fisher_product(X[:, 0]), dense["F"] @ X[:, 0].numpy())


def test_quadratic_forms(case):
    estimates, dense = case
    v = th.randn(estimates.n_params, generator=th.Generator().manual_seed(1), dtype=th.float64)
    fisher, covariance = estimates.quadratic_forms(v)
    assert fisher == pytest.approx(v.numpy() @ dense["F"] @ v.numpy())
    assert covariance == pytest.approx(v.numpy() @ dense["Sigma"] @ v.numpy())


@cache
def box_case(layered: bool = False) -> SampleEstimates:
    return estimates_and_reference("box", layered)[0]


@pytest.mark.parametrize("layered", [False, True])
@settings(max_examples=15)
@given(steps=st.integers(1, 60), product_steps=st.integers(1, 60), columns=st.integers(1, 12))
def test_chunks_do_not_matter(layered, steps, product_steps, columns):
    """The memory bounds decide how the work is cut up, never what comes out."""
    whole = box_case(layered)
    v = th.randn(whole.n_params, 5, generator=th.Generator().manual_seed(2), dtype=th.float64)
    limits = ("GRAPH_BYTES", "COLUMN_BYTES", "PRODUCT_TIMESTEPS", "PRODUCT_GRAPH_BYTES")
    kept = {name: getattr(module, name) for name in limits}
    uncut = whole.products(v)
    try:
        module.GRAPH_BYTES = steps * whole._bytes_per_timestep
        module.COLUMN_BYTES = columns * (8 * whole.n_params + product_steps * whole._bytes_per_timestep)
        module.PRODUCT_TIMESTEPS, module.PRODUCT_GRAPH_BYTES = product_steps, 0
        layers.COLUMN_BYTES = module.COLUMN_BYTES
        cut = SampleEstimates(
            whole._linearize, whole.n_timesteps, whole.n_params, whole._bytes_per_timestep, th.device("cpu")
        )
        assert len(cut.parts) == -(-whole.n_timesteps // min(steps, whole.n_timesteps))
        assert isinstance(cut._linearize(cut.parts[-1]), LayeredLinearization) == layered
        for found, expected in zip(cut.products(v), uncut, strict=True):
            close(found, expected.numpy())
        close(cut.gradient(), whole.gradient().numpy())
        close(cut.head(), whole.head().numpy())
        close(cut.standard_error(), whole.standard_error().numpy())
        close(cut.fisher_product(v[:, 0]), whole.fisher_product(v[:, 0]).numpy())
        assert cut.quadratic_forms(v[:, 0]) == pytest.approx(whole.quadratic_forms(v[:, 0]))
    finally:
        for name, value in kept.items():
            setattr(module, name, value)
        layers.COLUMN_BYTES = kept["COLUMN_BYTES"]


def test_a_gpu_processes_more_at_once():
    parts = {kind: module.parts_of(1000, module.GRAPH_BYTES // 10, th.device(kind)) for kind in ("cpu", "cuda")}
    assert parts["cpu"] == [slice(start, start + 10) for start in range(0, 1000, 10)]
    assert parts["cuda"] == [slice(start, min(start + 320, 1000)) for start in range(0, 1000, 320)]
    whole = box_case()
    X = th.ones(whole.n_params, 3, dtype=th.float64)
    on_gpu = SampleEstimates(whole._linearize, whole.n_timesteps, whole.n_params, module.GRAPH_BYTES, th.device("cuda"))
    assert len(on_gpu.parts) == -(-whole.n_timesteps // 32)
    for found, expected in zip(on_gpu.products(X), whole.products(X), strict=True):
        close(found, expected.numpy())


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("action_space", ["box", "discrete"])
def test_single_precision_rounds_the_dense_reference(action_space, layered):
    """Users' policies have float32, and policies that are standard take their products layer by layer."""
    model = collect(small(UATRPO, action_space))
    if not layered:
        model.policy.action_net.register_forward_hook(lambda *args: None)
    obs, actions, advantages = env_major(model)
    actor, batch = Actor(model.policy), Batch(obs, actions, advantages.float(), advantages)
    with actor.update_mode():
        actor.find_params(batch)
        estimates = actor.estimates(batch)
        assert isinstance(estimates._whole, LayeredLinearization) == layered
        X = th.randn(estimates.n_params, 7, generator=th.Generator().manual_seed(0))
        found = [estimates.gradient(), estimates.standard_error(), *estimates.products(X)]
        found.append(estimates.fisher_product(X[:, 0]))
        forms = estimates.quadratic_forms(X[:, 0])

    exact = make_model(UATRPO, action_space).policy
    exact.load_state_dict(model.policy.state_dict())
    samples = gradient_samples(exact, obs, actions, advantages)
    F, S, X = fisher_matrix(exact, obs), covariance_matrix(samples), X.double().numpy()
    expected = [samples.mean(axis=0), standard_error(samples), F @ X, S @ X, F @ X[:, 0]]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == th.float32
        assert np.linalg.norm(ours.numpy() - theirs) <= 1e-5 * np.linalg.norm(theirs)
    assert forms == pytest.approx((X[:, 0] @ F @ X[:, 0], X[:, 0] @ S @ X[:, 0]), rel=1e-5)


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_both_matrices_are_symmetric_and_positive_semidefinite(seed):
    estimates = box_case()
    x = th.randn(estimates.n_params, 2, generator=th.Generator().manual_seed(seed), dtype=th.float64)
    for product in estimates.products(x):
        gram = x.T @ product
        assert gram[0, 1].item() == pytest.approx(gram[1, 0].item(), rel=1e-8, abs=1e-10)
        assert gram[0, 0] >= -1e-12
    assert min(estimates.quadratic_forms(x[:, 0])) >= 0.0


class Doubled(th.autograd.Function):
    """2x. Its backward pass looks at the cotangent, and takes a shortcut where that is zero."""

    @staticmethod
    def forward(ctx, x):
        return 2.0 * x

    @staticmethod
    def backward(ctx, cotangent):
        return 2.0 * cotangent if cotangent.any() else th.zeros_like(cotangent)


def mixing(matrix):
    """Ends with a constant matrix, such as the adjacency of a graph."""

    def forward(self, observations):
        return (matrix @ self.linear(observations).tanh().T).T

    return extractor(4, lambda n: {"linear": nn.Linear(n, 4)}, forward)


def twice(by):
    """Ends with a product with two, by an operation of the user's."""
    return extractor(3, lambda n: {"linear": nn.Linear(n, n)}, lambda self, x: by(self.linear(x)))


BAND = th.eye(4) + th.diag(0.5 * th.ones(3), 1)


@pytest.mark.parametrize(
    ("single", "batched"),
    [(mixing(BAND.to_sparse()), mixing(BAND)), (twice(Doubled.apply), twice(lambda x: 2.0 * x))],
    ids=["sparse", "looks at numbers"],
)
def test_what_takes_one_cotangent_at_a_time_takes_longer_and_no_more(single, batched):
    with pytest.warns(UserWarning, match="one cotangent at a time"):
        model = small(**with_extractor(single)).learn(2 * 48)
    other = small(**with_extractor(batched)).learn(2 * 48)
    np.testing.assert_allclose(actor_vector(model), actor_vector(other), rtol=1e-3, atol=1e-4)


def test_cotangents_are_taken_together(monkeypatch):
    """One call of autograd for all of them, unless torch searches for NaN."""
    x = th.randn(3, requires_grad=True)
    calls = count_calls(monkeypatch, th.autograd, "grad")
    (together,) = module.batched_grad([x.tanh()], [x], [th.eye(3)])
    assert len(calls) == 1
    with pytest.warns(UserWarning, match="Anomaly Detection"), th.autograd.detect_anomaly():
        (single,) = module.batched_grad([x.tanh()], [x], [th.eye(3)])
    assert len(calls) == 4
    th.testing.assert_close(single, together)


@pytest.mark.filterwarnings("ignore:A part of the policy can be differentiated along one cotangent")
def test_products_with_j_and_its_transpose_agree_where_the_backward_pass_has_a_shortcut():
    generator = th.Generator().manual_seed(0)
    x, weight = (th.randn(*shape, generator=generator, dtype=th.float64) for shape in ((5, 3), (3, 2)))
    weight.requires_grad_()
    head = Doubled.apply(x @ weight).tanh()
    linearization = module.Linearization(head, (weight,), lambda p: p, th.ones_like(head))
    jacobian = linearization.vjp(th.eye(head.numel(), dtype=th.float64).view(-1, *head.shape)).T
    products = linearization.jvp(th.eye(weight.numel(), dtype=th.float64))
    th.testing.assert_close(products.flatten(1).T, jacobian)
    assert jacobian.any()


class Cubed(th.autograd.Function):
    """Its derivative is right, and cannot be differentiated."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3.0 * x**2 * gradient


@pytest.mark.parametrize(("cube", "missed"), [(lambda x: x**3, []), (Cubed.apply, [0])])
def test_parameters_that_jx_misses_are_found(cube, missed):
    generator = th.Generator().manual_seed(0)
    inputs, w, b = (th.randn(*shape, generator=generator).double() for shape in ((5, 4), (4, 3), (3,)))
    w, b = w.requires_grad_(), b.requires_grad_()
    head = cube(inputs @ w) + b
    linearization = Linearization(head, (w, b), lambda P: P, th.zeros_like(head))
    assert linearization.missed_params() == missed
    # a parameter that these steps do not use is not missed
    unused = th.zeros(2, dtype=th.float64, requires_grad=True)
    assert Linearization(head, (w, b, unused), lambda P: P, th.zeros_like(head)).missed_params() == missed
