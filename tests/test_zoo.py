"""
RL Zoo with an unmodified rl_zoo3: the built wheel, an sdist and an editable installation, each in a fresh environment.

The environments borrow what is heavy from the one that runs the tests, through a path file.
"""

import os
import re
import shlex
import shutil
import sys
import types
import zipfile
from pathlib import Path

import gymnasium as gym
import imageio_ffmpeg
import optuna
import pytest
import torch as th
import yaml
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
from train_mujoco import CHANGES, N_ENVS

from sb3_uatrpo import RECOMMENDED, RECOMMENDED_DISCRETE, RECOMMENDED_SMALL_BATCHES, UATRPO
from sb3_uatrpo.study.plan import plan, read_study_file
from sb3_uatrpo.zoo import register, registration, search_space
from sb3_uatrpo.zoo.__main__ import main
from tests.forked import run_code
from tests.installing import environment, pip, run, site_packages

ROOT = Path(__file__).parents[1]
HOOK = "sb3_uatrpo_zoo_hook"
AGENTS = sorted(path.parent for path in (ROOT / "docs" / "agents").glob("*/*/README.md"))
QUICK = "--eval-freq -1 -params n_steps:500"

KNOWS = (
    "import rl_zoo3, rl_zoo3.exp_manager, rl_zoo3.hyperparams_opt as h;"
    "ours = {'uatrpo', 'uatrpo_small_batches', 'uatrpo_paper', 'trpo_matched'};"
    "print(sorted(ours & set(rl_zoo3.ALGOS)), ours <= set(h.HYPERPARAMS_SAMPLER))"
)
YES, NO = "['trpo_matched', 'uatrpo', 'uatrpo_paper', 'uatrpo_small_batches'] True", "[] False"


@pytest.fixture(scope="session")
def newcomer(built, tmp_path_factory) -> tuple[Path, Path]:
    """An environment with the wheel, and the empty folder in which commands are typed."""
    folder = tmp_path_factory.mktemp("newcomer")
    python = environment(folder)
    pip(python, "install", "--no-deps", built["wheel"], cwd=folder)
    (folder / "empty").mkdir()
    return python, folder / "empty"


@pytest.mark.parametrize("way", ["wheel", "sdist", "editable"])
def test_every_installation_registers_and_uninstalling_leaves_no_trace(way, source, built, tmp_path):
    python = environment(tmp_path)
    site = site_packages(python)
    before = sorted(path.name for path in site.iterdir())
    starts = ["-c", f"import sys; print('{HOOK}' in sys.modules)"]
    assert run(python, *starts, cwd=tmp_path) == "False\n"

    target = ["-e", source] if way == "editable" else [built[way]]
    pip(python, "install", "--no-deps", "--no-build-isolation", *target, cwd=tmp_path)
    assert (site / f"{HOOK}.pth").read_text() == f"import {HOOK}\n"
    assert (site / f"{HOOK}.start").read_text() == f"{HOOK}:install\n"
    assert run(python, *starts, cwd=tmp_path) == "True\n"
    assert YES in run(python, "-I", "-c", KNOWS, cwd=tmp_path)
    # -S reads no path files at all: neither this one nor the borrowed one
    assert run(python, "-S", "-c", "import sys; print(len(sys.meta_path))", cwd=tmp_path).strip() == "3"
    fallback = f"{KNOWS}; import runpy; runpy.run_module('sb3_uatrpo.zoo', run_name='__main__')"
    said = run(python, "-c", fallback, "train", "--help", cwd=tmp_path, SB3_UATRPO_NO_HOOK="1")
    assert said.startswith(NO)
    assert "trpo_matched" in said

    pip(python, "uninstall", "--yes", "sb3_uatrpo", cwd=tmp_path)
    assert sorted(path.name for path in site.iterdir() if path.name != "__pycache__") == before


