"""The server: the protocols that programs speak to local models, over sessions inside one memory budget.

A request of any protocol becomes an `Asked` (asked.py); a model's worker thread (worker.py) answers with events
(events.py), which the protocol's file turns into its own JSON. `pool.py` loads models and evicts them.
"""
