"""The protocols of clients: each turns bodies into Requests (edge/run/request.py), and events into responses."""