def test_the_hook_imports_nothing(newcomer):
    python, folder = newcomer
    loaded = run(python, "-c", "import sys; print(sorted(sys.modules))", cwd=folder)
    assert HOOK in loaded
    for heavy in ("torch", "numpy", "stable_baselines3", "'sb3_uatrpo'", "rl_zoo3", "importlib.metadata"):
        assert heavy not in loaded


def test_without_rl_zoo3_nothing_happens(built, tmp_path):
    python = environment(tmp_path)
    (site_packages(python) / "borrowed.pth").unlink()
    pip(python, "install", "--no-deps", built["wheel"], cwd=tmp_path)
    said = run(python, "-c", "import json; print('fine')", cwd=tmp_path)
    assert said == "fine\n"
    said = run(python, "-c", "import rl_zoo3.utils", cwd=tmp_path, code=1)
    assert said.splitlines()[-1] == "ModuleNotFoundError: No module named 'rl_zoo3'"


def test_the_hook_warns_instead_of_raising(newcomer):
    python, folder = newcomer
    broken = "import sys; sys.modules['sb3_uatrpo'] = None; import rl_zoo3.utils; print(len(rl_zoo3.utils.ALGOS) > 5)"
    said = run(python, "-c", broken, cwd=folder)
    assert "could not register with rl_zoo3.utils" in said
    assert "True" in said


FROM_ARCHIVE = """
sys.path.insert(0, PLACE + "/zoo.zip")
import rl_zoo3.utils, rl_zoo3.other
assert "uatrpo" in rl_zoo3.utils.ALGOS
# the loader of all modules in the archive is as it was
assert "exec_module" not in vars(rl_zoo3.other.__spec__.loader)
assert rl_zoo3.utils.__loader__ is rl_zoo3.utils.__spec__.loader is not None
assert type(rl_zoo3.utils.__loader__) is type(rl_zoo3.other.__loader__)
"""
BEHIND_ANOTHER_FINDER = """
import importlib.util
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "rl_zoo3.utils":
            return importlib.util.spec_from_file_location(name, PLACE + "/plain/rl_zoo3/other.py")
sys.meta_path.insert(1, Finder())
import rl_zoo3.utils
assert rl_zoo3.utils.__file__.endswith("other.py")
assert "uatrpo" in rl_zoo3.utils.ALGOS
"""
PICKLED_AND_RELOADED = """
import importlib.util, inspect, pickle
pickle.loads(pickle.dumps(importlib.util.find_spec("rl_zoo3.utils")))
import rl_zoo3.utils
pickle.loads(pickle.dumps(rl_zoo3.utils.__spec__))
importlib.reload(rl_zoo3.utils)
assert "ALGOS" in inspect.getsource(rl_zoo3.utils)
assert "uatrpo" in rl_zoo3.utils.ALGOS
"""
WARNINGS_ARE_ERRORS = """
import warnings
warnings.simplefilter("error")
sys.modules["sb3_uatrpo"] = None
import rl_zoo3.utils
assert rl_zoo3.utils.ALGOS == {}
"""


@pytest.mark.parametrize("code", [FROM_ARCHIVE, BEHIND_ANOTHER_FINDER, PICKLED_AND_RELOADED, WARNINGS_ARE_ERRORS])
def test_the_hook_harms_nobody(code, tmp_path):
    package = tmp_path / "plain" / "rl_zoo3"
    package.mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "zoo.zip", "w") as archive:
        for name, text in (("__init__", ""), ("utils", "ALGOS = {}"), ("other", "ALGOS = {}")):
            (package / f"{name}.py").write_text(text)
            archive.writestr(f"rl_zoo3/{name}.py", text)
    # as the path file would, but here without it
    start = f"""if True:
        import sys
        PLACE = {str(tmp_path)!r}
        sys.path.insert(0, PLACE + "/plain")
        sys.meta_path = [finder for finder in sys.meta_path if type(finder).__module__ != "{HOOK}"]
        sys.modules.pop("{HOOK}", None)
        import {HOOK}
    """
    ended = run_code(f"{start}\n{code}", cwd=ROOT)
    assert ended.code == 0, ended.stderr


