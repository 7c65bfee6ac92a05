"""The live page at `/`: what the service does at this moment, for people. Its files, its feed, who may see it, and the
box that sends a prompt. The texts of requests are never on it."""
