"""An engine that computes nothing: what is real in it and what is not, see docs/simulator.md. Nothing here imports torch."""
