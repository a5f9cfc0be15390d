"""
What users add to a policy, a buffer or an optimizer takes part in updates, or is refused before anything changes.
"""

import threading
import warnings
from functools import partial

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.distributions import DiagGaussianDistribution
from stable_baselines3.common.policies import ActorCriticPolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, MlpExtractor
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

from sb3_uatrpo import UATRPO, MatchedTRPO, MlpPolicy
from tests.helpers import (
    BOTH,
    IMAGE,
    POLICIES,
    At,
    Endless,
    NoiseEnv,
    SmallCNN,
    actor_vector,
    assert_same_update,
    collect,
    direction_and_gradient,
    extractor,
    logged,
    model_on,
    small,
    state_of,
    unchanged,
    with_extractor,
    with_kwargs,
)
from tests.reference import DoublePolicy, flat
from tests.test_update import check_updates
from tests.test_user_rollouts import AT_NEXT

# -------------------------------------------------------------------------------------------------------- policies


class Sine(th.autograd.Function):
    """Its backward pass records no gradients, so it has no derivative of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with th.no_grad():
            return x.cos() * gradient


def experts(limit):
    """The last number of the observation chooses one of two networks; few steps choose the second."""

    def forward(self, x):
        rare = x[:, 2] > limit
        features = x.new_zeros(len(x), 4)
        for expert, chosen in ((self.usual, ~rare), (self.rare, rare)):
            if chosen.any():
                features = features.index_put((chosen,), expert(x[chosen]).tanh())
        return features

    return extractor(4, lambda n: {"usual": nn.Linear(n, 4), "rare": nn.Linear(n, 4)}, forward)


def attention(self, x):
    """Of the first number to those that are positive: sometimes to none."""
    tokens = self.embed(x[:, :, None])
    return self.attention(tokens[:, :1], tokens, tokens, key_padding_mask=x < 0, need_weights=False)[0].squeeze(1)


def softmax(self, x):
    """The bias of the keys cancels."""
    tokens = x[:, :, None]
    weights = (self.q(tokens) @ self.k(tokens).transpose(1, 2)).softmax(dim=-1)
    return (weights @ self.v(tokens)).mean(dim=1)


def checkpointed(self, x, use_reentrant):
    return checkpoint(self.linear, x.requires_grad_(), use_reentrant=use_reentrant)


def linear(n):
    return {"linear": nn.Linear(n, 4)}


def norms(n):
    parts = nn.Linear(n, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.LayerNorm(8), nn.Dropout(0.5)
    return {"net": nn.Sequential(*parts)}


def encoder(n):
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    return {"embed": nn.Linear(1, 8), "encoder": nn.TransformerEncoder(layer, 1)}


EXTRACTORS = {
    "norms and dropout": extractor(8, norms, lambda self, x: self.net(x)),
    "recurrent": extractor(
        8, lambda n: {"gru": nn.GRU(1, 8, batch_first=True)}, lambda self, x: self.gru(x[..., None])[0][:, -1]
    ),
    "transformer": extractor(8, encoder, lambda self, x: self.encoder(self.embed(x[..., None])).mean(dim=1)),
    "attention": extractor(
        3, lambda n: {"embed": nn.Linear(1, 3), "attention": nn.MultiheadAttention(3, 1, batch_first=True)}, attention
    ),
    "experts": experts(0.5),
    # the gradient of an energy, as in physics-informed networks
    "derivatives": extractor(
        3,
        lambda n: {"energy": nn.Sequential(nn.Linear(n, 4), nn.Tanh(), nn.Linear(4, 1, bias=False))},
        lambda self, x: th.func.vmap(th.func.grad(lambda row: self.energy(row).squeeze()))(x),
    ),
    "checkpoint": extractor(
        4, linear, lambda self, x: checkpoint(self.linear, x.requires_grad_(), use_reentrant=False)
    ),
    "two types": extractor(
        4, lambda n: {"linear": nn.Linear(n, 4).double()}, lambda self, x: self.linear(x.double()).float()
    ),
}


class Extended(ActorCriticPolicy):
    """Has modules or parameters of its own."""

    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        self.extend()
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)


def with_std(make_std):
    """A policy whose standard deviation is not one parameter for each action."""

    class WithStd(Extended):
        def extend(self):
            del self.log_std
            make_std(self)

    return {"policy": WithStd}


def clamped_std(policy):
    policy.log_std = nn.Parameter(th.zeros(2))
    nn.utils.parametrize.register_parametrization(policy, "log_std", nn.Hardtanh(-3.0, 0.5))


class Scaled(ActorCriticPolicy):
    """SB3's own ``get_distribution`` and ``predict_values`` would not see this method."""

    def extract_features(self, obs, features_extractor=None):
        return super().extract_features(0.1 * obs, features_extractor)


