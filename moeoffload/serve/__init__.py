"""Serves many requests with one open model: continuous batching, and an HTTP server with OpenAI's API."""
