"""What a server gains from sparse layers: steps of its scheduler, replayed with dense and with sparse layers."""
