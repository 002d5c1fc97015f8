"""Several continuations of one conversation: forks, votes and outlines."""
