"""`edge chat`: the command, its lines, and the commands that begin with a slash."""