class OneMoreLayer(Extended):
    """Has its own way to the distribution."""

    def extend(self):
        self.extra = nn.Linear(self.mlp_extractor.latent_dim_pi, self.mlp_extractor.latent_dim_pi)

    def _get_action_dist_from_latent(self, latent_pi):
        return super()._get_action_dist_from_latent(self.extra(latent_pi).tanh())


class OwnWay(Extended):
    """Computes the distribution and the values by another method."""

    def forward(self, obs, deterministic=False):
        distribution, values = self.both(obs)
        actions = distribution.get_actions(deterministic)
        return actions, values, distribution.log_prob(actions)

    def evaluate_actions(self, obs, actions):
        distribution, values = self.both(obs)
        return values, distribution.log_prob(actions), distribution.entropy()

    def predict_values(self, obs):
        return self.both(obs)[1]


class TwoExtractors(OwnWay):
    def extend(self):
        n = self.features_dim
        self.of_actor, self.of_critic = (nn.Sequential(nn.Linear(n, n), nn.Tanh()) for _ in range(2))

    def both(self, obs):
        latent = self.mlp_extractor.forward_actor(self.of_actor(obs))
        value = self.value_net(self.mlp_extractor.forward_critic(self.of_critic(obs)))
        return self._get_action_dist_from_latent(latent), value


