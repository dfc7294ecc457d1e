"""Generates common/rpc/gen from protos/, or with --check fails if what is committed is stale."""

import argparse
import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
OUT = ROOT / "common" / "rpc" / "gen"
# protoc writes imports relative to protos/; the generated package lives below common.rpc.gen.
PROTO_IMPORT = re.compile(r"^from pdserve\.v1 import", re.MULTILINE)


def generate() -> dict[Path, str]:
    """The generated files' text by their path below OUT."""
    sources = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        arguments = ["protoc", f"-I{PROTOS}", f"--python_out={scratch}", f"--pyi_out={scratch}", f"--grpc_python_out={scratch}"]
        if protoc.main([*arguments, *sources]) != 0:
            sys.exit("protoc failed")
        made = {p.relative_to(scratch) for p in Path(scratch).rglob("*.py*")}
        texts = {p: PROTO_IMPORT.sub("from common.rpc.gen.pdserve.v1 import", (Path(scratch) / p).read_text()) for p in made}
    return texts | {p / "__init__.py": "" for p in (Path(), Path("pdserve"), Path("pdserve/v1"))}


def stale(texts: dict[Path, str]) -> list[str]:
    """Files that differ from, are missing in, or do not belong to OUT."""
    present = {p.relative_to(OUT) for p in OUT.rglob("*.py*") if "__pycache__" not in p.parts}
    wrong = [p for p, text in texts.items() if p not in present or (OUT / p).read_text() != text]
    return sorted(str(p) for p in [*wrong, *(present - texts.keys())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if the committed code is stale")
    check = parser.parse_args().check
    texts = generate()
    if check:
        if wrong := stale(texts):
            sys.exit(f"generated code is stale, run `make protos`: {', '.join(wrong)}")
        return
    for name in stale(texts):
        (OUT / name).unlink(missing_ok=True)
    for path, text in texts.items():
        (OUT / path).parent.mkdir(parents=True, exist_ok=True)
        if not (OUT / path).exists() or (OUT / path).read_text() != text:
            (OUT / path).write_text(text)


if __name__ == "__main__":
    main()
