"""Models as network servers: a websocket transport, a batching queue, and one file a protocol."""
