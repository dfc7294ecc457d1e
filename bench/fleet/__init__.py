"""Many simulated workers in few processes, each with its own address, registration and state, and with faults on demand."""
