"""The workers: how they register, what they report, how well they do, and which of them a request goes to."""
