"""Families that the engine serves: `make test-families`, outside the default run. tests.gpu runs them, too."""
