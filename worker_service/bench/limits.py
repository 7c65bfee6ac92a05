"""Bounds of the bench that its flags tell and its engine keeps."""

MAX_DRAFT = 8
