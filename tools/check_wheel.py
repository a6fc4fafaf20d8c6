"""Check the one wheel in a folder: our four packages, nothing beside them, numpy alone as base."""

import sys
import zipfile
from email.parser import Parser
from pathlib import Path

PACKAGES = {"tq_core", "tq_torch", "tq_jax", "tq_cli"}


def problems(wheel: Path) -> list[str]:
    found = []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata_name = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(metadata_name).decode())
    dist_info = metadata_name.split("/")[0]
    top = {name.split("/")[0] for name in names} - {dist_info}
    if top != PACKAGES:
        found.append(f"top-level names: expected {sorted(PACKAGES)}, got {sorted(top)}")
    found += [
        f"{package}/{file} is missing"
        for package in sorted(PACKAGES)
        for file in ("__init__.py", "py.typed")
        if f"{package}/{file}" not in names
    ]
    base = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    if len(base) != 1 or not base[0].startswith("numpy"):
        found.append(f"base dependencies: expected numpy alone, got {base}")
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"error: expected one wheel in {folder}, found {len(wheels)}")
    found = problems(wheels[0])
    if found:
        sys.exit("\n".join(f"error: {wheels[0].name}: {problem}" for problem in found))
    print(f"{wheels[0]}: {wheels[0].stat().st_size / 1024:.0f} kB, contents as intended")


if __name__ == "__main__":
    main()
