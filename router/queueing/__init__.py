"""Who waits in the router, for how long, and whose turn is next."""
