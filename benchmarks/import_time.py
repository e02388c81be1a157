"""Import times. Targets: at most 0.1 s over ``import torch``; ``linnet --help`` at most 0.3 s.

    python benchmarks/import_time.py --json import_time.json

Every measurement is a fresh process; contestants take turns. The cost of ``import linnet`` is measured
inside the process, after torch has been imported, and beside it as the difference of whole processes.
``linnet --help`` is the whole process, as a person sees it, less nothing; that it does not import torch
is checked as well.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from measure import Row, parser, publish, setup

INSIDE = "import torch, time; t = time.perf_counter(); import linnet; print(time.perf_counter() - t)"
NAMES = (
    "import torch, time; t = time.perf_counter(); import linnet; "
    "[getattr(linnet, name) for name in linnet.__all__]; print(time.perf_counter() - t)"
)
HELP = "import sys; sys.argv = ['linnet', '--help']; from linnet.app.cli import main; sys.exit(main())"
NO_TORCH = (
    "import sys, contextlib, io\n"
    "sys.argv = ['linnet', '--help']\n"
    "from linnet.app.cli import main\n"
    "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
    "    main()\n"
    "print('torch' in sys.modules)\n"
)


def run(code: str) -> tuple[float, str]:
    """Seconds of a fresh interpreter that runs some code, and what it printed."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(f"a measured program failed:\n{done.stderr}")
    return seconds, done.stdout.strip()


def middle(values: Sequence[float]) -> float:
    """Median."""
    return statistics.median(values)


def main() -> None:
    """Entry point."""
    options = parser(__doc__ or "", repeats=7).parse_args()
    setup(options.threads)
    programs = {
        "python": "pass",
        "torch": "import torch",
        "linnet": "import torch, linnet",
        "inside": INSIDE,
        "names": NAMES,
        "help": HELP,
    }
    for code in programs.values():
        run(code)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(options.repeats):
        for name, code in programs.items():
            whole, printed = run(code)
            seconds[name].append(float(printed) if name in ("inside", "names") else whole)
    torch_imported = run(NO_TORCH)[1].splitlines()[-1] == "True"
    whole = middle(seconds["linnet"]) - middle(seconds["torch"])
    rows = [
        Row("python -c pass", middle(seconds["python"])),
        Row("import torch", middle(seconds["torch"])),
        Row(
            "import linnet after import torch (ratio: seconds)",
            middle(seconds["inside"]),
            middle(seconds["inside"]),
            "<=",
            0.1,
            f"difference of whole processes {whole:.3f} s",
        ),
        Row(
            "import linnet and every public name (ratio: seconds)",
            middle(seconds["names"]),
            middle(seconds["names"]),
            "<=",
            0.1,
            "names are imported when first used; this uses them all",
        ),
        Row(
            "linnet --help (ratio: seconds)",
            middle(seconds["help"]),
            middle(seconds["help"]),
            "<=",
            0.3,
            f"min {min(seconds['help']):.3f} s; torch imported: {torch_imported}",
        ),
    ]
    publish("Import", rows, options.json, torch_imported_by_help=torch_imported)


if __name__ == "__main__":
    main()
