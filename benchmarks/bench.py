"""Compare hf_muon with other Muons: `make bench`, or with a Python that has this package:

python -m benchmarks.bench
python -m benchmarks.bench --device cuda --only orthogonalization --dion PATH_TO_CHECKOUT

Writes a CSV for each benchmark, machine.json and tables.md into --out.
"""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

from benchmarks import tables
from benchmarks.tables import BENCHMARKS

_HERE = Path(__file__).resolve().parent
_PACKAGES = ("transformers", "deepspeed", "llamafactory", "gram-newton-schulz", "quack-kernels", "triton")


def _number(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def add_dion(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--dion``, a checkout of microsoft/dion."""

    def checkout(path: str) -> str:
        if not (Path(path) / "dion").is_dir():
            raise argparse.ArgumentTypeError(f"{path} is not a checkout of microsoft/dion, it has no folder dion")
        return os.path.abspath(path)

    parser.add_argument(
        "--dion",
        type=checkout,
        default=os.environ.get("HF_MUON_BENCH_DION"),
        help="a checkout of microsoft/dion if it is not installed; default: HF_MUON_BENCH_DION",
    )


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. An invalid option ends the program with the valid values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    add("--dtype", choices=("bf16", "fp32"), help="of all products on a CPU; default: that of ns_dtype: auto")
    add("--rounds", type=_number, help="measured rounds; default 5 on a CPU, 15 on CUDA")
    add("--threads", type=_number, default=1, help="of a CPU; with more than one, wall time is measured")
    add_dion(parser)
    add("--out", type=Path, help="default benchmarks/results/DEVICE, or build/bench with --quick")
    add("--quick", action="store_true", help="tiny shapes, to check that everything runs")
    add("--redraw", action="store_true", help="write tables.md from the CSV files in --out, without measuring")
    options = parser.parse_args(argv)
    if options.dtype and options.device != "cpu":
        parser.error("--dtype is for --device cpu: on CUDA the functions of other packages choose their own dtypes")
    results = _HERE.parent / "build" / "bench" if options.quick else _HERE / "results" / options.device
    options.out = options.out or results
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
    import torch

    from benchmarks.measure import machine, setting_on, versions
    from hf_muon.math.precision import NS_DTYPES

    if options.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            "--device cuda: torch sees no CUDA device. Use --device cpu, or a torch that is built for CUDA"
        )
    torch.set_num_threads(options.threads)
    if options.dtype:  # before anything resolves auto
        NS_DTYPES["auto"] = NS_DTYPES[options.dtype]
    setting = setting_on(
        options.device, quick=options.quick, rounds=options.rounds, threads=options.threads, dion=options.dion
    )
    gemm, dtype = setting.gemm, str(setting.dtype).removeprefix("torch.")
    setting.say(f"{dtype} products: {gemm.rate / 1e9:.4g} GFLOP/s at {gemm.size}; {setting.clock.kind}")
    for benchmark in options.only:
        load = os.getloadavg()[0]
        rows = importlib.import_module(f"benchmarks.{benchmark}").run(setting)
        others = {
            **versions(*_PACKAGES),
            "device": "cpu" if setting.on_cpu else torch.cuda.get_device_name(setting.device),
            "dtype": dtype,
            "GEMM GFLOP/s": round(gemm.rate / 1e9, 1),
            "GEMM size": gemm.size,
            "clock": setting.clock.kind,
            "rounds": options.rounds,
            "quick": options.quick,
            "load before": load,
            "left out": dict(setting.missing),
        }
        tables.write(options.out, benchmark, rows, machine(**others))


def main() -> None:
    """Measure, and write the tables."""
    options = arguments()
    if not options.redraw:
        measure(options)
    print(f"written: {tables.summary(options.out)}")


if __name__ == "__main__":
    main()
