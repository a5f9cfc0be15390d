"""Every example and benchmark runs, shortened, as a user would start it: a script, from another folder."""

import configparser
import ctypes.util
import gzip
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import gymnasium as gym
import nbformat
import numpy as np
import pytest
import yaml
from gymnasium import spaces
from nbclient import NotebookClient
from PIL import Image, ImageSequence
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import load_results
from stable_baselines3.common.vec_env import VecNormalize
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sb3_uatrpo import UATRPO, MatchedTRPO
from sb3_uatrpo.study import read_study
from sb3_uatrpo.study.plan import plan
from sb3_uatrpo.study.run import run_study
from sb3_uatrpo.study.statistics import final_return
from tests.forked import run_code, run_script, runs_of_studies
from tests.installing import run as run_command
from tests.study.synthetic import write_run

EXAMPLES = Path(__file__).parents[1] / "examples"
BENCHMARKS = EXAMPLES.parent / "benchmarks"
#: A run of RL Zoo
AGENT = EXAMPLES.parent / "docs" / "agents" / "uatrpo" / "Hopper-v4_1"


def needs_agent() -> None:
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        pytest.skip("NumPy 2 saved this agent")


def path_of(script: str) -> Path:
    return next(path for folder in (EXAMPLES, BENCHMARKS) if (path := folder / script).exists())


def run(folder: Path, words: str, code: int = 0) -> str:
    """What a script printed; warnings are errors, but for the one about old tasks, which each script filters."""
    script, *args = words.split()
    ended = run_script(path_of(script), *args, cwd=folder, OMP_NUM_THREADS="1", MPLCONFIGDIR=str(folder))
    output = ended.stdout + ended.stderr
    assert ended.code == code, output
    assert "Warning" not in output
    assert ("Traceback" in output) == (code == 1), output
    return output


@pytest.fixture
def run_here(tmp_path, capsys, monkeypatch):
    """The same in this process, where no other start is needed."""

    def find(words: str, code: int = 0) -> str:
        script = path_of(words.split()[0])
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(script.parent)
        monkeypatch.setattr(sys, "argv", words.split())
        with mock.patch.dict(os.environ), warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            with pytest.raises(SystemExit) if code else nullcontext() as end:
                runpy.run_path(str(script), run_name="__main__")
        assert not code or end.value.code == code
        said = "".join(capsys.readouterr())
        assert "Warning" not in said
        assert "Traceback" not in said
        return said

    return find


@pytest.fixture
def refusal(run_here):
    """The last line of what a script says of arguments that it refuses, in this process, since it does so at once."""
    return lambda words: run_here(words, code=2).splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("shortest.py --n-timesteps 2000", "return: "),
        ("resume.py --n-timesteps 2000", "resumed at step 2000 and trained to step 4000"),
        ("custom_network.py --n-timesteps 2000", "episodes: "),
        ("dict_observations.py --n-timesteps 1000", "episodes: "),
        ("images.py --n-timesteps 1000", "rewards are random"),
        ("masks_in_observation.py --n-timesteps 2000 --n-games 50", " 0 of 2300 actions invalid"),
        ("subproc_envs.py --n-timesteps 2000", "episodes: -"),
        ("vector_env.py --n-timesteps 4000 --n-envs 10", "episodes: -"),
    ],
)
def test_trains(tmp_path, words, said):
    """And the last line says what came out."""
    assert said in run(tmp_path, words).splitlines()[-1]


def test_masks_allow_no_invalid_action(tmp_path):
    best, masked, unmasked = run(tmp_path, "masked_cards.py --n-timesteps 2000 --n-games 50").splitlines()
    assert 4.0 < float(best.split()[-2]) < 4.6
    assert masked.endswith(" and 0 of 2300 actions invalid")
    assert int(unmasked.split()[3]) > 500


def test_read_uncertainty(tmp_path):
    words = "read_uncertainty.py --picture picture.png --n-timesteps"
    assert "uncertainty_share" in run(tmp_path, f"{words} 2000")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    # a single update
    assert "1000.0" in run(tmp_path, f"{words} 1000")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    said = run(folder, "train_mujoco.py --n-timesteps 2000 --eval-freq 1000 --seed 1")
    for name in ("model.zip", "progress.csv", "learning_curve.png", "final return", "watch_agent.py"):
        assert name in said
    return folder / "runs" / "uatrpo_Hopper-v4_1"


