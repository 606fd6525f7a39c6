"""The command line. Data goes to standard output, everything else to standard error.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. A command's module is loaded when
the command runs, so that --help is quick.
"""

from qsrt_pack.cli import convert, measure, publish, read
from qsrt_pack.cli.group import main

__all__ = ["main"]

for command in (
    convert.convert,
    convert.calibrate_command,
    read.validate,
    read.inspect_command,
    read.decode,
    measure.eval_command,
    measure.report_command,
    measure.bench_command,
    publish.push_command,
    publish.pull_command,
):
    main.add_command(command)
