"""Regular files, and durable writes."""