def test_train_mujoco_leaves_what_it_says(trained):
    for name in ("model.zip", "vecnormalize.pkl", "progress.csv", "learning_curve.png", "evaluations.npz"):
        assert (trained / name).stat().st_size > 0
    assert list(trained.glob("events.out.tfevents.*"))
    assert list((trained / "checkpoints").glob("*vecnormalize*.pkl"))


def test_training_needs_only_the_extras_that_make_installs(tmp_path):
    """The other extras' packages cannot be imported here."""
    config = configparser.ConfigParser()
    config.read(EXAMPLES.parent / "setup.cfg")
    extras = {name: re.findall(r"^[\w-]+", of, re.MULTILINE) for name, of in config["options.extras_require"].items()}
    allowed = {*extras["train"], "gymnasium"}
    others = {name.replace("-", "_") for names in extras.values() for name in names if name not in allowed}
    assert {"scipy", "filelock", "rl_zoo3", "onnxruntime"} <= others
    start = (
        f"import sys; sys.modules.update(dict.fromkeys({sorted(others)})); sys.path.insert(0, {str(EXAMPLES)!r}); "
        "from train_mujoco import main; main(['--n-timesteps', '2000', '--eval-freq', '1000'])"
    )
    ended = run_code(start, cwd=tmp_path)
    assert (ended.code, "final return" in ended.stdout) == (0, True), ended.stderr


@pytest.mark.parametrize(
    ("words", "missing", "said"),
    [
        (f"export_onnx.py {AGENT}", "onnxscript", 'pip install ".[mujoco,onnx]"'),
        (f"film_agents.py {AGENT}", "rl_zoo3", 'pip install ".[mujoco,study]"'),
        ("read_uncertainty.py", "pandas", 'pip install ".[train]"'),
        ("train_mujoco.py", "mujoco", 'pip install ".[mujoco,train]"'),
        ("vector_env.py --envpool Pendulum-v1", "envpool", "pip install envpool"),
        ("track_run.py --trackers wandb", "wandb", "pip install wandb"),
    ],
)
def test_a_missing_package_is_one_clear_line(tmp_path, words, missing, said):
    start = f"import sys, runpy; sys.modules[{missing!r}] = None; sys.argv = {words.split()}"
    start += (
        f"; sys.path.insert(0, {str(EXAMPLES)!r}); runpy.run_path(sys.path[0] + '/' + sys.argv[0], run_name='__main__')"
    )
    ended = run_code(start, cwd=tmp_path)
    assert ended.code in (1, 2)
    assert "Traceback" not in ended.stderr
    assert re.search(f"{missing}.*{re.escape(said)}", ended.stderr.splitlines()[-1])


def test_swimmer_is_trained_from_two_environments_as_in_rl_zoo(tmp_path):
    """Evaluations come after as many steps as with one, and a folder's next run forgets the second one's episodes."""
    words = "train_mujoco.py --folder run --no-progress-bar"
    run(tmp_path, f"{words} --env Swimmer-v4 --n-timesteps 2000 --eval-freq 2000")
    assert (np.load(tmp_path / "run" / "evaluations.npz")["timesteps"] == [2000]).all()
    assert len(load_results(str(tmp_path / "run"))) == 2
    run(tmp_path, f"{words} --env HalfCheetah-v4 --n-timesteps 1000 --eval-freq 0")
    assert len(load_results(str(tmp_path / "run"))) == 2


