"""The HTTP port: server, access, errors, and what every service answers (health, version, metrics)."""
