"""Make the development environment: create it, install everything, say what was installed.

Run by `make` with any Python 3.11 or newer; uses the standard library alone. A machine with a
working NVIDIA driver gets the CUDA builds, any other the CPU build of torch: from pip's own
configuration or $TORCH_INDEX where they offer it, else from PyTorch's CPU index, which uv knows.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_CONSTRAINTS = ROOT / "tools" / "constraints-cpu.txt"
MIN_PYTHON = (3, 11)
EXTRAS = ("torch", "jax")

VERSIONS = """
import platform, torch, jax
build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
print(f"ready: Python {platform.python_version()}, torch {torch.__version__} ({build}), "
      f"jax {jax.__version__} ({jax.default_backend()})")
raise SystemExit(3 if torch.version.cuda else 0)
"""


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def has_nvidia_gpu() -> bool:
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0 and "GPU" in found.stdout


def is_usable(python: Path) -> bool:
    probe = f"import sys, pip; sys.exit(sys.version_info < {MIN_PYTHON})"
    try:
        return subprocess.run([python, "-c", probe], capture_output=True).returncode == 0
    except OSError:
        return False


def create_venv(venv: Path) -> Path:
    """Return the Python of `venv`, made anew unless it already works."""
    python = venv / "bin" / "python"
    if is_usable(python):
        return python
    if venv.exists() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists():
        sys.exit(f"setup: error: {venv} exists and is not a virtual environment")
    say(f"creating {venv} with Python {sys.version.split()[0]}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
    return python


class Pip:
    """pip of one environment; quiet where nobody watches."""

    def __init__(self, python: Path) -> None:
        index = os.environ.get("TORCH_INDEX")
        self.python = python
        self.options = ["--extra-index-url", index] if index else []

    def _command(self, *arguments: str) -> list[str]:
        return [str(self.python), "-m", "pip", "install", *self.options, *arguments]

    def install(self, *arguments: str) -> None:
        quiet = [] if sys.stdout.isatty() else ["--quiet"]
        subprocess.run(self._command(*quiet, *arguments), check=True, cwd=ROOT)

    def would_install(self, *arguments: str) -> list[str]:
        command = self._command("--quiet", "--dry-run", "--report", "-", *arguments)
        report = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        return [item["metadata"]["name"].lower() for item in json.loads(report.stdout)["install"]]


def install_cpu_torch(pip: Pip) -> None:
    """Install torch's CPU build where `pip install torch` would bring CUDA."""
    constraint = ["--constraint", str(CPU_CONSTRAINTS)]
    wanted = pip.would_install(*constraint, "torch")
    if not any(name.startswith(("nvidia-", "cuda-")) for name in wanted):
        return
    say("no NVIDIA GPU, and pip's indexes offer torch with CUDA only: asking PyTorch's CPU index")
    pip.install("uv>=0.7.14")
    uv = [str(pip.python), "-m", "uv", "pip", "install", "--python", str(pip.python)]
    uv += ["--torch-backend", "cpu", *constraint, "torch"]
    if subprocess.run(uv, cwd=ROOT).returncode:
        say("PyTorch's CPU index cannot be reached; going on with the CUDA build, several GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    venv = ROOT / parser.parse_args().venv

    gpu = has_nvidia_gpu()
    pip = Pip(create_venv(venv))
    pip.install("pip>=25.1")  # the first with --group
    requirements = ["--group", "dev", "--editable"]
    if gpu:
        requirements += [f".[{','.join((*EXTRAS, 'gpu'))}]"]
    else:
        install_cpu_torch(pip)
        requirements += [f".[{','.join(EXTRAS)}]", "--constraint", str(CPU_CONSTRAINTS)]
    say(f"installing the libraries for {'an NVIDIA GPU' if gpu else 'the CPU'}")
    pip.install(*requirements)

    status = subprocess.run([pip.python, "-c", VERSIONS], cwd=ROOT).returncode
    if status not in (0, 3):
        sys.exit("setup: error: the installed torch or jax cannot be imported")
    if status == 3 and not gpu:
        say("this torch works on the CPU. For the smaller CPU build: `make distclean`, then")
        say("TORCH_INDEX=<address of a package index with torch's CPU builds> make ...")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        command = " ".join(str(part) for part in error.cmd)
        sys.exit(f"setup: error: exit status {error.returncode} from: {command}")