def test_any_saved_model_is_watched(tmp_path):
    """With and without statistics of VecNormalize, as train_mujoco.py or CheckpointCallback name them, or otherwise."""
    env = VecNormalize(make_vec_env("CartPole-v1"))
    env.obs_rms.mean[:] = 100
    model = UATRPO("MlpPolicy", env, n_steps=100, device="cpu", seed=0)
    model.learn(100)
    said = []
    for name, statistics, option in (
        ("alone", "none", ""),
        ("cartpole", "other.pkl", "--statistics other.pkl"),
        ("cartpole", "cartpole.pkl", ""),
        ("best_model", "best_vecnormalize.pkl", ""),
        ("rl_model_200_steps", "rl_model_vecnormalize_200_steps.pkl", ""),
    ):
        model.save(tmp_path / name)
        if statistics != "none":
            env.save(str(tmp_path / statistics))
        words = f"watch_agent.py {name}.zip --env CartPole-v1 --no-render --n-episodes 3 {option}"
        first, *episodes = run(tmp_path, words).splitlines()
        assert first.endswith(f"statistics of VecNormalize: {statistics}")
        said.append(episodes)
    # observations 100 below the mean are all clipped to the same
    assert said[0] != said[1] == said[2] == said[3] == said[4]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study of one run with its model."""
    folder = tmp_path_factory.mktemp("study")
    with runs_of_studies():
        assert not run_study(plan(["uatrpo"], ["CartPole-v1"], [0], 500, eval_freq=0), folder, save_models=True)
    return folder


def test_agents_are_collected_with_model_cards(study, tmp_path):
    run(tmp_path, f"collect_agents.py {study} --output agents --n-episodes 3")
    folder = tmp_path / "agents" / "uatrpo" / "CartPole-v1_1"
    model = UATRPO.load(folder / "CartPole-v1.zip", gym.make("CartPole-v1"), device="cpu")
    assert model.sketch.omega.numel() == 0
    assert not model.sketch.y_fisher.any()
    (trained,) = study.rglob("CartPole-v1.zip")
    assert (folder / "CartPole-v1.zip").stat().st_size < min(1_000_000, 0.9 * trained.stat().st_size)

    _, metadata, card = (folder / "README.md").read_text("utf-8").split("---\n", 2)
    assert yaml.safe_load(metadata)["license"] == "mit"
    cells = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", card, re.M))
    tables = read_study(study)
    settings = json.loads(tables.runs.hyperparameters[0])
    final = final_return(tables.episodes.step, tables.episodes["return"], 500)
    vec_env = make_vec_env("CartPole-v1", seed=2_000_000)
    returns, _ = evaluate_policy(model, vec_env, n_eval_episodes=3, return_episode_rewards=True)
    found = f"{np.mean(returns):.0f} ± {np.std(returns, ddof=1):.0f}"
    assert (
        cells.items()
        >= {
            **{f"`{name}`": f"`{value}`" for name, value in settings.items()},
            "training": "500 steps, seed 0",
            "mean training return over the last tenth of the steps": f"{final:.0f}",
            "return over 3 deterministic episodes, environment seed 2000000": found,
        }.items()
    )
    assert f"](uatrpo/CartPole-v1_1/README.md) | {found} |" in (tmp_path / "agents" / "README.md").read_text()
    # the agent can be trained further
    model.learn(1)


def test_agents_are_filmed_side_by_side(study, tmp_path):
    """One from a study's folder, one from a file."""
    MatchedTRPO("MlpPolicy", "Pendulum-v1", device="cpu").save(tmp_path / "pendulum")
    words = f"film_agents.py {study / 'plain'} Pendulum-v1=pendulum.zip --algo trpo_matched"
    words += " --seconds 2 --fps 10 --height 40"
    assert "agents.gif" in run(tmp_path, words)
    with Image.open(tmp_path / "agents.gif") as gif:
        # CartPole is half as wide again as it is high, and Pendulum square
        assert gif.width == 60 + 40
        frames = [np.asarray(frame.convert("L"), float) for frame in ImageSequence.Iterator(gif)]
        assert sum(frame.info["duration"] for frame in ImageSequence.Iterator(gif)) == 2000
    for half in (slice(0, 60), slice(60, 100)):
        assert max(np.abs(frame[:40, half] - frames[0][:40, half]).max() for frame in frames) > 50

    refused = run(tmp_path, f"{words} --max-megabytes 0.001 --output b.gif", code=2)
    assert "lower --seconds, --fps, --height or --colors" in refused
    assert not (tmp_path / "b.gif").exists()


