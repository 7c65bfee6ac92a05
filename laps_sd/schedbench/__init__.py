"""The scheduler and Redis under load, alone: workers that cost nothing. The command is `laps-sd bench scheduler`."""
