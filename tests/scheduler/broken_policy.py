"""A file that cannot be imported, for tests of policies from elsewhere."""

1 / 0  # noqa: B018
