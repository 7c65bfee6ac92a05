"""`python deploy/audit.py [--strict]`: are there known vulnerabilities in what is installed here? pip-audit is asked.

Exit status 1 if there are. Where the advisories cannot be reached nothing is known, which is said loudly and fails
under --strict alone: a check that needs somebody else's server must not keep a network without one from building.
"""

import json
import subprocess
import sys
from typing import Any

TIMEOUT_S = 300
EDITABLE = "distribution marked as editable"  # what pip-audit says of a package that is developed here: of this one
COMMAND = [sys.executable, "-m", "pip_audit", "--local", "--skip-editable", "--format=json", "--progress-spinner=off"]


def ask() -> list[dict[str, Any]]:
    """What pip-audit says of each package but this one. Raises RuntimeError if it says nothing."""
    try:
        asked = subprocess.run(COMMAND, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        packages = json.loads(asked.stdout)["dependencies"]
        return [package for package in packages if package.get("skip_reason") != EDITABLE]
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no answer within {TIMEOUT_S} s") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RuntimeError((asked.stderr.strip().splitlines() or ["no answer"])[-1]) from None


def report(packages: list[dict[str, Any]]) -> tuple[int, int]:
    """Print the findings; returns how many packages have one, and how many nothing is known of."""
    bad = unknown = 0
    for package in packages:
        if "skip_reason" in package:
            unknown += 1
            continue
        found = package.get("vulns", [])
        bad += bool(found)
        for finding in found:
            fixed = ", ".join(finding["fix_versions"]) or "no version yet"
            print(f"{package['name']} {package['version']}: {finding['id']}, mended in {fixed}")
    return bad, unknown


def main() -> int:
    strict = "--strict" in sys.argv[1:]
    try:
        packages = ask()
    except RuntimeError as error:
        return shout(f"dependencies were NOT audited: {error}", strict)
    bad, unknown = report(packages)
    if bad:
        print(f"audit: {bad} of {len(packages)} packages have known vulnerabilities")
        return 1
    if unknown or not packages:
        return shout(f"{unknown} of {len(packages)} dependencies were NOT audited: no advisories to be had", strict)
    print(f"audit: no known vulnerabilities in {len(packages)} packages")
    return 0


def shout(problem: str, strict: bool) -> int:
    print(f"{'!' * 80}\n!! {problem}\n!! Run `make audit` where the advisories of PyPI can be reached.\n{'!' * 80}")
    return int(strict)


if __name__ == "__main__":
    sys.exit(main())
