"""What measures, predicts and compares: profiles and kits, predictions, quality, search, tuning and their reports."""
