"""The protocols of clients: each turns bodies of requests into one form (`Asked`), and events into responses."""
