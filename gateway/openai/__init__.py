"""The OpenAI-compatible HTTP API: bodies to requests, answers to JSON, streams to server-sent events. The work itself
is gateway.front's; ports, keys and errors are gateway.http's."""
