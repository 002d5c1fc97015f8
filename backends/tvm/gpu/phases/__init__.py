"""The phases of a pass: each core has a file of its own."""
