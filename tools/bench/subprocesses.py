"""Options and measured processes that tools/bench_train and tools/bench_finetune share."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def add_options(parser: argparse.ArgumentParser, implementations: tuple[str, ...]) -> None:
    """Add the options of a comparison of implementations."""
    models = sorted(path.stem for path in (ROOT / "conf/model").glob("*.yaml"))
    parser.add_argument("--model", default="llama-demo", choices=models, metavar="NAME", help="a file of conf/model (default %(default)s)")
    parser.add_argument("--batch", type=positive, default=8, help="sequences per step (default %(default)s)")
    parser.add_argument("--sequence", type=positive, default=256, help="tokens per sequence (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=10, help="timed steps per round, after the warmup (default %(default)s)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16", help="as precision.dtype (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="runs per implementation (default %(default)s)")
    parser.add_argument("--only", choices=implementations, action="append", help="run only this implementation (may be repeated)")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: measure the CPU time of the process, for a machine under other load (set OMP_NUM_THREADS=1 too: idle threads spin)",
    )


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def run(script: str, implementation: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the measurements of one implementation from a new process, on the first GPU only: Trainer would use all of them."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "tools/bench" / script), json.dumps({"implementation": implementation, **settings})]
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if process.returncode:
        print(f"{Path(sys.argv[0]).name}: {implementation} failed; the error is printed above", file=sys.stderr)
        sys.exit(process.returncode)
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def describe(options: argparse.Namespace, machine: dict[str, Any]) -> str:
    """Return the first line of a report."""
    model = f"{options.model}, {machine['parameters'] / 1e6:.1f} M parameters; {options.batch} x {options.sequence} tokens, {options.dtype}"
    return f"{model}; {machine['device']}, {machine['peak'] / 1e12:.3g} TFLOP/s in a matrix product"


def run_rounds(
    script: str, options: argparse.Namespace, settings: dict[str, Any], implementations: tuple[str, ...]
) -> dict[str, list[dict[str, float]]]:
    """Return the measurements of each implementation in each round; within a round, they alternate."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in implementations if name in (options.only or implementations)}
    for number in range(options.rounds):
        for name, results in rounds.items():
            results.append(run(script, name, settings))
            print(f"round {number + 1}: {name} {results[-1]['tokens_per_second']:,.0f} tokens/s", file=sys.stderr, flush=True)
    print(f"medians of {options.rounds} rounds of {options.steps} steps, {options.clock} clock\n")
    return rounds
