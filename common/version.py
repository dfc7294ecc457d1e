"""The product's version. The protocol's is PROTOCOL_VERSION in common/work.py."""

VERSION = "0.1.0"
