"""An OpenAI-compatible HTTP server for one loaded model, and the smoke test that talks to it as a client would."""
