"""Commands that make models, and folders for apps and pages."""