# ----------------------------------------------------------------------------------------------------------- commands


def zoo(*commands: str, cwd: Path, code: int = 0) -> str:
    """What commands of RL Zoo print, one after another, in one process without the hook."""
    code_of_all = f"""if True:
        import shlex, sys
        sys.meta_path = [finder for finder in sys.meta_path if type(finder).__module__ != "{HOOK}"]
        from sb3_uatrpo.zoo.__main__ import main
        for command in sys.argv[1:]:
            sys.argv = ["sb3_uatrpo.zoo", *shlex.split(command)]
            main()
    """
    ended = run_code(code_of_all, *commands, cwd=cwd, MPLBACKEND="Agg")
    assert ended.code == code, ended
    return ended.stdout + ended.stderr


def test_train(newcomer):
    """The literal command, on a small budget."""
    python, folder = newcomer
    said = run(
        python, "-m", "rl_zoo3.train", "--algo", "uatrpo", "--env", "Hopper-v4", "-n", "1500",
        "--eval-freq", "500", "--eval-episodes", "2", "--save-freq", "1000", "-tb", "tb", "-P", cwd=folder,
    )  # fmt: skip
    assert "sb3_uatrpo" in said
    assert "hyperparams/uatrpo.yml" in said
    run_folder = folder / "logs" / "uatrpo" / "Hopper-v4_1"
    for name in (
        "Hopper-v4.zip",
        "best_model.zip",
        "evaluations.npz",
        "rl_model_1000_steps.zip",
        "Hopper-v4/config.yml",
    ):
        assert (run_folder / name).exists(), name
    assert list((folder / "tb").rglob("events.out.tfevents.*"))


def test_enjoy_going_on_and_plots(tmp_path):
    common = "--algo uatrpo --env Hopper-v4"
    train = f"train {common} -n 1000 --eval-freq 250 --eval-episodes 2 -params trust_region_delta:0.02 n_steps:500"
    said = zoo(
        train,
        # RL Zoo's statistics want two runs at least
        f"{train} --seed 1",
        # an episode has at most 1,000 steps, and rl_zoo3 draws the seed of the agent at random
        f"enjoy {common} -f logs -n 1000 --no-render",
        "plot_train -a uatrpo -e Hopper-v4 -f logs",
        # "Hopper" names the runs of Hopper-v4, and the scores that --rliable knows how to normalise
        "all_plots -a uatrpo -e Hopper -f logs -o results --no-million",
        "plot_from_file -i results.pkl -l uatrpo --rliable -iqm",
        f"train {common} -n 500 -i logs/uatrpo/Hopper-v4_1/Hopper-v4.zip -uuid",
        cwd=tmp_path,
    )
    # parameters override the file
    assert "('trust_region_delta', 0.02)" in said
    assert "Mean reward" in said
    assert "Computing bootstrap CI" in said
    assert "Loading pretrained agent" in said


