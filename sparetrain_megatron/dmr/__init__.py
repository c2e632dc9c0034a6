"""Running twice and comparing. Knows torch; knows no training framework."""
