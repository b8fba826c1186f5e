"""Run the benchmarks in one command: `make bench`, or with a Python that has this package and matplotlib:

python benchmarks/bench.py
python benchmarks/bench.py --device cuda --only orthogonalization --dion PATH_TO_CHECKOUT

Writes a CSV and a picture for each benchmark, machine.json and tables.md into --out.
"""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

import tables
from tables import BENCHMARKS

_HERE = Path(__file__).resolve().parent
_PACKAGES = ("transformers", "deepspeed", "llamafactory", "gram-newton-schulz", "quack-kernels", "triton", "matplotlib")


def _number(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line; an invalid one ends the program with the valid values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=BENCHMARKS,
        default=list(BENCHMARKS),
        metavar="NAME",
        help=f"benchmarks to run: {', '.join(BENCHMARKS)}",
    )
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="of all products on a CPU; by default what ns_dtype: auto means there"
    )
    parser.add_argument("--rounds", type=_number, help="measured rounds; default 5 on a CPU, 15 on CUDA")
    parser.add_argument("--threads", type=_number, default=1, help="of a CPU; with more than one, measure wall time")
    parser.add_argument(
        "--dion",
        default=os.environ.get("HF_MUON_BENCH_DION"),
        help="a checkout of microsoft/dion if it is not installed; default: HF_MUON_BENCH_DION",
    )
    parser.add_argument("--out", type=Path, help="default benchmarks/results/DEVICE, or build/bench with --quick")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to check that everything runs")
    parser.add_argument(
        "--redraw", action="store_true", help="draw tables and pictures from the CSV files in --out, without measuring"
    )
    options = parser.parse_args(argv)
    if options.dion and not (Path(options.dion) / "dion").is_dir():
        parser.error(f"--dion {options.dion}: not a checkout of microsoft/dion, there is no folder dion in it")
    if options.dtype and options.device != "cpu":
        parser.error("--dtype is for --device cpu: on CUDA the functions of other packages choose their own dtypes")
    options.out = options.out or (
        _HERE.parent / "build" / "bench" if options.quick else _HERE / "results" / options.device
    )
    options.rounds = options.rounds or (1 if options.quick else 5 if options.device == "cpu" else 15)
    if options.redraw and not any((options.out / f"{name}.csv").exists() for name in BENCHMARKS):
        parser.error(f"--redraw: {options.out} holds no CSV of {', '.join(BENCHMARKS)}")
    return options


def measure(options: argparse.Namespace) -> None:
    """Run the benchmarks in `options.only`, and write the CSV of each when it is done.

    Raises:
        RuntimeError: `options.device` is cuda, and torch sees no CUDA device.
    """
    # torch reads this when it is imported, so no line above may import torch.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if options.device == "cpu":  # torch.compile would take minutes for other packages' functions
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import meters
    import torch
    from setting import setting_on

    from hf_muon.math.precision import NS_DTYPES

    if options.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            "--device cuda: torch sees no CUDA device. Use --device cpu, or a torch that is built for CUDA"
        )
    torch.set_num_threads(options.threads)
    if options.dtype:  # nothing has asked what auto means before
        NS_DTYPES["auto"] = NS_DTYPES[options.dtype]
    setting = setting_on(
        options.device, quick=options.quick, rounds=options.rounds, threads=options.threads, dion=options.dion
    )
    device, clock, gemm = setting.device, setting.clock, setting.gemm
    name = str(setting.dtype).removeprefix("torch.")
    setting.say(f"{name} products: {gemm.rate / 1e9:.4g} GFLOP/s at {gemm.size}; {clock.kind}; {options.rounds} rounds")
    for benchmark in options.only:
        load = os.getloadavg()
        rows = importlib.import_module(benchmark).run(setting)
        environment = meters.machine(
            **_versions(),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            dtype=name,
            **{
                "GEMM GFLOP/s": round(gemm.rate / 1e9, 1),
                "GEMM size": gemm.size,
                "clock": clock.kind,
                "rounds": options.rounds,
                "quick": options.quick,
                "load before": load[0],
                "left out": dict(setting.missing),
            },
        )
        tables.write(options.out, benchmark, rows, environment)


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    installed = {}
    for package in _PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def main() -> None:
    """Measure, and write tables and pictures."""
    options = arguments()
    if not options.redraw:
        measure(options)
    print(f"written: {tables.summary(options.out)}")
    try:
        import pictures
    except ImportError as error:
        print(f'no pictures: {error}. Install matplotlib (pip install -e ".[bench]"), and run again with --redraw')
        return
    for path in pictures.draw(options.out):
        print(f"written: {path}")


if __name__ == "__main__":
    main()
