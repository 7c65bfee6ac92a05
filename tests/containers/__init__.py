"""The stack in containers, built and run with whatever engine is installed: `make test-containers`."""