class SeesMore(MultiInputActorCriticPolicy):
    """The actor sees one key of the observation, the critic another."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, share_features_extractor=False, **kwargs)

    def _build_mlp_extractor(self):
        for name, key in (("pi_features_extractor", "noisy"), ("vf_features_extractor", "exact")):
            setattr(self, name, CombinedExtractor(spaces.Dict({key: self.observation_space[key]})))
        self.features_extractor = self.pi_features_extractor
        self.features_dim = self.features_extractor.features_dim
        super()._build_mlp_extractor()
        width = self.vf_features_extractor.features_dim
        self.mlp_extractor.value_net = MlpExtractor(width, self.net_arch, self.activation_fn, "cpu").value_net


class MixesSteps(nn.Module):
    """No parameters, but what comes out for one step depends on the others."""

    def forward(self, x):
        return th.tanh(x - 0.5 * x.mean(dim=0))


class Masked(MultiInputActorCriticPolicy):
    """Some choices are impossible, by the two methods that PPO calls."""

    def forward(self, obs, deterministic=False):
        self.mask = obs["mask"]
        return super().forward(obs, deterministic)

    def evaluate_actions(self, obs, actions):
        self.mask = obs["mask"]
        return super().evaluate_actions(obs, actions)

    def _get_action_dist_from_latent(self, latent):
        return self.action_dist.proba_distribution(self.masked(self.action_net(latent)))

    def masked(self, logits):
        return logits.masked_fill(self.mask < 0.5 * self.mask.amax(dim=1, keepdim=True), -th.inf)


class MaskedByALargeNumber(Masked):
    """On the steps that construction makes up, its mask hides everything."""

    def masked(self, logits):
        return logits.masked_fill(self.mask < 0.5, -1e8)


MASK = {"action_space": "discrete", "observation_space": spaces.Dict(mask=spaces.Box(0.0, 1.0, (3,)))}


def seen_by_both(width):
    space = spaces.Dict(noisy=spaces.Box(-1.0, 1.0, (3,)), exact=spaces.Box(-1.0, 1.0, (width,)))
    return {"policy": SeesMore, "observation_space": space}


TRAINED = {
    **POLICIES,
    "mixed steps": with_kwargs(activation_fn=MixesSteps),
    "log_std_init": with_kwargs(log_std_init=-1.0),
    "RMSprop": with_kwargs(optimizer_class=th.optim.RMSprop),
    "SGD": with_kwargs(optimizer_class=th.optim.SGD, optimizer_kwargs={"momentum": 0.9}),
    **{name: with_extractor(made) for name, made in EXTRACTORS.items()},
    **{
        f"{name}, separate": with_extractor(EXTRACTORS[name], share_features_extractor=False)
        for name in ("norms and dropout", "recurrent", "transformer", "two types")
    },
    "few steps use it": {**with_extractor(EXTRACTORS["experts"]), "sub_sampling_factor": 16},
    "one std": with_std(AT_NEXT["one_std"]),
    "scalar std": with_std(AT_NEXT["scalar_std"]),
    "std in a buffer": with_std(lambda policy: policy.register_buffer("log_std", th.zeros(2))),
    "clamped std": with_std(clamped_std),
    **{kind.__name__: {"policy": kind} for kind in (Scaled, OneMoreLayer, TwoExtractors)},
    "masked by infinity": {"policy": Masked, **MASK},
    "masked by a large number": {"policy": MaskedByALargeNumber, **MASK},
    "different keys": seen_by_both(3),
    "different keys and widths": seen_by_both(5),
}


def lookup(self, observations):
    """Takes categories from 1 to 5, and no zeros."""
    observations = observations["category"] if isinstance(observations, dict) else observations
    return self.table(observations[:, 0].long() - 1)


def lazy(n):
    return {"net": nn.Sequential(nn.Linear(n, 8), nn.LazyBatchNorm1d(), nn.ReLU())}


def dueling(n):
    """Its first bias, and with a shared one after it every logit's, change nothing but rounding errors."""
    shift = nn.ParameterDict({"shift": nn.Parameter(th.zeros(1))})
    return {"linear": nn.Linear(n, 8), "norm": nn.LayerNorm(8, elementwise_affine=False), "shifts": shift}


LOOKUP = with_extractor(extractor(8, lambda n: {"table": nn.Embedding(5, 8)}, lookup))
CATEGORIES = spaces.Box(1.0, 5.0, (1,), np.float32)
#: some parameters have no part in them
IN_PART = {
    "no zeros": {**LOOKUP, "observation_space": CATEGORIES},
    "no zeros in a dict": {
        **LOOKUP, "observation_space": spaces.Dict(category=CATEGORIES), "policy": "MultiInputPolicy"
    },
    "lazy": {**with_extractor(extractor(8, lazy, lambda self, x: self.net(x))), "spread": False},
    "empty layer": with_kwargs(net_arch=[0]),
    # at a time limit, Stable-Baselines3 itself fails
    "empty part": {"env": Endless, "observation_space": spaces.Dict(a=CATEGORIES, b=spaces.Box(-1.0, 1.0, (0,)))},
    "dueling": with_extractor(extractor(8, dueling, lambda self, x: self.norm(self.linear(x) + self.shifts["shift"]))),
    "own attention": with_extractor(extractor(4, lambda n: {name: nn.Linear(1, 4) for name in "qkv"}, softmax)),
}  # fmt: skip