@pytest.mark.parametrize("run_folder", AGENTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_the_agents_of_the_repository_go_on_learning(run_folder):
    """Each is small, holds no sketch, and acts and learns with its statistics."""
    env_id = run_folder.name.removesuffix("_1")
    path = run_folder / f"{env_id}.zip"
    assert path.stat().st_size < 500_000
    env = VecNormalize.load(str(run_folder / env_id / "vecnormalize.pkl"), make_vec_env(env_id))
    model = UATRPO.load(path, env, device="cpu", n_steps=50)
    assert not model.sketch.y_fisher.any()
    model.learn(50)


def test_an_agent_of_the_repository_is_played():
    said = zoo("enjoy --algo uatrpo --env HalfCheetah-v4 -f docs/agents -n 1100 --no-render", cwd=ROOT)
    # one episode of 1,000 steps
    assert float(re.search(r"Episode Reward: ([\d.]+)", said)[1]) > 1000


def test_videos_and_benchmark(newcomer, tmp_path):
    """With what docs/rl_zoo.md says that rl_zoo3 needs: python and ffmpeg on the path, and enjoy.py in the folder."""
    python, _ = newcomer
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "ffmpeg").symlink_to(imageio_ffmpeg.get_ffmpeg_exe())
    path = os.pathsep.join([str(programs), str(python.parent), os.environ["PATH"]])
    common = ["--algo", "uatrpo", "--env", "CartPole-v1"]
    few = "-n 1000 --save-freq 700 --eval-freq 500 --eval-episodes 1"
    zoo(f"train {shlex.join(common)} {few} -params n_steps:500", cwd=tmp_path)
    videos = tmp_path / "logs" / "uatrpo" / "CartPole-v1_1" / "videos"

    # it starts record_video for the checkpoint, the best and the final model
    run(python, "-m", "rl_zoo3.record_training", *common, "-f", "logs", "-n", "20", "-g", cwd=tmp_path, PATH=path)
    (video,) = videos.glob("final-model-*0.mp4")
    assert imageio_ffmpeg.count_frames_and_secs(str(video))[0] >= 20
    assert imageio_ffmpeg.count_frames_and_secs(str(videos / "training.mp4"))[0] >= 3 * 20
    assert (videos / "training.gif").stat().st_size > 10_000

    (tmp_path / "enjoy.py").write_text("from rl_zoo3.enjoy import enjoy\n\nenjoy()\n")
    benchmark = "import runpy; runpy.run_module('rl_zoo3.benchmark', run_name='__main__')"
    ended = run_code(benchmark, "--log-dir", "logs", "--no-hub", "-n", "1000", cwd=tmp_path, PATH=path)
    assert ended.code == 0, ended
    assert "|uatrpo|CartPole-v1|" in (tmp_path / "benchmark.md").read_text()


def test_the_papers_settings_the_baseline_and_subprocess_environments(tmp_path):
    common = "--algo uatrpo_paper --env CartPole-v1"
    said = zoo(
        f"train {common} -n 1000 {QUICK}",
        # an episode has at most 500 steps
        f"enjoy {common} -f logs -n 600 --no-render",
        "plot_train -a uatrpo_paper -e CartPole-v1 -f logs",
        f"train --algo trpo_matched --env Pendulum-v1 -n 1000 --vec-env subproc {QUICK} n_envs:2",
        cwd=tmp_path,
    )
    assert "hyperparams/uatrpo_paper.yml" in said
    assert "hyperparams/trpo_matched.yml" in said
    assert "shrinkage" not in said
    assert "Episode Reward" in said


def test_optimize(tmp_path):
    options = "-optimize --n-trials 2 --n-evaluations 1 --eval-episodes 1 --no-optim-plots --n-startup-trials 1"
    # those for small batches have the search of uatrpo, and no entry for discrete actions
    assert registration.SAMPLERS["uatrpo_small_batches"] is registration.SAMPLERS["uatrpo"]
    searched = [algo for algo in registration.ALGORITHMS if algo != "uatrpo_small_batches"]
    commands = [f"train --algo {algo} --env CartPole-v1 -n 1000 {options}" for algo in searched]
    said = zoo(*commands, cwd=tmp_path)
    assert said.count("Best trial") == 3
    assert "log_std_init" not in said
    for algo in searched:
        assert list((tmp_path / "logs" / algo).glob("report_*.csv"))


def test_the_fallback_names_its_scripts_and_has_a_help(newcomer, capsys, monkeypatch):
    python, folder = newcomer
    errors = [run(python, "-m", "sb3_uatrpo.zoo", cwd=folder, code=2)]
    # record_training starts other processes, which would not know our algorithms
    for argument, code in (("trian", 2), ("record_training", 2), ("-h", 0), ("--help", 0)):
        monkeypatch.setattr(sys, "argv", ["sb3_uatrpo.zoo", argument])
        with pytest.raises(SystemExit, match=str(code)):
            main()
        printed, error = capsys.readouterr()
        errors += [error] if code else []
        assert ("record_video" in printed) == (code == 0)
    for said in errors:
        assert re.search(r"(SCRIPT: invalid choice: .*\btrain\b.*\benjoy\b|required: SCRIPT)", said)