@pytest.mark.skipif(ctypes.util.find_library("EGL") is None, reason="MuJoCo renders without a screen only with EGL")
def test_a_mujoco_agent_stays_in_the_picture(trained, tmp_path):
    said = run(tmp_path, f"film_agents.py Hopper-v4={trained / 'model.zip'} --seconds 1 --fps 10 --height 60")
    assert ", with statistics of VecNormalize" in said

    # 100 m from the start, where an agent may get to
    script = """
import gymnasium as gym
from film_agents import rendering
env = gym.make("Hopper-v4", **rendering("Hopper-v4"))
env.reset(seed=0)
env.unwrapped.init_qpos[0] = 100
env.unwrapped.set_state(env.unwrapped.init_qpos, env.unwrapped.init_qvel)
red, _, blue = env.render().astype(int).transpose(2, 0, 1)
print((red > blue + 50).sum())
"""
    # the Hopper is orange, and nothing else is
    assert int(run_code(script, cwd=tmp_path, MUJOCO_GL="egl").stdout) > 1000


@pytest.mark.parametrize("kind", ["a run", "a run of RL Zoo", "a model of RL Zoo", "discrete actions"])
def test_an_exported_policy_acts_as_predict_does(trained, tmp_path, kind):
    """The script compares them on the observations of a run, with and without statistics of VecNormalize."""
    if "RL Zoo" in kind:
        needs_agent()
    if kind == "discrete actions":
        agent, env_id, statistics = tmp_path / "cartpole.zip", "CartPole-v1", "none"
        UATRPO("MlpPolicy", env_id, device="cpu").save(agent)
    else:
        agent, statistics = {
            "a run": (trained, trained / "vecnormalize.pkl"),
            "a run of RL Zoo": (AGENT, AGENT / "Hopper-v4" / "vecnormalize.pkl"),
            "a model of RL Zoo": (AGENT / "Hopper-v4.zip", AGENT / "Hopper-v4" / "vecnormalize.pkl"),
        }[kind]
        env_id = "Hopper-v4"
    said = run(tmp_path, f"export_onnx.py {agent} --env {env_id} --output policy.onnx --n-steps 200")
    assert f"statistics of VecNormalize: {statistics}\n" in said
    assert (tmp_path / "policy.onnx").stat().st_size < 100_000
    assert float(said.split("200 observations:")[1]) < 1e-5


def test_a_run_is_tracked(tmp_path):
    run(tmp_path, "track_run.py --n-timesteps 3000 --folder tracked")
    events = EventAccumulator(str(tmp_path / "tracked")).Reload()
    # an update's values are written after the next rollout
    assert [event.step for event in events.Scalars("train/kl_ratio")] == [2000, 3000]


def test_the_printed_command_watches_the_agent(tmp_path):
    """Literally, from any folder, for the baseline too; only what opens a window is taken out of it."""
    words = "train_mujoco.py --algo trpo_matched --n-timesteps 1000 --eval-freq 0 --no-progress-bar"
    (line,) = (line for line in run(tmp_path, words).splitlines() if "watch the agent" in line)
    python, script, *words = shlex.split(line.split(":", 1)[1])
    assert (python, Path(script)) == (sys.executable, EXAMPLES / "watch_agent.py")
    output = run(tmp_path, " ".join(["watch_agent.py", *words, "--no-render --n-episodes 2"]))
    assert output.count(": return ") == 2
    assert output.splitlines()[-1].startswith("mean return: ")


