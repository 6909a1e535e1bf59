"""``python -m fedtmle``."""

from fedtmle.cli import main

main()