def test_an_unsupported_action_space_fails_as_in_stable_baselines3(tmp_path):
    (tmp_path / "odd_tasks.py").write_text(
        "import gymnasium as gym\n"
        "class Odd(gym.Env):\n"
        "    observation_space = gym.spaces.Discrete(2)\n"
        "    action_space = gym.spaces.Dict(a=gym.spaces.Discrete(2))\n"
        "    def reset(self, seed=None, options=None): return 0, {}\n"
        "    def step(self, action): return 0, 0.0, True, False, {}\n"
        "gym.register('Odd-v0', entry_point=Odd)\n"
    )
    (tmp_path / "ppo.yml").write_text("Odd-v0:\n  policy: MlpPolicy\n  n_envs: 1\n  n_timesteps: 100\n")
    for settings in ("--algo uatrpo -params normalize:False", "--algo ppo -conf ppo.yml"):
        said = zoo(f"train --env Odd-v0 --gym-packages odd_tasks -n 100 {settings}", cwd=tmp_path, code=1)
        assert "The algorithm only supports" in said


def test_masks_in_the_observation_forbid_actions_everywhere(tmp_path):
    """In training, evaluations and enjoy: a forbidden action would end the command."""
    for file in (ROOT / "examples").glob("mask*"):
        shutil.copy(file, tmp_path)
    (tmp_path / "strict.py").write_text(
        "from masked_cards import Cards\n"
        "import masks_in_observation\n"
        "step = Cards.step\n"
        "def strict(self, action):\n"
        "    assert self.hand[action], 'this card is not in the hand'\n"
        "    return step(self, action)\n"
        "Cards.step = strict\n"
    )
    task = "--algo uatrpo --gym-packages strict --env MaskedCards-v0"
    said = zoo(
        f"train {task} -conf masked_cards.yml -n 2000 --eval-freq 1000 --eval-episodes 5",
        f"enjoy {task} -f logs --no-render -n 120",
        cwd=tmp_path,
    )
    assert "Eval num_timesteps=1000" in said
    assert "20 Episodes" in said
    # without the policy that applies them
    command = f"train {task} -conf masked_cards.yml -n 2000 -params \"policy:'MultiInputPolicy'\""
    assert "this card is not in the hand" in zoo(command, cwd=tmp_path, code=1)


# -------------------------------------------------------------------------------------------------------- registration


def entries_of(algo: str) -> dict[str, dict]:
    return yaml.safe_load((registration.HYPERPARAMS / f"{algo}.yml").read_text())


def is_mujoco(env_id: str) -> bool:
    return "mujoco" in str(gym.spec(env_id).entry_point)


def evaluated(policy_kwargs: str) -> dict:
    """As RL Zoo evaluates text."""
    return eval(policy_kwargs, {"__builtins__": {"dict": dict}})


def test_registering_twice_changes_nothing_and_overwrites_nothing():
    import rl_zoo3.exp_manager
    import rl_zoo3.hyperparams_opt
    import rl_zoo3.utils

    register()
    manager = rl_zoo3.exp_manager.ExperimentManager.__init__
    theirs = dict(rl_zoo3.utils.ALGOS)
    register()
    assert rl_zoo3.exp_manager.ExperimentManager.__init__ is manager
    assert theirs == rl_zoo3.utils.ALGOS
    assert rl_zoo3.utils.ALGOS["uatrpo"] is UATRPO

    module = types.ModuleType("rl_zoo3.utils")
    module.ALGOS = {"uatrpo": "somebody else's"}
    registration.patch(module)
    assert module.ALGOS == {**registration.ALGORITHMS, "uatrpo": "somebody else's"}

    module = types.ModuleType("rl_zoo3.hyperparams_opt")
    module.HYPERPARAMS_SAMPLER, module.HYPERPARAMS_CONVERTER = {"uatrpo": "theirs"}, {"uatrpo": "theirs"}
    registration.patch(module)
    assert module.HYPERPARAMS_SAMPLER == {**registration.SAMPLERS, "uatrpo": "theirs"}
    converters = dict.fromkeys(registration.SAMPLERS, search_space.convert_params)
    assert module.HYPERPARAMS_CONVERTER == {**converters, "uatrpo": "theirs"}


