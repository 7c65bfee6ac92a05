"""The worker: a model that drafts and verifies, and its link to the scheduler. Order and queues are not its own."""
