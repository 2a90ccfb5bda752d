"""DeepSpeed's configuration, key by key: taken over, read by DeepSpeed's part of the engine, or refused."""
