"""From a name or a file to a session: the model is opened, engines race, and a plan is loaded."""
