"""Several processes that share one conversion: their communication, heartbeats and failures."""
