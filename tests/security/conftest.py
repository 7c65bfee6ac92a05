"""Certificates of one stack, made once; an exact copy for those who change them."""

import shutil
from pathlib import Path

import pytest

from laps_sd.authority import make_certs


@pytest.fixture(scope="session")
def made_certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_certs(folder)
    return folder


@pytest.fixture
def certs(made_certs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made_certs, tmp_path / "certs"))
