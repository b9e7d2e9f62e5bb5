"""Many requests on one open model: continuous batching, and an HTTP server that speaks OpenAI's API."""
