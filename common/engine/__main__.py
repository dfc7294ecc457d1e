"""An engine's own process: common/engine/process_child.py, where classes have the same name on both sides."""

from __future__ import annotations

from common.engine.process_child import main

if __name__ == "__main__":
    main()
