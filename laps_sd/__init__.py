"""What a person types: the `laps-sd` command and the Python client. Services are reached by the wire alone."""
