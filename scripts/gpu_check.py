"""Run what needs a GPU and record it in one file: `gpu` tests, benchmark and kernel report.

python scripts/gpu_check.py [--output gpu_check.txt]
"""

import argparse
import platform
import subprocess
import sys
from pathlib import Path

import torch
import triton

ROOT = Path(__file__).parents[1]


def device_lines() -> list[str]:
    lines = [
        f"python {platform.python_version()}, torch {torch.__version__}, "
        f"triton {triton.__version__}"
    ]
    lines += [f"CUDA {torch.version.cuda}, HIP {torch.version.hip}, {platform.platform()}"]
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        lines.append(
            f"device {i}: {p.name}, {p.multi_processor_count} multiprocessors, "
            f"{p.total_memory / 2**30:.0f} GiB"
        )
    return lines


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
        ["scripts/bench_ops.py", "--device", "cuda", "--shapes", "models"],
        ["scripts/kernel_report.py"],
    ]
    failed = 0
    with arguments.output.open("w") as record:
        record.write("\n".join(device_lines()) + "\n")
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
