"""python -m qsrt_pack."""

from qsrt_pack.cli import main

main()
