"""Products made layer by layer against the general ones, which are compared with dense matrices."""

import pytest
import torch as th

from sb3_uatrpo.actor import Actor
from sb3_uatrpo.batch import Batch
from sb3_uatrpo.core import layers
from sb3_uatrpo.core.estimates import Linearization
from sb3_uatrpo.core.layers import LayeredLinearization
from tests.core.test_estimates import LAYERED, close
from tests.helpers import POLICIES, collect, env_major, make_model, take_apart


def both(model) -> tuple[Linearization, Linearization]:
    """The linearisation of one rollout, layer by layer and in general."""
    if model._last_obs is None:
        collect(model)
    obs, actions, advantages = env_major(model)
    batch = Batch(obs, actions, advantages, advantages)
    found = []
    for layered in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if layered:
                take_apart(patch)
            actor = Actor(model.policy)
            with actor.update_mode():
                actor.find_params(batch)
                found.append(actor.linearize(batch))
    assert [type(each) for each in found] == [LayeredLinearization, Linearization]
    assert list(map(id, found[0].params)) == list(map(id, found[1].params))
    return found[0], found[1]


def check_products(layered: Linearization, general: Linearization, columns: int) -> None:
    generator = th.Generator().manual_seed(2)
    d = sum(param.numel() for param in general.params)
    X = th.randn(columns, d, generator=generator, dtype=th.float64).T
    n, k = general.head.shape
    P, Q = layered.jvp(X), general.jvp(X)
    # of logits, up to a constant for each step, which no product depends on
    close(layered.fisher_product(P), general.fisher_product(Q).numpy())
    close((layered.scores * P).sum(dim=-1), (general.scores * Q).sum(dim=-1).numpy())
    U = general.fisher_product(th.randn(columns, n, k, generator=generator, dtype=th.float64))
    close(layered.vjp(U), general.vjp(U).numpy())
    weights = th.randn(columns, n, generator=generator, dtype=th.float64)
    close(layered.weighted_samples(weights), general.weighted_samples(weights).numpy())
    close(layered.samples(), general.samples().numpy())


@pytest.mark.parametrize("columns", [1, 2, 5])
@pytest.mark.parametrize("name", LAYERED)
def test_taken_apart_or_not_the_products_are_the_same(name, columns):
    check_products(*both(make_model(**POLICIES[name])), columns)


def test_per_sample_gradients_too_large_to_store(monkeypatch):
    monkeypatch.setattr(layers, "COLUMN_BYTES", 0)
    check_products(*both(make_model()), 3)


@pytest.mark.parametrize("frozen", ["action_net.bias", "mlp_extractor.policy_net.0.weight", "log_std", "all_layers"])
def test_frozen_parameters_of_a_chain(frozen):
    model = collect(make_model())
    for name, param in model.policy.named_parameters():
        if name == frozen or (frozen == "all_layers" and name != "log_std"):
            param.requires_grad_(False)
    layered, general = both(model)
    assert len(list(model.policy.parameters())) > len(layered.params)
    for columns in (1, 3):
        check_products(layered, general, columns)
