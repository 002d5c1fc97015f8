"""Models that draft for another one."""
