"""What a client may ask for: the validated request, and the rules that its fields are held to."""
