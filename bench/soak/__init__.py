"""Many requests through a simulated fleet that is being hurt, and whether every answer and every page is right at the end."""