def test_an_interrupted_training_keeps_what_it_learned(tmp_path):
    command = [sys.executable, str(EXAMPLES / "train_mujoco.py"), "--eval-freq", "0", "--folder", "kept"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # where these tests run in the background, interrupts are ignored, and children would inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    progress = tmp_path / "kept" / "progress.csv"
    while not (progress.exists() and progress.stat().st_size > 0):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "interrupted after" in output
    assert (tmp_path / "kept" / "model.zip").exists()


def test_measure_direction_quality(tmp_path, refusal, run_here, monkeypatch):
    """Every variant is scored, and a complete measurement is not made again."""
    words = "measure_direction_quality.py --env Pendulum-v1 --seeds 1 --updates 1 2 --n-steps 500 --folder dq"
    words += " --reference-rollouts 1 --test-rollouts 2"
    first = run(tmp_path, words)
    for name in ("plain gradient", "paper", "shrinkage 0.97", "TRPO, all steps, damping 0.1"):
        assert f"\n{name} " in first
    file = tmp_path / "dq" / "Pendulum-v1_1.json"
    record = json.loads(file.read_text())
    # as many steps as one and two updates have with 1,000
    assert list(record["checkpoints"]) == ["2", "4"]
    for variants in record["checkpoints"].values():
        assert len(variants["shrinkage 0.75"]["score"]) == 2
        assert variants["paper"]["kl_ratio"] != variants["paper, c = 0"]["kl_ratio"]
    assert "| shrinkage 0.75 |" in (tmp_path / "dq" / "report.md").read_text("utf-8")
    # once in a process of its own is enough
    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", lambda n, mp_context: ThreadPoolExecutor(n))
    assert " measured" not in run_here(words)
    # of earlier versions, which said less
    older = {name: record[name] for name in ("env", "seed", "checkpoints")}
    without_paper = {n: {k: v for k, v in of.items() if k != "paper"} for n, of in older["checkpoints"].items()}
    for content, changed, name in (
        (record, "--updates 2", "updates"),
        (record, "--only paper", "variants"),
        (record, "--n-steps 1000", "n_steps"),
        (record, "--test-rollouts 1", "rollouts"),
        (older, "", "n_steps"),
        ({**older, "checkpoints": without_paper, "n_steps": 500}, "", "variants"),
    ):
        file.write_text(json.dumps(content))
        assert f"was measured with other {name}: " in refusal(f"{words} {changed}")

    chosen = run_here(f"{words} --only paper --folder few")
    shown = re.findall(r"^(plain gradient|paper|shrinkage|TRPO)", chosen, re.M)
    assert shown == ["plain gradient", "paper", "shrinkage"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Folders and files of which scripts are told, but not what they want."""
    folder = tmp_path_factory.mktemp("folders")
    (folder / "empty").mkdir()
    UATRPO("MlpPolicy", "CartPole-v1", device="cpu").save(folder / "cartpole")
    write_run(folder / "failed", failed=True)
    write_run(folder / "ppo", "ppo")
    write_run(folder / "long", "ppo", n_timesteps=77_000)
    for seed in (0, 1):
        write_run(folder / f"paper_{seed}", "uatrpo_paper", seed=seed)
    place = write_run(folder / "preset")
    write_run(folder / "damaged")
    (folder / "damaged" / place.relative_to(folder / "preset") / "updates.csv.gz").write_bytes(
        gzip.compress(b"step\nsoon\n")
    )
    return folder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("benchmark_commits.py CHECKOUT @empty", "no sb3_uatrpo in"),
        ("benchmark_recommended.py --rounds 0", "--rounds must be at least 1, but it is 0"),
        ("benchmark_scaling.py --sweep networks", "--sweep must be among 'network', "),
        ("benchmark_scaling.py --beside-others --n-steps 120", "--n-steps must be a multiple of 50"),
        ("benchmark_scaling.py --rounds 0", "--rounds must be at least 1"),
        ("benchmark_speed.py --repetitions 0", "at least 1"),
        ("benchmark_speed.py --n-envs 3", "must divide --n-steps=1000"),
        ("collect_agents.py @nowhere", "nowhere: no such folder"),
        ("collect_agents.py @preset", "run the study with --save-models"),
        ("collect_agents.py @preset --seed 7", "no finished run of uatrpo with seed 7"),
        ("compare_repetitions.py --folder @paper_0 --repeated @nowhere", "no such folder"),
        ("compare_repetitions.py --folder @paper_0 --repeated @paper_1", "no finished run of"),
        ("export_onnx.py @cartpole.zip --env Pendulum-v1", "cartpole.zip was not trained on Pendulum-v1"),
        ("export_onnx.py @nowhere", "there is no file"),
        ("export_onnx.py AGENT --output nowhere/policy.onnx", "there is no folder nowhere"),
        ("film_agents.py AGENT --output agents.mp4", "a name that ends with .gif, but it is agents.mp4"),
        ("film_agents.py Hoper-v4=AGENT/Hopper-v4.zip", "Hopper-v4.zip: Environment `Hoper` doesn't exist"),
        ("film_agents.py Hopper-v4=AGENT/Hopper-v4.zip --algo trpo_matched", "another algorithm"),
        ("film_agents.py Swimmer-v4=AGENT/Hopper-v4.zip", "spaces must have the same shape"),
        ("judge_study.py --folder @paper_0 --noise 2", "no finished runs with noise 2"),
        ("judge_study.py --folder @paper_0 --pair uatrpo_paper ppo", "--pair: there are no runs of 'ppo', only of"),
        ("judge_study.py --folder @paper_0 @long", "--folder: "),
        ("measure_direction_quality.py --env NoSuch-v0", "NoSuch-v0"),
        ("measure_direction_quality.py --only yours", "argument --only: invalid choice: 'yours'"),
        ("measure_direction_quality.py --updates 5 3", "--updates must ascend"),
        ("read_uncertainty.py --env Hoper-v4", "--env: Environment `Hoper` doesn't exist"),
        ("read_uncertainty.py --picture nowhere/picture.png", "there is no folder nowhere"),
        ("resume.py --n-timesteps 0", "--n-timesteps must be at least 1"),
        ("save_tables.py @damaged tables", "cannot be read"),
        ("save_tables.py @nowhere tables", "no such folder"),
        ("show_recommended.py --folder @nowhere", "no such folder"),
        ("show_recommended.py --folder @ppo", "there are no finished runs of uatrpo"),
        ("show_recommended.py --folder @preset --newer @nowhere", "nowhere: no such folder"),
        ("show_recommended.py --folder @preset --newer @empty", "neither a study nor a folder that RL Zoo wrote"),
        ("show_recommended.py --report --folder @ppo", "--report is about all runs"),
        ("subproc_envs.py --n-envs 0", "--n-envs must be at least 1"),
        ("tabulate_search.py --folder @empty", "neither a study"),
        ("tabulate_search.py --folder @failed", "--folder: there are no finished runs in"),
        ("tabulate_search.py --folder @nowhere", "no such folder"),
        ("train_mujoco.py --env Hoper-v4", "--env: Environment `Hoper` doesn't exist"),
        ("train_mujoco.py --folder @cartpole.zip", "--folder: [Errno 17] File exists"),
        ("train_mujoco.py --n-timesteps 0", "--n-timesteps must be at least 1"),
        ("vector_env.py --n-envs 3000", "--n-envs must be from 1 to 2000"),
        ("watch_agent.py @cartpole.zip --env Pendulum-v1", "cartpole.zip was not trained on Pendulum-v1"),
        ("watch_agent.py @nowhere", "there is no file"),
        ("watch_agent.py AGENT --algo trpo_matched", "a file that MatchedTRPO saved, but another"),
        ("watch_agent.py AGENT --env Hoper-v4", "--env: Environment `Hoper` doesn't exist"),
        ("watch_agent.py AGENT --env Swimmer-v4", "was not trained on Swimmer-v4"),
        ("watch_agent.py AGENT --env nowhere:Task-v0", "--env: No module named 'nowhere'"),
        ("watch_agent.py AGENT --env Hopper-v4", "there is no screen: add --no-render"),
    ],
)
def test_bad_input_is_one_clear_line(refusal, folders, words, said, monkeypatch):
    if "AGENT" in words:
        needs_agent()
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name, path in {"@": f"{folders}/", "AGENT": str(AGENT), "CHECKOUT": str(EXAMPLES.parent)}.items():
        words = words.replace(name, path)
    assert said in refusal(words)


def test_the_notebook_runs_and_is_kept_with_its_pictures(tmp_path, monkeypatch):
    def check(notebook: nbformat.NotebookNode) -> None:
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        outputs = [output for cell in code for output in cell.outputs]
        assert [cell.execution_count for cell in code] == [1, 2, 3, 4, 5, 6, 7]
        assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
        # nothing is said to stderr, warnings included
        assert {output.name for output in outputs if output.output_type == "stream"} == {"stdout"}

    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    # its first cell installs the package only where it is not there
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    path = EXAMPLES / "pendulum.ipynb"
    assert path.stat().st_size < 300_000
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    check(notebook)
    (settings,) = (cell for cell in notebook.cells if "N_TIMESTEPS = 100_000" in cell.source)
    settings.source = settings.source.replace("100_000", "4_000")
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    check(notebook)


def test_benchmark_speed(tmp_path):
    """Every contender and every stage; what the clocks say is not asserted."""
    words = "--env Hopper-v4 --n-steps 200 --repetitions 2 --warm-up 1 --callbacks"
    output = run(tmp_path, f"benchmark_speed.py {words}")
    for name in ("UATRPO", "UATRPO, general", "MatchedTRPO", "TRPO", "PPO", "A2C", "bare environment"):
        assert f" {name} " in output
    assert (tmp_path / "runs" / "speed" / "speed.png").stat().st_size > 10_000
    records = json.loads((tmp_path / "runs" / "speed" / "speed.json").read_text())
    assert all(stages[name] > 0 for stages in records["breakdown"] for name in ("critic", "env", "policy", "buffer"))


def test_benchmark_commits(tmp_path):
    """This checkout beside itself; what the clocks say is not asserted."""
    words = "--env Pendulum-v1 --rounds 2 --warm-up 1 --n-envs 2 --n-steps 200"
    output = run(tmp_path, f"benchmark_commits.py {EXAMPLES.parent} {EXAMPLES.parent} {words}")
    assert output.count("  ratio ") == 2


def test_benchmark_scaling(tmp_path):
    # it starts processes that import it
    command = [sys.executable, BENCHMARKS / "benchmark_scaling.py", "--sweep", "steps", "--most-steps", "5000"]
    output = run_command(*command, cwd=tmp_path)
    assert len(re.findall(r"^ *steps +5510 +200 +[15]000 ", output, re.MULTILINE)) == 2
    rows = json.loads((tmp_path / "runs" / "speed" / "scaling.json").read_text())
    assert [(row["n_steps"], row["n_envs"]) for row in rows] == [(1000, 1), (5000, 1)]


def test_benchmark_scaling_beside_others(tmp_path):
    """Every network and method; what the clocks say is not asserted."""
    words = "--beside-others --env Pendulum-v1 --n-steps 100 --rounds 1 --warm-up 0"
    output = run(tmp_path, f"benchmark_scaling.py {words}")
    methods = ["UATRPO", "MatchedTRPO", "TRPO", "TRPO, 1 of 10 steps", "PPO"]
    for name in methods:
        assert f" {name} " in output or f" {name}\n" in output
    found = json.loads((tmp_path / "runs" / "speed" / "scaling_beside_others.json").read_text())
    assert {"machine", "cores", "threads", "torch", "sb3_contrib"} <= found["about"].keys()
    rows = found["rows"]
    assert [row["method"] for row in rows] == methods * 4
    assert [row["network"] for row in rows[::5]] == ["64×64", "256×256", "400×300", "512×512"]
    assert all(row["ms"] == pytest.approx(np.median(row["each"])) and len(row["each"]) == 1 for row in rows)


def test_the_environments_of_a_batch_change_together(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from vector_env import BatchVecEnv

    class Batch:
        observation_space = action_space = spaces.Box(-1.0, 1.0, (1,))
        gain = 1.0

        def doubled(self, x):
            return 2 * x

    env = BatchVecEnv(Batch(), 3)
    env.set_attr("gain", 5.0)
    assert env.get_attr("gain") == [5.0] * 3
    assert env.env_method("doubled", 4) == [8] * 3
    with pytest.raises(ValueError, match=r"indices must be those of all 3 environments, but they are \[1\]"):
        env.set_attr("gain", 0.0, indices=[1])
    assert env.get_attr("gain") == [5.0] * 3
