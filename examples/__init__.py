"""Short programs, one for each task; training/ is the program that scripts/demo.sh runs."""
