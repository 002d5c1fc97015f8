"""How fast a plan will run, and what it will spend: counted work, a device's ceilings, earlier runs."""
