"""SGLang as an engine: its own server, started and watched by a small process of ours.

    engine actor -> supervisor (__main__, supervisor) -> SGLang's server (server) -> its schedulers

The actor turns the run file into server arguments (arguments) and refuses those that the installed
SGLang does not have (installed). Above the HTTP contract nobody knows which engine answers.
"""
