"""`python -m tests.containers.stand_in`: stand-ins for the base images, where no registry of images can be reached: a
Debian by debootstrap with this machine's own Python in /usr/local, and Debian's Redis. Needs root, podman, debootstrap.

They check our files, not those images. On a machine without systemd podman may need `runtime = "runc"`,
`cgroup_manager = "cgroupfs"` and `default_ulimits` in /etc/containers/containers.conf.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PYTHON_IMAGE, REDIS_IMAGE = "localhost/laps-sd-stand-in/python:3.11-slim", "localhost/laps-sd-stand-in/redis:7"
SUITE = "bookworm"
# What CPython's modules are linked with.
LIBRARIES = "libssl3 libsqlite3-0 libffi8 liblzma5 libbz2-1.0 zlib1g libreadline8 libncursesw6 libuuid1 libexpat1"
PACKAGES = f"ca-certificates netbase tzdata {LIBRARIES}".split()
DOCUMENTS = ("doc", "man", "locale", "info")
UNUSED = shutil.ignore_patterns(
    "__pycache__", "test", "tests", "idlelib", "tkinter", "ensurepip", "*.a", "site-packages", "config-3*"
)
PIP = "#!/usr/local/bin/python3\nimport sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n"
REDIS = """FROM {base}
RUN apt-get update && apt-get install --yes --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/* \\
    && install --directory --owner=redis --group=redis /data
WORKDIR /data
"""


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True)


def add_python(root: Path) -> None:
    """Into /usr/local, as the official image has it, with pip and setuptools and nothing else."""
    local, own = root / "usr" / "local", Path(sys.base_prefix)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copytree(own / "lib" / version, local / "lib" / version, ignore=UNUSED)
    shutil.copytree(Path(sys.base_prefix, "lib", version, "ensurepip"), local / "lib" / version / "ensurepip")
    packages = local / "lib" / version / "site-packages"
    packages.mkdir()
    wheels = (local / "lib" / version / "ensurepip" / "_bundled").glob("*.whl")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, *wheels)
    for library in (own / "lib").glob("libpython*.so*"):
        shutil.copy2(library, local / "lib", follow_symlinks=False)
    run("strip", "--strip-unneeded", *(each for each in (local / "lib").glob("libpython*") if not each.is_symlink()))
    (local / "bin").mkdir(exist_ok=True)
    shutil.copy2(own / "bin" / version, local / "bin" / version)
    for name in ("python", "python3"):
        (local / "bin" / name).symlink_to(version)
    pip = local / "bin" / "pip"
    pip.write_text(PIP)
    pip.chmod(0o755)
    run("chroot", root, "ldconfig")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        run("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, root)
        for unused in ("var/cache/apt/archives", "var/lib/apt/lists", *(f"usr/share/{name}" for name in DOCUMENTS)):
            shutil.rmtree(root / unused, ignore_errors=True)
        add_python(root)
        run("tar", "--create", "--file", f"{folder}/image.tar", "--directory", root, ".")
        run("podman", "import", "--change", "ENV=PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            f"{folder}/image.tar", PYTHON_IMAGE)  # fmt: skip
        Path(folder, "Dockerfile").write_text(REDIS.format(base=PYTHON_IMAGE))
        run("podman", "build", "--isolation=chroot", "--pull-never", "--tag", REDIS_IMAGE, folder)


if __name__ == "__main__":
    main()
