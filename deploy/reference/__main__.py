"""Writes the tables into their pages."""

from deploy.reference.pages import PAGES, page

for file in PAGES:
    file.write_text(page(file))
