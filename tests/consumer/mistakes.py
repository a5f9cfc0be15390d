"""A user's mistakes. `mypy --strict` finds each one; the comment is its error code. The file is never run."""

from sb3_uatrpo import RECOMMENDED, UATRPO, MatchedTRPO
from sb3_uatrpo.maskable import MaskableMatchedTRPO, MaskableUATRPO
from sb3_uatrpo.study import statistics
from sb3_uatrpo.study.plan import plan

UATRPO("MlpPolicy", "CartPole-v1", sample_unit="episode")  # arg-type
UATRPO("MlpPolicy", "CartPole-v1", step_length_samples="all")  # arg-type
UATRPO("MlpPolicy", "CartPole-v1", projection_solver="qr")  # arg-type
UATRPO("MlpPolicy", "CartPole-v1", n_projections=20.0)  # arg-type
UATRPO("MlpPolicy", "CartPole-v1", trust_region_delta="0.03")  # arg-type
UATRPO("MlpPolicy", "CartPole-v1", cg_damping=0.1)  # call-arg
UATRPO("MlpPolicy", "CartPole-v1", ent_coef=0.1)  # call-arg
UATRPO("MlpPolicy", "CartPole-v1", **RECOMMENDED, sample_unit=1)  # arg-type
UATRPO(int, "CartPole-v1")  # arg-type
UATRPO("MlpPolicy")  # call-arg
MatchedTRPO("MlpPolicy", "CartPole-v1", cg_damping=None)  # arg-type
MatchedTRPO("MlpPolicy", "CartPole-v1", n_projections=20)  # call-arg
MaskableUATRPO("MlpPolicy", "CartPole-v1", n_epochs=10)  # call-arg
MaskableMatchedTRPO("MlpPolicy", "CartPole-v1").learn(1, use_masking="always")  # arg-type
UATRPO("MlpPolicy", "CartPole-v1").learn(1, use_masking=False)  # call-arg

baseline: MatchedTRPO = UATRPO.load("model")  # assignment
trained: MatchedTRPO = UATRPO("MlpPolicy", "CartPole-v1").learn(1)  # assignment
UATRPO("MlpPolicy", "CartPole-v1").learn("1000")  # arg-type
print(UATRPO("MlpPolicy", "CartPole-v1").sketsh)  # attr-defined
plan(["uatrpo"], ["CartPole-v1"], seeds=0)  # arg-type
statistics.conditional_value_at_risk([1.0])  # attr-defined
