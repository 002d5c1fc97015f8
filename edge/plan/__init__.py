"""What fits a budget: options are checked, configurations tried from the best on, and their bytes counted."""
