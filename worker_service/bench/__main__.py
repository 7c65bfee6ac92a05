"""`python -m worker_service.bench` is `laps-sd bench engine`."""

from worker_service.bench.command import app

if __name__ == "__main__":
    app(prog_name="laps-sd bench engine")
