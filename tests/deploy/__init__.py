"""Files of deploy/ that are read by other programs: what they name is what the code has."""
