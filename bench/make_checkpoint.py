"""Write a checkpoint with random weights and a real geometry: ``python bench/make_checkpoint.py --help``."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from synthetic import (
    GEOMETRIES,
    TINY_FAMILIES,
    Layout,
    Quantised,
    geometry_config,
    tiny_config,
    write_checkpoint,
)
from synthetic.gguf_writer import write_gguf
from synthetic.tokenizer import SMALLEST_VOCAB, write_tokenizer
from synthetic.writer import random_values

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def main() -> None:
    """Parse the command line and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--like", choices=GEOMETRIES, help="real geometry")
    what.add_argument("--tiny", choices=TINY_FAMILIES, metavar="FAMILY", help=f"one of {', '.join(TINY_FAMILIES)}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write to, in the transformers format")
    parser.add_argument(
        "--gguf", type=Path, metavar="FILE", help="GGUF file to write; with --layout fused, of the same weights"
    )
    parser.add_argument("--type", default="Q4_K", help="of experts in the GGUF file (default: %(default)s)")
    parser.add_argument("--down-type", help="of their down projections (default: as --type)")
    parser.add_argument("--dense-type", default="Q8_0", help="of other matrices there (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="decoder layers (default: as published; tiny: 2 or 3)")
    parser.add_argument("--experts", type=int, help="routed experts per layer (default: as published; tiny: 8)")
    parser.add_argument("--vocab", type=int, help="vocabulary entries (default: 32000; tiny: 320)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--layout", choices=[*Layout], default=Layout.PER_EXPERT.value, help="how experts are stored")
    parser.add_argument("--format", choices=[*Quantised], help="store quantised weights, as their publishers do")
    parser.add_argument("--sharded-mb", type=int, default=2000, metavar="MB", help="most data in one file, 10^6 bytes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.out is None and args.gguf is None:
        parser.error("give --out DIR or --gguf FILE, or both")
    for name in ("layers", "experts", "sharded_mb"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, is {getattr(args, name)}")
    if args.vocab is not None and args.vocab < SMALLEST_VOCAB:
        parser.error(f"--vocab must be at least {SMALLEST_VOCAB} (three special tokens and 256 bytes), is {args.vocab}")
    if args.like:
        config = geometry_config(args.like, layers=args.layers, experts=args.experts, vocab=args.vocab or 32000)
    else:
        config = tiny_config(args.tiny, layers=args.layers, experts=args.experts or 8, vocab=args.vocab or 320)
    start = time.perf_counter()
    if args.out is not None:
        folder = write_checkpoint(
            config,
            args.out,
            seed=args.seed,
            dtype=DTYPES[args.dtype],
            layout=args.layout,
            shard_bytes=args.sharded_mb * 10**6,
            form=args.format,
        )
        _say(folder, sorted(folder.glob("*.safetensors")), start)
    if args.gguf is not None:
        with tempfile.TemporaryDirectory() as tokenizer:
            write_tokenizer(Path(tokenizer), config.vocab_size)
            write_gguf(
                config,
                args.gguf,
                args.type,
                lambda name, shape: random_values(name, shape, DTYPES[args.dtype], args.seed),
                down_kind=args.down_type,
                dense_kind=args.dense_type,
                tokenizer=Path(tokenizer),
            )
        _say(args.gguf, [args.gguf], start)


def _say(where: Path, files: list[Path], start: float) -> None:
    size = sum(file.stat().st_size for file in files)
    print(f"{where}: {size / 1e6:,.1f} MB in {len(files)} files, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
