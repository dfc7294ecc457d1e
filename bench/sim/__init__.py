"""How placement policies compare on a simulated fleet under the same traffic."""
