"""The router's text side needs neither torch nor transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit

MODULES = (
    "common.model_dir", "common.fingerprint", "router.text.chat_template", "router.text.detokenizer", "router.text.prompts",
    "router.text.stop_strings", "router.text.text_stream", "router.text.tokenizer", "router.request.validation",
)  # fmt: skip


def test_text_modules_import_neither_torch_nor_transformers() -> None:
    code = f"import sys, {', '.join(MODULES)}; print(sorted({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"