@pytest.mark.parametrize(("algo", "cls"), registration.ALGORITHMS.items())
def test_every_entry_makes_a_model(algo, cls):
    """Each entry names only arguments that the constructor takes, and values that it accepts."""
    entries = entries_of(algo)
    assert {"default", "Hopper-v4", "Walker2d-v5", "Humanoid-v4", "Ant-v5"} <= set(entries)
    assert algo == "uatrpo_small_batches" or {"CartPole-v1", "Pusher-v5"} <= set(entries)
    of_the_zoo = {"env_wrapper", "normalize", "n_envs", "n_timesteps", "policy", "policy_kwargs"}
    for env_id, entry in entries.items():
        assert "frame_stack" not in entry
        # the paper's take the length of the step from the trust region, whatever the task
        assert algo != "uatrpo_paper" or not {"shrinkage", "target_kl", "step_length_samples"} & set(entry), env_id
        kwargs = {key: value for key, value in entry.items() if key not in of_the_zoo}
        env = "Pendulum-v1" if kwargs.get("use_sde") else "CartPole-v1"
        # it has no effect on discrete actions, as a warning says; all MuJoCo tasks have continuous ones
        if "log_std_init" in entry.get("policy_kwargs", "") and env_id != "default":
            assert is_mujoco(env_id), env_id
        model = cls("MlpPolicy", env, device="cpu", **kwargs)
        assert model.n_steps * entry["n_envs"] % model.batch_size == 0, env_id


@pytest.mark.parametrize(
    ("preset", "algo", "env_id"),
    [
        (RECOMMENDED, "uatrpo", "default"),
        (RECOMMENDED_DISCRETE, "uatrpo", "CartPole-v1"),
        (RECOMMENDED_SMALL_BATCHES, "uatrpo_small_batches", "default"),
    ],
)
def test_a_preset_is_what_rl_zoo_runs(preset, algo, env_id):
    """An entry of the file, without what a constructor does not take."""
    entry = entries_of(algo)[env_id]
    for name in ("normalize", "n_timesteps", "policy"):
        entry.pop(name, None)
    assert entry.pop("n_envs") == 1
    if "policy_kwargs" in entry:
        entry["policy_kwargs"] = evaluated(entry["policy_kwargs"])
    assert preset == entry


def test_the_entries_for_small_batches_are_those_of_the_preset_with_four_changes():
    preset, small = entries_of("uatrpo"), entries_of("uatrpo_small_batches")
    assert len(small) == 13
    for env_id, entry in small.items():
        assert entry == {**preset[env_id], "n_envs": 1, "n_steps": 250, "target_kl": 0.005, "uncertainty_coef": 0}


def test_trpo_is_compared_at_the_same_settings():
    ours = entries_of("uatrpo")
    theirs = yaml.safe_load((ROOT / "benchmarks" / "results" / "recommended" / "trpo_matched.yml").read_text())
    assert len(theirs) == 6
    for env_id, entry in theirs.items():
        assert ours[env_id] == {**entry, "shrinkage": 0.75, "step_length_samples": "batch"}


