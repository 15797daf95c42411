"""`python -m zsim`."""

from zsim.cli import main

main()