@BOTH
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning", "ignore:Initializing zero-element")
@pytest.mark.parametrize("name", [*TRAINED, *IN_PART])
def test_it_is_trained(cls, name):
    """Each parameter that has a part in it moves, without a warning, which would be an error."""
    model = small(cls, **(TRAINED.get(name) or {"action_space": "discrete", **IN_PART[name]}))
    before = {key: param.detach().clone() for key, param in model.policy.named_parameters() if name in TRAINED}
    model.learn(3 * model.n_steps)
    assert not [key for key, value in before.items() if th.equal(model.policy.get_parameter(key), value)]
    assert logged(model)["step_fraction"] > 0.0
    assert all(np.isfinite(value).all() for value in state_of(model).values())


ADDED = (
    "patched mlp_extractor.policy_net", "subclassed mlp_extractor.policy_net", "hooked features_extractor",
    "hooked mlp_extractor.policy_net.0", "hooked_before action_net",
)  # fmt: skip


@pytest.mark.parametrize("change", ADDED)
def test_what_was_added_to_a_network_is_part_of_updates(change):
    model = small(policy=DoublePolicy, n_envs=2)
    AT_NEXT[change](model.policy)
    check_updates(model, n_updates=2)


def column_major(model):
    AT_NEXT["column_major_weights"](model.policy)
    # a new weight is not yet one of the optimizer's
    model.policy.optimizer = th.optim.Adam(model.policy.parameters(), lr=1e-3, eps=1e-5)
    assert not model.policy.action_net.weight.is_contiguous()


def compiled(model):
    model.policy = th.compile(model.policy, backend="eager")


def in_place(model):
    for module in model.policy.modules():
        if hasattr(module, "inplace"):
            module.inplace = True


@pytest.mark.usefixtures("unchecked_distributions")
@pytest.mark.parametrize(
    ("change", "activation_fn"),
    [*((in_place, fn) for fn in (nn.ReLU, nn.LeakyReLU, nn.ELU)), (column_major, nn.Tanh), (compiled, nn.Tanh)],
)
def test_what_computes_the_same_is_updated_in_the_same_way(change, activation_fn):
    models = [small(**with_kwargs(net_arch=[8, 8], activation_fn=activation_fn)) for _ in range(2)]
    change(models[1])
    for model in models:
        model.set_random_seed(0)
        model.learn(3 * model.n_steps)
        assert logged(model)["step_fraction"] > 0
    np.testing.assert_allclose(*(flat(model.policy.parameters()) for model in models), rtol=1e-5, atol=1e-6)


class BuildsItsDistribution(ActorCriticPolicy):
    def _get_action_dist_from_latent(self, latent_pi):
        self.action_dist = DiagGaussianDistribution(2).proba_distribution(self.action_net(latent_pi), self.log_std)
        return self.action_dist


@pytest.mark.parametrize(("cls", "size"), [(UATRPO, "trust_region_delta"), (MatchedTRPO, "target_kl")])
@pytest.mark.parametrize("policy", ["MlpPolicy", BuildsItsDistribution])
def test_a_trial_step_beyond_floats_is_rejected(cls, size, policy):
    model = collect(small(cls, policy=policy, **{size: 1e12}))
    with (
        unchanged(model, actor_vector),
        pytest.warns(UserWarning, match="the KL divergence of the full step is not fi"),
    ):
        model.train()
    assert logged(model)["step_fraction"] == 0.0
    assert "kl_proposed" not in logged(model)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@BOTH
@pytest.mark.parametrize("policy", ["MlpPolicy", BuildsItsDistribution])
def test_torchs_search_for_nan_changes_nothing(cls, policy):
    found = []
    for detects in (False, True):
        model = small(cls, policy=policy)
        with th.autograd.set_detect_anomaly(detects):
            model.learn(2 * model.n_steps)
        found.append(nn.utils.parameters_to_vector(model.policy.parameters()))
    th.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@BOTH
