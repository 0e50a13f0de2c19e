"""What flows: frozen types and protocols. Data contracts, never neural networks."""
