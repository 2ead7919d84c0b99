"""`python -m ecinn` is the command line."""

from ecinn.cli import main

main()
