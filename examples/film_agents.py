"""
Film up to four trained agents side by side, as one small GIF.

    python -m sb3_uatrpo.study run --folder runs/film --algo uatrpo --env Hopper-v4 Walker2d-v4 --save-models
    python examples/film_agents.py runs/film/plain --output agents.gif
    python examples/film_agents.py Hopper-v4=runs/uatrpo_Hopper-v4_0/model.zip CartPole-v1=cartpole.zip

An agent is a folder that RL Zoo or a study with ``--save-models`` wrote, or ``TASK=FILE`` for a saved model. The
statistics of VecNormalize are read from the folder; for a FILE, from the ``.pkl`` file of the same name or from
``vecnormalize.pkl`` beside it. The agents act deterministically and in real time. A new episode follows when one ends.

MuJoCo renders without a screen by EGL, or with ``MUJOCO_GL=osmesa`` by OSMesa, if the library is installed.
"""

import argparse
import io
import os
import sys
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import gymnasium as gym
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize
from watch_agent import check_environment, find_statistics, has_screen

try:
    import yaml
    from PIL import Image, ImageDraw, ImageFont
    from rl_zoo3.utils import ALGOS, create_test_env, get_saved_hyperparams

    from sb3_uatrpo.zoo import register
except ModuleNotFoundError as error:
    sys.exit(f'{error}: run pip install ".[mujoco,study]" in a clone of sb3_uatrpo')

MAX_AGENTS = 4
# Height of the line with the names of the tasks, in pixels
CAPTION = 16


@dataclass(frozen=True)
class Agent:
    """
    A trained model in its task.

    :param env_id: Gymnasium's name of the task
    :param model: acts on the observations of ``env``
    :param env: one environment that renders arrays, with the statistics and wrappers of the training
    """

    env_id: str
    model: BaseAlgorithm
    env: VecEnv


def set_up_rendering() -> None:
    """Render off-screen if there is no display, and pass on MuJoCo's warnings as ``train_mujoco.py`` does."""
    if not has_screen():
        os.environ.setdefault("MUJOCO_GL", "egl")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    with suppress(ImportError):
        import mujoco
        from train_mujoco import warn_of_mujoco

        mujoco.set_mju_user_warning(warn_of_mujoco)


def rendering(env_id: str) -> dict[str, str]:
    """
    :param env_id: Gymnasium's name of the task
    :return: arguments of the environment with which it renders arrays
    """
    # the default camera of Gymnasium's MuJoCo tasks stands still, and agents walk out of the picture
    follows = str(gym.spec(env_id).entry_point).startswith("gymnasium.envs.mujoco")
    return {"render_mode": "rgb_array"} | ({"camera_name": "track"} if follows else {})


def load_run(run: Path, seed: int) -> Agent:
    """
    :param run: folder of one run, as RL Zoo writes it
    :param seed: seed of the environment
    :return: its agent
    """
    (arguments_file,) = run.glob("*/args.yml")
    # args.yml holds an OrderedDict; RL Zoo reads it in the same way
    arguments = yaml.load(arguments_file.read_text(), yaml.UnsafeLoader)
    hyperparams, statistics = get_saved_hyperparams(str(arguments_file.parent), test_mode=True)
    env_kwargs = arguments["env_kwargs"] or hyperparams.pop("env_kwargs", {})
    env = create_test_env(
        arguments["env"],
        stats_path=statistics,
        seed=seed,
        hyperparams=hyperparams,
        env_kwargs=rendering(arguments["env"]) | env_kwargs,
    )
    model = ALGOS[arguments["algo"]].load(run / f"{arguments_file.parent.name}.zip", device="cpu")
    return Agent(arguments["env"], model, env)


def load_file(env_id: str, file: Path, algo: str, seed: int) -> Agent:
    """
    :param env_id: Gymnasium's name of the task
    :param file: a saved model
    :param algo: RL Zoo's name of its algorithm
    :param seed: seed of the environment
    :return: its agent
    """
    env = create_test_env(env_id, seed=seed, hyperparams={}, env_kwargs=rendering(env_id))
    if (statistics := find_statistics(file)) is not None:
        env = VecNormalize.load(str(statistics), env)
        env.training = False
    return Agent(env_id, ALGOS[algo].load(file, device="cpu"), env)


def film(agent: Agent, n_frames: int, fps: float, height: int) -> list[Image.Image]:
    """
    :param agent: it acts deterministically, from the start of an episode
    :param n_frames: number of frames
    :param fps: frames per second of the task's own time
    :param height: height of a frame in pixels; the width follows from the task
    :return: the frames
    """
    steps_per_frame = agent.env.get_attr("metadata")[0]["render_fps"] / fps
    frames: list[Image.Image] = []
    observations = agent.env.reset()
    n_steps = 0
    while len(frames) < n_frames:
        if n_steps >= len(frames) * steps_per_frame:
            rendered = agent.env.render()
            assert rendered is not None
            image = Image.fromarray(rendered)
            frames.append(image.resize((round(height * image.width / image.height), height), Image.Resampling.LANCZOS))
        actions, _ = agent.model.predict(observations, deterministic=True)  # type: ignore[arg-type]
        observations, _, _, _ = agent.env.step(actions)
        n_steps += 1
    return frames


