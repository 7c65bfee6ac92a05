"""`laps-sd bench gateway`: a real gateway process, between a scheduler and HTTP clients that cost next to nothing."""
