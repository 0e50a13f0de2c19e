"""HTTP on the wire: the engine contract and its client. The only user of httpx."""
