"""Device code, written in Triton and so beyond mypy. Callers use the typed functions of the modules above this package."""
