"""Where it runs: processes, Ray actors, engines, trainers, the command line."""
