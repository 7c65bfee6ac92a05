"""Bounds of the bench that its flags tell and its engine keeps."""

MAX_DRAFT = 8
MAX_DRAFT_OVER_STAGES = 16
