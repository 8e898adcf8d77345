"""What moerl knows of SGLang's servers: their HTTP API, their answers, and how requests are spread over several."""
