"""Progress on stderr: lines in pipes, bars on terminals."""

import io

import pytest
from rich.console import Console

from ecinn.cli.progress import bars
from ecinn.progress import INTERVAL, SLOW, Lines, Progress, format_figures
from ecinn.progress import bars as show


class Log:
    """Lines at times that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.written: list[str] = []
        self.observe = Lines(self.written.append, clock=lambda: self.now)

    def report(self, after: float, done: int, total: int = 100, **figures: float) -> list[str]:
        """Report one task and return the new lines."""
        self.now += after
        before = len(self.written)
        self.observe(Progress("work", done, total, figures))
        return self.written[before:]


def test_a_short_task_writes_only_its_end() -> None:
    log = Log()
    assert log.report(0, 0) == []
    assert log.report(SLOW / 2, 50) == []
    assert log.report(SLOW / 4, 100) == ["work: 100/100  done in 2 s"]


def test_a_long_task_writes_now_and_then() -> None:
    log = Log()
    assert log.report(0, 0) == []
    assert log.report(SLOW, 10) == ["work: 10/100  18 s left"]
    assert log.report(INTERVAL - 1, 20) == []
    assert log.report(1, 20) == ["work: 20/100  48 s left"]
    assert log.report(INTERVAL - 1, 100) == ["work: 100/100  done in 21 s"]


def test_tasks_are_timed_one_by_one() -> None:
    log = Log()
    log.report(0, 0)
    log.observe(Progress("other", 5, 5))
    assert log.written == ["other: 5/5  done in 0 s"]
    assert log.report(SLOW, 10) == ["work: 10/100  18 s left"]
    log.report(1, 100)
    assert log.report(60, 0) == []  # the same task again starts anew


def test_every_epoch_is_written_when_it_ends() -> None:
    log = Log()
    assert log.report(0, 25, loss=3.0, epoch=1, epochs=2) == []
    assert log.report(1, 50, loss=2.0, epoch=1, epochs=2) == []
    assert log.report(0.4, 75, loss=1.5, epoch=2, epochs=2) == [
        "work: 50/100  loss 2.000  epoch 1/2  2 s left"
    ]
    assert log.report(0.4, 100, loss=1.0, epoch=2, epochs=2) == [
        "work: 100/100  loss 1.000  epoch 2/2  done in 2 s"
    ]


def test_a_line_is_written_once() -> None:
    log = Log()
    log.report(0, 0, epoch=1)
    assert len(log.report(SLOW, 50, epoch=1)) == 1
    assert log.report(0.1, 75, epoch=2) == []
    assert log.report(0.1, 100, epoch=3) == [
        "work: 75/100  epoch 2  1 s left",
        "work: 100/100  epoch 3  done in 2 s",
    ]


def test_the_time_left_counts_only_the_work_of_this_run() -> None:
    log = Log()
    log.report(0, 80)  # a resumed run
    assert log.report(SLOW, 90) == ["work: 90/100  2 s left"]


def test_figures_have_names_digits_and_units() -> None:
    figures = {
        "epoch": 3,
        "epochs": 10,
        "loss": 1.23456,
        "bits_per_dim": 0.98765,
        "error": 0.01234,
        "images_per_second": 12345.6,
        "learning_rate": 3e-4,
    }
    assert format_figures(figures) == (
        "epoch 3/10  loss 1.235  bits/dim 0.988  error 1.23 %  12,346 images/s"
        "  learning rate 0.0003"
    )
    assert format_figures({}) == ""


def test_pipes_get_lines_and_brackets_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    with bars() as observe:
        observe(Progress("reading [bold]", 7, 7))
    assert capsys.readouterr().err == "reading [bold]: 7/7  done in 0 s\n"


def test_a_line_stays_one_line_on_a_narrow_console() -> None:
    console = Console(file=io.StringIO(), width=20)
    with show(console) as observe:
        observe(Progress("a task with a long name", 3, 3, {"loss": 0.5, "error": 0.25}))
    (line,) = console.file.getvalue().splitlines()
    assert line.startswith("a task with a long name: 3/3  loss 0.500  error 25.00 %")


def test_terminals_get_bars_of_running_tasks() -> None:
    stream = io.StringIO()
    terminal = Console(file=stream, force_terminal=True, width=120, highlight=False)
    with bars(terminal) as observe:
        observe(Progress("training", 1, 4, {"loss": 2.5}))
    last_frame = stream.getvalue().rpartition("training")[2]
    assert "1/4" in last_frame
    assert "loss 2.500" in last_frame
    with bars(terminal) as observe:
        observe(Progress("training", 4, 4, {"loss": 1.5}))
        observe(Progress("measuring", 1, 2))
    last_frame = stream.getvalue().rpartition("measuring")[2]
    assert "1/2" in last_frame
    assert "training" not in last_frame