@pytest.mark.parametrize("is_all", [False, True])
def test_a_network_may_become_more_precise_after_construction(cls, is_all, tmp_path):
    def to_double(model):
        policy = model.policy
        for part in [policy] if is_all else [policy.mlp_extractor, policy.action_net, policy.value_net]:
            part.double()
        if is_all:
            policy.log_std.register_hook(lambda gradient: gradient)

    model = small(cls, **with_extractor(extractor(3, lambda n: {}, lambda self, x: x.double())))
    to_double(model)
    model.learn(2 * 48)
    assert logged(model)["kl_ratio"] == pytest.approx(1.0, abs=0.3)
    model.save(tmp_path / "model")
    loaded = cls.load(tmp_path / "model", model.env, device="cpu")
    to_double(loaded)
    loaded.set_parameters(tmp_path / "model", device="cpu")
    assert_same_update(model, loaded)


# ---------------------------------------------------------------------------------------------- refusals, warnings


class CauchyPolicy(Extended):
    def extend(self):
        self.action_dist = th.distributions.Cauchy(0.0, 1.0)


class LastIsOnceOnly(Extended):
    """No parameter of the actor can be differentiated twice, since none comes after the last operation."""

    def extend(self):
        last = nn.Module()
        last.forward = Sine.apply
        self.action_net = nn.Sequential(self.action_net, last)


def complex_numbers(n):
    return {"linear": nn.Linear(n, 4, dtype=th.complex64)}


COMPLEX = extractor(4, complex_numbers, lambda self, x: self.linear(x.to(th.complex64)).abs())
TWICE = "^policy: its network must be differentiable twice, but "
AT_CONSTRUCTION = {
    "distribution": ({"policy": CauchyPolicy}, "Cauchy"),
    "recurrent": (
        {"policy": RecurrentActorCriticPolicy},
        r"^policy: evaluate_actions must need .* needs obs, actions, lstm_st",
    ),
    "Hardsigmoid": (with_kwargs(activation_fn=nn.Hardsigmoid), TWICE + r"torch says: \w"),
    "once at the end": ({"policy": LastIsOnceOnly, "action_space": "discrete"}, TWICE + "no parameter"),
    # derivatives with respect to given parameters would not reach its own
    "reentrant checkpoint": (
        with_extractor(extractor(4, linear, partial(checkpointed, use_reentrant=True))),
        r"^policy: .*torch.utils.checkpoint with use_reentrant=False",
    ),
    "complex numbers": (with_extractor(COMPLEX, ortho_init=False), "real numbers"),
}


@BOTH
@pytest.mark.parametrize("name", AT_CONSTRUCTION)
def test_it_is_refused_at_construction(cls, name):
    kwargs, message = AT_CONSTRUCTION[name]
    with pytest.raises(ValueError, match=message):
        small(cls, **kwargs, spread=False)


class OwnHead(OwnWay):
    """``action_dist`` does not know its layers."""

    def extend(self):
        self.head = nn.Linear(self.features_dim, self.action_space.shape[0])

    def both(self, obs):
        own = DiagGaussianDistribution(self.action_space.shape[0])
        features = self.extract_features(obs)
        values = self.value_net(self.mlp_extractor.forward_critic(features))
        return own.proba_distribution(self.head(features), self.log_std - 0.5), values


class BesideTheOldOne(OwnHead):
    def evaluate_actions(self, obs, actions):
        super().get_distribution(obs)
        return super().evaluate_actions(obs, actions)


class ActsOtherwise(MlpPolicy):
    def forward(self, obs, deterministic=False):
        distribution = self.get_distribution(obs)
        distribution.distribution.loc.data += 1.0
        actions = distribution.get_actions(deterministic)
        return actions, self.predict_values(obs), distribution.log_prob(actions)


def no_log_prob(owner, patch):
    patch.setattr(owner, "log_prob", lambda *args: th.zeros(len(args[-1])))


def compiled_network(model, _):
    net = model.policy.mlp_extractor.policy_net
    model.policy.mlp_extractor.policy_net = th.compile(net, backend="aot_eager")


