"""One display of all runs."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from sb3_uatrpo.study.record import Record


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("– steps/s" if task.speed is None else f"{task.speed:,.0f} steps/s")


class StudyProgress:
    """
    How many runs are done, under way and failed, steps per second over all of them, and the time left. Where
    the output is no terminal, only a line for each run that ends.

    :param n_runs: number of runs of the study
    :param n_steps: steps of those that are still to be run
    :param n_done: number of runs that are done already
    :param n_failed: number of runs that failed already and stay so
    """

    def __init__(self, n_runs: int, n_steps: int, n_done: int = 0, n_failed: int = 0) -> None:
        self.n_runs, self.n_steps = n_runs, n_steps
        self.n_done, self.n_failed = n_done, n_failed
        self.finished_steps = 0
        self.console = Console(stderr=True, highlight=False)
        self.progress = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.fields[n_done]}/{task.fields[n_runs]} done, {task.fields[n_running]} running"),
            TextColumn("{task.fields[n_failed]} failed"),
            _Speed(),
            TimeRemainingColumn(),
            console=self.console,
            refresh_per_second=2,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task(
            "", total=n_steps, n_done=n_done, n_runs=n_runs, n_failed=n_failed, n_running=0
        )

    def __enter__(self) -> "StudyProgress":
        self.progress.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.progress.stop()

    def ended(self, record: Record) -> None:
        """
        :param record: of a run that has just ended
        """
        if record.status == "done":
            self.n_done += 1
            self.finished_steps += record.spec.n_timesteps
        else:
            self.n_failed += 1
            # what is not done any more takes no time either
            self.n_steps -= record.spec.n_timesteps
        returns = record.episodes["returns"]
        result = f"last return {returns[-1]:.4g}" if returns else record.reason or "no episode ended"
        self.say(f"{record.status:6} {record.spec}: {result} ({record.wall_time:.0f} s)")

    def skipped(self, record: Record) -> None:
        """
        :param record: of a run that somebody else has done meanwhile
        """
        self.n_done += record.status == "done"
        self.n_failed += record.status == "failed"
        self.n_steps -= record.spec.n_timesteps

    def update(self, n_running: int, running_steps: int) -> None:
        """
        :param n_running: number of runs under way
        :param running_steps: steps that they have done
        """
        self.progress.update(
            self.task,
            completed=self.finished_steps + running_steps,
            total=self.n_steps,
            n_done=self.n_done,
            n_failed=self.n_failed,
            n_running=n_running,
        )

    def say(self, line: str) -> None:
        """
        :param line: printed above the display
        """
        self.console.print(line, markup=False, soft_wrap=True)