def test_the_example_trains_with_rl_zoos_settings():
    entries = entries_of("uatrpo")
    default = entries.pop("default")
    tasks = [env_id for env_id in entries if is_mujoco(env_id)]
    assert len(tasks) > 12
    for env_id in tasks:
        entry = dict(entries[env_id])
        task = env_id.partition("-v")[0]
        settings = RECOMMENDED(**CHANGES.get(task, {}))
        assert entry.pop("n_envs") == N_ENVS.get(task, 1), env_id
        for name in ("normalize", "policy", "n_timesteps"):
            assert entry.pop(name) == default[name], env_id
        assert {**entry, "policy_kwargs": evaluated(entry["policy_kwargs"])} == settings, env_id


def test_a_search_tries_what_is_recommended():
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    sampled = [search_space.SAMPLERS["uatrpo"](study.ask(), 1, 1, {}) for _ in range(3)]
    assert sampled[1] != sampled[2]
    models = [UATRPO("MlpPolicy", "Pendulum-v1", **kwargs) for kwargs in (RECOMMENDED, sampled[1])]
    for name in (*search_space.RECOMMENDED_TRIAL.keys() & vars(models[0]).keys(), "gamma", "gae_lambda"):
        assert getattr(models[0], name) == pytest.approx(getattr(models[1], name)), name
    assert str(models[0].policy) == str(models[1].policy)
    assert models[0].policy.log_std.equal(models[1].policy.log_std)


@pytest.mark.parametrize(("n_envs", "n_steps"), [(2, 1000), (4, 500), (5, 250), (8, 250), (16, 250)])
def test_a_search_with_several_environments_tries_batches_of_the_recommended_size(n_envs, n_steps):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    tried = [search_space.SAMPLERS["uatrpo"](study.ask(), 1, n_envs, {}) for _ in range(2)][1]
    assert tried["n_steps"] == n_steps
    assert tried["target_kl"] == RECOMMENDED["target_kl"]


def test_the_study_of_the_small_tasks_has_them_all():
    """Every entry outside MuJoCo, with its own number of steps, and no seed with which an entry was chosen."""
    results = ROOT / "benchmarks" / "results"
    files = {algo: registration.HYPERPARAMS / f"{algo}.yml" for algo in registration.ALGORITHMS}
    files["uatrpo"] = results / "paper_batches.yml"
    study = read_study_file(results / "small_tasks" / "study.yml")
    specs = plan(**study, conf_files=[f"{algo}:{file}" for algo, file in files.items()])
    assert 0 not in {spec.seed for spec in specs}
    for algo, file in files.items():
        entries = yaml.safe_load(file.read_text())
        del entries["default"]
        small = [env_id for env_id in entries if not is_mujoco(env_id)]
        planned = {spec.env: spec.n_timesteps for spec in specs if spec.algo == algo}
        assert planned == {env_id: entries[env_id]["n_timesteps"] for env_id in small}


def test_the_files_are_visible_at_the_top():
    assert (ROOT / "hyperparams").resolve() == registration.HYPERPARAMS


@pytest.mark.parametrize(
    ("cls", "sample"), [(cls, registration.SAMPLERS[algo]) for algo, cls in registration.ALGORITHMS.items()]
)
def test_every_sample_fits_any_number_of_environments(cls, sample):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for n_envs in range(1, 31):
        trial = study.ask()
        params = sample(trial, 2, n_envs, {})
        assert params["n_steps"] * n_envs % params["batch_size"] == 0
        # RL Zoo makes the arguments of its best trial anew from the trial's numbers
        assert search_space.convert_params(trial.params) == params
        # shown in the report
        for name in ("gamma", "gae_lambda"):
            assert trial.user_attrs[name] == params[name] == 1.0 - trial.params[f"one_minus_{name}"]
        activation_fn = {"tanh": th.nn.Tanh, "relu": th.nn.ReLU}[trial.params["activation_fn"]]
        assert params["policy_kwargs"]["activation_fn"] is activation_fn
        cls("MlpPolicy", "Pendulum-v1", device="cpu", **params)