WRONG_HEAD = "(?=.*forward)(?=.*evaluate_actions)(?=.*action_dist)"
REPLACED = "^policy: log_prob of DiagGaussianDistribution was replac"
IN_THE_UPDATE = {
    "own head": (OwnHead, None, WRONG_HEAD),
    "own head beside the old one": (BesideTheOldOne, None, WRONG_HEAD),
    "acts otherwise": (ActsOtherwise, None, "forward and evaluate_actions disagree.*action_dist"),
    "log_prob of the object": (MlpPolicy, lambda model, patch: no_log_prob(model.policy.action_dist, patch), REPLACED),
    "log_prob of the class": (MlpPolicy, lambda _, patch: no_log_prob(DiagGaussianDistribution, patch), REPLACED),
    # the derivative of what torch.compile makes of a network has no derivative
    "compiled network": (MlpPolicy, compiled_network, "^policy: .*no torch.compile"),
}


@pytest.mark.usefixtures("unchecked_distributions")
@BOTH
@pytest.mark.parametrize("name", IN_THE_UPDATE)
def test_it_is_refused_in_the_update_before_anything_changes(cls, name, monkeypatch):
    policy, change, message = IN_THE_UPDATE[name]
    model = collect(small(cls, policy=policy))
    if change is not None:
        change(model, monkeypatch)
    generators = th.get_rng_state(), np.random.get_state()[1].copy()
    with unchanged(model), pytest.raises(ValueError, match=message):
        model.train()
    assert th.equal(generators[0], th.get_rng_state())
    assert np.array_equal(generators[1], np.random.get_state()[1])


def test_a_patch_that_only_rollouts_see_is_refused(monkeypatch):
    """Without NumPy in rollouts, the policy acts by the patch, but updates compute from its layers."""
    own = MlpExtractor.forward_actor
    monkeypatch.setattr(MlpExtractor, "forward_actor", lambda self, features: 3.0 * own(self, features))
    model = small(fast_rollouts=False)
    with pytest.raises(ValueError, match="a method of its libraries' classes was replaced"):
        model.learn(model.n_steps)


@pytest.mark.parametrize("context", [th.no_grad, th.inference_mode])
def test_learning_without_gradients_is_an_error(context):
    model = small()
    with unchanged(model), context(), pytest.raises(RuntimeError, match="needs gradients"):
        model.learn(model.n_steps)


@BOTH
def test_a_warning_names_what_the_trust_region_misses(cls):
    once_only = extractor(4, linear, lambda self, x: Sine.apply(self.linear(x)))
    with pytest.warns(UserWarning, match=r"The trust region misses features_extractor.linear.weight.*twice there"):
        small(cls, **with_extractor(once_only))


