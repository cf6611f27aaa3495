"""Run what needs a GPU and record it in one file: `gpu` tests, benchmarks and kernel report.

python scripts/bench/gpu.py
python scripts/bench/gpu.py --output my_gpu.txt
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch

from dkcls.cli.version import version_lines

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("gpu_check.txt"), help="where the record goes"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "gpu-check: there is no CUDA or ROCm device on this machine, and nothing to check.",
            file=sys.stderr,
        )
        return 1
    steps = [
        ["-m", "pytest", "-q", "-m", "gpu", "tests"],
        ["-m", "dkcls", "bench", "what=ops", "device=cuda", "shapes=models"],
        ["-m", "dkcls", "bench", "what=networks", "device=cuda"],
        ["scripts/bench/kernels.py"],
    ]
    failed = 0
    with arguments.output.open("w") as record:
        record.write("\n".join(version_lines()) + "\n")
        for step in steps:
            title = f"\n$ python {' '.join(step)}\n"
            print(title, end="", flush=True)
            record.write(title)
            with subprocess.Popen(
                [sys.executable, *step],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    print(line, end="", flush=True)
                    record.write(line)
            record.write(f"exit code {process.returncode}\n")
            failed += process.returncode != 0
    print(f"\nwrote {arguments.output}; {failed} of {len(steps)} steps failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