def side_by_side(films: dict[str, list[Image.Image]]) -> list[Image.Image]:
    """
    :param films: for each name, its frames; all films have the same number of frames, and all frames the same height
    :return: the frames beside each other, each above its name
    """
    font = ImageFont.load_default(size=CAPTION - 4)
    joined = []
    for frames in zip(*films.values(), strict=True):
        canvas = Image.new("RGB", (sum(frame.width for frame in frames), frames[0].height + CAPTION), "white")
        draw = ImageDraw.Draw(canvas)
        left = 0
        for name, frame in zip(films, frames, strict=True):
            canvas.paste(frame, (left, 0))
            draw.text((left + frame.width // 2, frame.height), name, fill="black", font=font, anchor="ma")
            left += frame.width
        joined.append(canvas)
    return joined


def encode(frames: list[Image.Image], fps: float, colors: int) -> bytes:
    """
    :param frames: frames of equal size
    :param fps: frames per second
    :param colors: size of the palette, which all frames share: as nothing is dithered, still regions then cost nothing
    :return: an endless GIF
    """
    some = frames[:: max(1, len(frames) // 8)]
    sample = Image.new("RGB", (some[0].width, some[0].height * len(some)))
    for i, frame in enumerate(some):
        sample.paste(frame, (0, i * frame.height))
    # the default method spends the palette on shades of the floor
    palette = sample.quantize(colors, Image.Quantize.FASTOCTREE)
    first, *others = (frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames)
    gif = io.BytesIO()
    first.save(gif, "GIF", save_all=True, append_images=others, duration=1000 / fps, loop=0)
    return gif.getvalue()


def main(args: list[str] | None = None) -> Path:
    register()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", nargs="+", metavar="AGENT", help="FOLDER, or TASK=FILE")
    parser.add_argument("--algo", choices=sorted(ALGOS), default="uatrpo", help="algorithm of TASK=FILE")
    parser.add_argument("--output", type=Path, default=Path("agents.gif"))
    parser.add_argument("--seconds", type=float, default=5.0, help="default: %(default)s")
    parser.add_argument("--fps", type=float, default=12.5, help="frames per second; default: %(default)s")
    parser.add_argument("--height", type=int, default=150, help="height of the frames in pixels; default: %(default)s")
    parser.add_argument("--colors", type=int, default=64, help="size of the palette, at most 256; default: %(default)s")
    parser.add_argument(
        "--max-megabytes", type=float, default=1.5, help="write no GIF larger than this; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the environments")
    parser.add_argument("--gym-packages", nargs="+", default=[], help="modules that register environments of your own")
    options = parser.parse_args(args)
    for name in options.gym_packages:
        import_module(name)
    for name in ("seconds", "fps", "height", "max_megabytes"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, but it is {getattr(options, name)}")
    if not 2 <= options.colors <= 256:
        parser.error(f"--colors must be from 2 to 256, but it is {options.colors}")
    if options.output.suffix.lower() != ".gif":
        parser.error(f"--output must be a name that ends with .gif, but it is {options.output}")
    if not options.output.parent.is_dir():
        parser.error(f"--output: there is no folder {options.output.parent}")
    set_up_rendering()

    # paths first: nothing is loaded before all are known to exist
    sources: list[tuple[str, Path]] = []
    for text in options.agents:
        # names of folders may contain the sign, too
        env_id, equals, file = (text, "", "") if Path(text).is_dir() else text.partition("=")
        path = Path(file if equals else text)
        if equals:
            check_environment(parser, text, env_id)
            if not path.is_file():
                parser.error(f"{text}: there is no file {path}")
        runs = [path] if equals else sorted({found.parents[1] for found in path.rglob("args.yml")})
        if not runs:
            parser.error(f"{text}: there is no run of RL Zoo in it (no folder with args.yml)")
        sources += [(env_id if equals else "", run) for run in runs]
    if len(sources) > MAX_AGENTS:
        parser.error(f"at most {MAX_AGENTS} agents fit side by side, but there are {len(sources)}")

    films: dict[str, list[Image.Image]] = {}
    for env_id, path in sources:
        # RL Zoo prints what it loads
        with redirect_stdout(io.StringIO()):
            try:
                agent = load_file(env_id, path, options.algo, options.seed) if env_id else load_run(path, options.seed)
            # of another algorithm, or trained on another task
            except (ValueError, AssertionError) as error:
                parser.error(f"{path}: {error}")
        normalized = unwrap_vec_normalize(agent.env) is not None
        print(f"{agent.env_id}: {path}, {'with' if normalized else 'without'} statistics of VecNormalize")
        if agent.env_id in films:
            parser.error(f"two agents for {agent.env_id}: one film shows one agent for each task")
        films[agent.env_id] = film(agent, max(1, round(options.seconds * options.fps)), options.fps, options.height)
        agent.env.close()
    gif = encode(side_by_side(films), options.fps, options.colors)
    megabytes = len(gif) / 1e6
    if megabytes > options.max_megabytes:
        parser.error(
            f"the GIF would take {megabytes:.2f} MB, and --max-megabytes allows {options.max_megabytes:g}: lower "
            "--seconds, --fps, --height or --colors"
        )
    options.output.write_bytes(gif)
    print(f"{options.output}: {megabytes:.2f} MB")
    return options.output


if __name__ == "__main__":
    main()