@pytest.mark.parametrize("own_generator", [False, True])
@BOTH
def test_noise_of_its_own_gives_one_warning_and_another_after_ten_updates_that_hardly_moved(cls, own_generator):
    """Augmentation that stays on in evaluation mode."""
    generator = th.Generator().manual_seed(0) if own_generator else None

    def noisy(_, x):
        return x + 0.5 * th.randn(x.shape, generator=generator, dtype=x.dtype)

    model = small(cls, **with_extractor(extractor(3, lambda n: {}, noisy)))
    with th.no_grad():
        model.policy.log_std.fill_(-3.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.learn(15 * model.n_steps)
    messages = [str(warning.message) for warning in caught]
    assert sum("log-probabilities of the rollout differ" in message for message in messages) == 1
    assert sum("10 updates in a row" in message for message in messages) == 1


@BOTH
def test_a_callback_may_rewrite_log_probabilities_with_one_warning(cls):
    def rewrite(_, local):
        local["log_probs"].sub_(1.0)

    model = small(cls)
    with pytest.warns(UserWarning, match="log-probabilities of the rollout differ") as caught:
        model.learn(3 * model.n_steps, callback=At(rewrite, at=None))
    assert len(caught) == 1
    assert model._n_updates == 3


# --------------------------------------------------------------------------- what construction makes up, and leaves


class HoldsALock(Exception):
    def __init__(self):
        super().__init__("made up")
        self.lock = threading.Lock()


def refuses_what_is_made_up(works):
    def forward(_, x):
        # the first of those that are made up
        if x[0, 0] == np.float32(0.45):
            raise HoldsALock
        return x if works or len(x) == 1 else x[:, :2]

    return with_extractor(extractor(3, lambda n: {}, forward))


@BOTH
def test_a_network_may_refuse_observations_that_are_made_up(cls, capsys, tmp_path):
    model = small(cls, **refuses_what_is_made_up(works=True), verbose=1)
    assert "The sketch of" not in capsys.readouterr().out
    # what it raised is not saved
    model.save(tmp_path / "model", exclude=["policy_kwargs"])
    before = actor_vector(model)
    model.learn(model.n_steps)
    assert not np.array_equal(actor_vector(model), before)


@BOTH
def test_an_error_at_construction_explains_one_in_the_first_update(cls):
    model = small(cls, **refuses_what_is_made_up(works=False))
    with pytest.raises(
        RuntimeError, match=r"evaluate_actions failed .*shape \(48, 3\) and actions of shape \(48, 2\)"
    ) as error:
        model.learn(model.n_steps)
    chain = [error.value]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    assert isinstance(chain[-1], HoldsALock)


class Counts(BaseFeaturesExtractor):
    """Counts the observations that it sees, in evaluation mode too."""

    def __init__(self, observation_space):
        super().__init__(observation_space, 3)
        self.register_buffer("seen", th.zeros(1))
        self.register_buffer("times", th.zeros(1))
        self.register_buffer("last", th.zeros(0))

    def forward(self, observations):
        self.seen += len(observations)
        self.times = self.times + 1
        self.last = observations.detach()
        return observations


@BOTH
def test_construction_leaves_no_trace_in_the_networks_statistics(cls):
    policy = small(cls, **with_extractor(Counts)).policy
    assert policy.features_extractor.seen == policy.features_extractor.times == 0
    assert policy.features_extractor.last.shape == (0,)
    assert policy.training == PPO("MlpPolicy", "CartPole-v1", device="cpu").policy.training


@BOTH
def test_a_parameter_that_was_used_stays_among_those_of_the_actor(cls, tmp_path):
    model = small(cls, **with_extractor(experts(0.95)))
    known, uses = [], []
    for _ in range(12):
        collect(model)
        uses.append(bool((model.rollout_buffer.observations[..., 2] > 0.95).any()))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.train()
        restarts = sum("starts afresh" in str(warning.message) for warning in caught)
        # only the first use of the rare expert makes d grow
        assert restarts == (cls is UATRPO and uses[-1] and not any(uses[:-1]) and len(uses) > 1)
        known.append("features_extractor.rare.weight" in model._acting_params)
        assert logged(model)["step_fraction"] > 0.0
    assert known == [any(uses[: i + 1]) for i in range(12)]
    assert False in uses
    model.save(tmp_path / "model")
    loaded = cls.load(tmp_path / "model", env=model.env)
    assert loaded._acting_params == model._acting_params


@BOTH
def test_the_default_device_is_not_that_of_a_model_with_its_own(cls):
    """There is no other device here than one without memory, which fails wherever it is used."""
    model = model_on(cls, NoiseEnv(spaces.Box(-1.0, 1.0, (2,))))
    with th.device("meta"):
        model.learn(64)
    assert not any(param.is_meta for param in model.policy.parameters())


# ---------------------------------------------------------------------------------------------- hooks on gradients


@pytest.mark.parametrize("kind", ["plain", "convolution"])
def test_hooks_on_gradients_that_only_look_change_nothing_and_those_that_change_are_obeyed(kind):
    """They are called with the policy gradient and with the critic's gradients, not with the curvature products'."""
    kwargs = {"n_critic_updates": 0}
    if kind == "convolution":
        kwargs |= {"policy": "CnnPolicy", "observation_space": IMAGE, **with_extractor(SmallCNN, net_arch=[])}
    gradients, actors, seen = [], [], []
    for change in (None, seen.append, th.zeros_like):
        model = collect(small(**kwargs))
        if change is not None:
            model.policy.action_net.weight.register_hook(change)
            model.policy.action_net.register_full_backward_hook(lambda module, _, above: seen.extend(above))
        gradients.append(direction_and_gradient(model)[1])
        actors.append(actor_vector(model))
    np.testing.assert_allclose(actors[1], actors[0], rtol=1e-5, atol=1e-6)
    assert [type(gradient) for gradient in seen] == [th.Tensor] * 3
    # all of ĝ is as it was but the weight, whose zeros are together
    changed = np.flatnonzero(~np.isclose(gradients[2], gradients[0], rtol=1e-4, atol=1e-6))
    assert len(changed) == np.ptp(changed) + 1 == model.policy.action_net.weight.numel()
    assert not gradients[2][changed].any()


def test_the_standard_error_of_the_gradient_does_not_depend_on_hooks():
    def gradient(noise: float, factor: float):
        model = collect(small(adversarial_noise=noise))
        model.policy.action_net.weight.register_hook(lambda grad: factor * grad)
        return direction_and_gradient(model)[1]

    moved = [np.abs(gradient(0.0, factor) - gradient(1.0, factor)) for factor in (1.0, 10.0)]
    assert moved[0].any()
    np.testing.assert_allclose(moved[1], moved[0], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", ["of a module", "of all modules", "of accumulated gradients"])
def test_hooks_see_every_minibatch_of_the_critic(kind):
    seen = []
    model = collect(small())
    layer = model.policy.value_net
    if kind == "of a module":
        handle = layer.register_full_backward_hook(lambda module, _, above: seen.append(above[0]))
    elif kind == "of all modules":
        handle = torch_module.register_module_full_backward_hook(
            lambda module, _, above: seen.append(above[0]) if module is layer and above[0] is not None else None
        )
    else:
        handle = layer.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    try:
        model.train()
    finally:
        handle.remove()
    n_minibatches = model.n_critic_updates * -(-model.n_steps // model.batch_size)
    assert sum(bool(gradient.any()) for gradient in seen) == n_minibatches
    assert {type(gradient) for gradient in seen} == {th.Tensor}


# --------------------------------------------------------------------------------------------------------- buffers


class UsualSamples(RolloutBuffer):
    def _get_samples(self, batch_inds, env=None):
        return super()._get_samples(batch_inds, env)


class NeedsAnInteger(RolloutBuffer):
    def get(self, batch_size):
        yield from super().get(int(batch_size))


class FlattensAll(RolloutBuffer):
    """``episode_starts``, too, as recurrent buffers do."""

    def get(self, batch_size=None):
        if not self.generator_ready:
            self.episode_starts = self.swap_and_flatten(self.episode_starts)
        yield from super().get(batch_size)


@BOTH
@pytest.mark.parametrize("buffer", [UsualSamples, NeedsAnInteger, FlattensAll])
def test_a_buffer_may_have_methods_of_its_own(cls, buffer):
    models = [small(cls, n_envs=3, rollout_buffer_class=kind) for kind in (RolloutBuffer, buffer)]
    for model in models:
        model.set_random_seed(0)
        model.learn(model.n_steps * 3)
    n_trajectories = [logged(model)["n_trajectories"] for model in models]
    assert n_trajectories[0] == n_trajectories[1] >= 3
    assert logged(models[1])["step_fraction"] > 0.0
    if buffer is UsualSamples:
        np.testing.assert_allclose(*map(actor_vector, models), rtol=0, atol=1e-5)
