"""The server: the protocols that programs speak to local models, over sessions inside one memory budget.

A body of any protocol becomes Requests (edge/run/request.py); a model's worker thread (worker.py) answers with events
(events.py), which the protocol's file turns into its own JSON. `pool.py` loads models and evicts them.
"""
