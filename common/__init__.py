import os

# Before anything imports gRPC, which reads it once. What it writes by itself to stderr is no line of ours, neither text nor JSON,
# and whoever reaches a port can cause it, once a connection. Who looks for a fault sets the variable.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
