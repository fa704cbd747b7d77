"""From the command line to a group of ranks: who started this process, in which world, and how others are started."""
