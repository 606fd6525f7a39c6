"""Progress bars on a terminal's standard error, and nothing elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@contextmanager
def bar(title: str, total: int, unit: str = "", enabled: bool = True) -> Iterator[Callable]:
    """Show a bar with rate and time left; yields advance(n). Silent when not on a terminal."""
    if not (enabled and sys.stderr.isatty()):
        yield lambda _count: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(show_speed=False),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total, rate="")

        def advance(count: int) -> None:
            progress.advance(task, count)
            speed = progress.tasks[0].speed
            progress.update(task, rate=f"{speed:,.0f} {unit}/s" if speed and unit else "")

        yield advance
