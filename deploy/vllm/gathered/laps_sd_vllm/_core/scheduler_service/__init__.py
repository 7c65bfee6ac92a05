"""The scheduler: the only owner of queue state and of Redis; it answers every worker report with a plan."""
