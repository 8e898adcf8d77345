"""A server that speaks SGLang's HTTP API without a model, and fails in every known way when it is told to: `app.py`."""
