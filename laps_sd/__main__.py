"""`python -m laps_sd` is the `laps-sd` command."""

from laps_sd.cli import main

if __name__ == "__main__":
    main()
