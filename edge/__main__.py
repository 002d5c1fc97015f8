"""`python -m edge`."""

from edge.cli import main

main()
