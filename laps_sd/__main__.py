"""The program `laps-sd`, also `python -m laps_sd`. It imports nothing before Ctrl-C is looked after."""

from laps_sd.interrupt import quietly


def main() -> None:
    quietly(_run)


def _run() -> None:
    from laps_sd.cli import app

    app(prog_name="laps-sd")


if __name__ == "__main__":
    main()
