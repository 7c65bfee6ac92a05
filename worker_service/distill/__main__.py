"""`python -m worker_service.distill` is `laps-sd distill`."""

from worker_service.distill.command import app

if __name__ == "__main__":
    app(prog_name="laps-sd distill")
