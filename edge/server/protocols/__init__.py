"""What programs speak: bodies of requests to one form (`Asked`), and events to responses."""
