"""Products made layer by layer against the general ones, which are compared with dense matrices."""

import pytest
import torch as th

from sb3_uatrpo import UATRPO
from sb3_uatrpo.actor import Actor
from sb3_uatrpo.batch import Batch
from sb3_uatrpo.core.estimates import Linearization
from sb3_uatrpo.core.layers import LayeredLinearization
from sb3_uatrpo.plain_mlp import FastPath
from tests.core.test_estimates import CASES, close, estimates_and_reference
from tests.helpers import ACTION_SPACES, collect, env_major, make_model

LAYERED = [*ACTION_SPACES, "deep", "relu", "no_hidden_layer", "dict_of_vectors"]


@pytest.mark.parametrize("name", CASES)
def test_plain_chains_are_taken_apart_and_nothing_else_is(name):
    estimates, _ = estimates_and_reference(name)
    assert isinstance(estimates._whole, LayeredLinearization) == (name in LAYERED)


@pytest.mark.parametrize("columns", [1, 2, 5])
@pytest.mark.parametrize("name", LAYERED)
def test_taken_apart_or_not_the_products_are_the_same(name, columns):
    estimates, _ = estimates_and_reference(name)
    layered = estimates._whole
    general = Linearization(layered.head, layered.params, layered.fisher_product, layered.scores)
    generator = th.Generator().manual_seed(2)
    X = th.randn(columns, estimates.n_params, generator=generator, dtype=th.float64).T
    close(layered.jvp(X), general.jvp(X).numpy())
    U = th.randn(columns, *layered.head.shape, generator=generator, dtype=th.float64)
    close(layered.vjp(U), general.vjp(U).numpy())


@pytest.mark.parametrize("frozen", ["action_net.bias", "mlp_extractor.policy_net.0.weight", "log_std", "all_layers"])
def test_frozen_parameters_of_a_plain_chain(frozen):
    model = make_model(UATRPO, "box", n_projections=8)
    collect(model)
    names = [name for name, _ in model.policy.named_parameters()]
    for name, param in model.policy.named_parameters():
        if name == frozen or (frozen == "all_layers" and name != "log_std"):
            param.requires_grad_(False)
    obs, actions, advantages = env_major(model)
    batch = Batch(obs, actions, advantages)
    actor = Actor(model.policy, FastPath())
    with actor.evaluation_mode():
        actor.find_params(obs, len(batch))
        linearization = actor.linearize(batch)
    assert isinstance(linearization, LayeredLinearization)
    assert len(names) > len(actor.params)
    general = Linearization(
        linearization.head, linearization.params, linearization.fisher_product, linearization.scores
    )
    X = th.eye(actor.n_params, dtype=th.float64)
    close(linearization.jvp(X), general.jvp(X).numpy())
    U = th.randn(3, *linearization.head.shape, generator=th.Generator().manual_seed(0), dtype=th.float64)
    close(linearization.vjp(U), general.vjp(U).numpy())
